"""One command per file: `run(args)`, which returns text, JSON-able data or None. Its options are in options.toml.

`OPTIONS` has what their arguments take from code, as in `vlkv.terminal.add_options`.
"""
