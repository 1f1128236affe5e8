"""`vlkv eval`: answers your own questions under several policies and compares quality, bytes and speed.

`records` reads the questions, `running` answers them, `journal` stores the answers, `metrics` scores them, and `report`
makes a table, a JSON file and a plot.
"""
