"""One subcommand per file: `add_arguments(parser)` and `run(args)`, which returns text, JSON-able data or None."""
