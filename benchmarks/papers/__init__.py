"""The settings of the five papers: every table and figure with its commands, and the published times and sizes.

`python -m benchmarks.papers` lists the commands. One file per paper has its settings, from which commands, dry runs,
timings and tests are made.
"""
