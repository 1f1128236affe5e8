"""The settings of the five papers: every table and figure with its commands, and the published times and sizes.

`python -m benchmarks.papers` lists the commands. They are data: commands.toml and figures.toml, from which commands,
dry runs, timings and tests are made, and settings.toml with what the papers state.
"""
