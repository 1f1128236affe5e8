"""`vlkv eval`: answers your own questions under several policies and compares quality, bytes and speed.

`records` reads the questions, `running` answers them, `journal` stores the answers, `metrics` scores them, and `report`
makes a table, a JSON file and a plot.
"""

from vlkv.tools.evaluation.journal import Journal
from vlkv.tools.evaluation.metrics import METRICS
from vlkv.tools.evaluation.records import Record, Settings, Turn, read_records
from vlkv.tools.evaluation.report import summarise
from vlkv.tools.evaluation.running import run

__all__ = ["METRICS", "Journal", "Record", "Settings", "Turn", "read_records", "run", "summarise"]
