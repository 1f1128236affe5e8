"""One's own questions, asked under several policies in one pass over the images: what `vlkv eval` runs.

`records` reads the questions, `running` asks them, `journal` remembers what was answered, `metrics` compares it with
the answers that were wanted, `report` puts it into a table, a JSON and a plot.
"""

from __future__ import annotations

from vlkv.evaluation.journal import Journal
from vlkv.evaluation.metrics import METRICS
from vlkv.evaluation.records import Record, Turn, read_records
from vlkv.evaluation.report import summarise
from vlkv.evaluation.running import Settings, run

__all__ = ["METRICS", "Journal", "Record", "Settings", "Turn", "read_records", "run", "summarise"]
