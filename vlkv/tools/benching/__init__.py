"""The parts of `vlkv bench`.

`machine` describes the machine, `settings` the models, the grid of measurements and the inputs; `programs` compiles,
`measuring` measures, `results` stores results, and `tables` prints them. `python -m benchmarks.papers.speed` measures
the settings of published tables.
"""
