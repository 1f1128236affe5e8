"""What `vlkv bench` is made of: the grid, programs compiled apart, alternated measurement, papers.

`machine` says what it ran on, `settings` what is measured, `subjects` of which model, `prompts` on what, `programs`
compiles it, `measuring` times it, `results` keeps it, `papers` knows what was published, `tables` prints both.
"""
