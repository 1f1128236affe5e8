"""The `vlkv` command. Bad input is one line on stderr and exit status 2; `--json` is for machines."""

import argparse
import contextlib
import glob
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import shtab

import vlkv
from vlkv.terminal import INTERRUPTED, OneLineParser, guarded

# Name -> its module, imported when the command is run, and one line of help.
COMMANDS = {
    "demo": ("vlkv.tools.commands.demo", "one question about one page under several methods; no arguments, no network"),
    "generate": ("vlkv.tools.commands.answer", "answer a question about an image"),
    "chat": ("vlkv.tools.commands.conversation", "ask several questions about the same images"),
    "policies": ("vlkv.tools.commands.methods", "list the policies, or describe one"),
    "inspect": ("vlkv.tools.commands.inspect", "repeat the papers' measurements: budgets, attention, cost"),
    "bench": ("vlkv.tools.commands.bench", "time prefill and decoding"),
    "profile": ("vlkv.tools.commands.profile", "measure the shares of PrefixKV's layers, or where answers attend next"),
    "tune": ("vlkv.tools.commands.tune", "choose the smoothing of a method's scores on your questions"),
    "eval": ("vlkv.tools.commands.evaluate", "ask your own questions under several policies: quality, bytes and speed"),
    "frontier": ("vlkv.tools.commands.frontier", "which method, in how many bits, is best at which number of bytes"),
    "plan": ("vlkv.tools.commands.plan", "bytes per chip, collectives and times of a job, without the chips"),
    "convert": ("checkpoints_convert.__main__", "convert a checkpoint folder, Hugging Face's or its authors'"),
    "verify": ("vlkv.tools.commands.verify", "compare a checkpoint with transformers: logits and greedy tokens"),
}
_RESUMABLE = ("convert", "eval", "frontier", "tune")  # commands that keep what an interrupted run has finished


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of `vlkv`, with the options of one command; None: of all, which takes the imports of all."""
    parser = OneLineParser(
        prog="vlkv",
        description=f"{(vlkv.__doc__ or '').splitlines()[0]}\n\n  vlkv demo\n  vlkv COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"vlkv {vlkv.__version__}")
    shtab.add_argument_to(parser, "--print-completion", help="print a completion script for this shell")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (path, summary) in COMMANDS.items():
        added = commands.add_parser(name, help=summary)
        if command in (name, None):
            module = importlib.import_module(path)
            added.description = module.__doc__
            module.add_arguments(added)
            added.set_defaults(run=module.run)
            if name != "convert":
                text = "compile anew, and keep no programs for the next run"
                added.add_argument("--no-compile-cache", action="store_true", help=text)
            for action in added._actions:
                if action.metavar in ("FILE", "FILE.jsonl", "PNG", "JSON", "SRC", "DST", "DIR", "FOLDER"):
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; without a command, prints the help."""
    argv = sys.argv[1:] if argv is None else list(argv)
    _skip_absent_tpu()
    first = next(iter(argv), "--help")
    parser = build_parser(None if first.startswith("--print") else first)
    args = parser.parse_args(argv or [first])
    if not getattr(args, "no_compile_cache", True):
        importlib.import_module("vlkv.tools.compiled").keep_programs()
    return guarded(lambda: args.run(args))


def script() -> NoReturn:
    """Runs `main` as a process of its own.

    After Ctrl-C, Python must not clean up: XLA may still be compiling in other threads, which would crash.
    """
    try:
        status = main()
    except KeyboardInterrupt:  # while modules are imported
        status = INTERRUPTED
    if status == INTERRUPTED:
        resumes = "; the same command resumes" if sys.argv[1:2] and sys.argv[1] in _RESUMABLE else ""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        line_break = "\n" if sys.stderr.isatty() else ""  # after the terminal's ^C, perhaps within an answer
        print(f"{line_break}interrupted{resumes}", file=sys.stderr, flush=True)
        os._exit(status)
    sys.exit(status)


def _skip_absent_tpu() -> None:
    """Makes jax use the CPU if libtpu is installed without a TPU or GPU, because loading libtpu prints warnings."""
    if importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax_plugins") is not None:
        return
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


if __name__ == "__main__":
    script()
