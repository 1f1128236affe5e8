"""`vlkv eval`: answers your own questions under several policies and compares quality, bytes and speed.

`records` reads the questions, `running` answers them, `journal` stores the answers, `metrics` scores them, and `report`
makes a table, a JSON file and a plot.
"""

from __future__ import annotations

from vlkv.evaluation.journal import Journal
from vlkv.evaluation.metrics import METRICS
from vlkv.evaluation.records import Record, Turn, read_records
from vlkv.evaluation.report import summarise
from vlkv.evaluation.running import Settings, run

__all__ = ["METRICS", "Journal", "Record", "Settings", "Turn", "read_records", "run", "summarise"]
