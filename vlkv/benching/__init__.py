"""The parts of `vlkv bench`.

`machine` describes the machine, `settings` the grid of measurements, `subjects` the models, `shapes` the inputs;
`programs` compiles, `measuring` measures, `results` stores results, `papers` contains published numbers, and `tables`
prints results beside them.
"""
