"""The `vlkv` command. Bad input is one line on stderr and exit status 2; `--json` is for machines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from checkpoints_convert import __main__ as convert
from vlkv.commands import answer, bench, demo, evaluate, frontier, inspect, methods, plan, profile
from vlkv.compiled import keep_programs
from vlkv.terminal import OneLineParser, guarded


def build_parser() -> argparse.ArgumentParser:
    """All subcommands with their options."""
    parser = OneLineParser(prog="vlkv", description="Vision-language models in JAX with a compressed key-value cache.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module, summary in (
        ("demo", demo, "one question about one page under several methods; no arguments, no network"),
        ("generate", answer, "answer a question about an image"),
        ("policies", methods, "list the policies, or describe one"),
        ("inspect", inspect, "measure budgets, attention, survival or cost, as the papers draw them"),
        ("bench", bench, "time prefill and decoding, or a published table's settings"),
        ("profile", profile, "measure what share of its tokens each layer keeps, for PrefixKV"),
        ("eval", evaluate, "ask your own questions under several policies: quality against bytes and speed"),
        ("frontier", frontier, "which method, in how many bits, is best at which number of bytes"),
        ("plan", plan, "bytes per chip, collectives and times of a job, compiled for chips that are not there"),
        ("convert", convert, "convert a Hugging Face checkpoint"),
    ):
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        if module is not convert:
            command.add_argument(
                "--no-compile-cache", action="store_true", help="compile anew, and keep no programs for the next run"
            )
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    args = build_parser().parse_args(argv)
    if not getattr(args, "no_compile_cache", True):
        keep_programs()
    return guarded(lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
