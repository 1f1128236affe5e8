"""The command line as a new user meets it, and the package as type checkers and installers see it."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table

import vlkv
from vlkv import policies
from vlkv.cli import COMMANDS, build_parser, main
from vlkv.terminal import progress_bar, track
from vlkv.tools.benching import tables


def examples(text):
    """The commands among the lines of a docstring; a backslash continues one."""
    lines = map(str.strip, text.replace("\\\n", " ").splitlines())
    return [shlex.split(line) for line in lines if line.startswith("vlkv ")]


@pytest.fixture(scope="module")
def parsers():
    parser = build_parser()
    return next(
        action.choices for action in parser._actions if isinstance(action.choices, dict) and "demo" in action.choices
    )


def test_alone_it_prints_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)


def test_version_without_loading_jax():
    code = """import sys
sys.argv = ["vlkv", "--version"]
try:
    import vlkv.__main__
finally:
    assert "jax" not in sys.modules
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"vlkv {vlkv.__version__}"


def test_every_help_has_examples_that_parse_and_says_defaults(parsers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name, parser in parsers.items():
        said, shown = parser.format_help(), examples(parser.description)
        assert shown, f"vlkv {name} --help has no example"
        for _, command, *arguments in shown:
            parsers[command].parse_args(arguments)
        assert max(map(len, said.splitlines())) <= 80, name
        for action in parser._actions:
            assert action.help, f"vlkv {name}: {action.dest} has no help"
            if action.default not in (None, False, [], "==SUPPRESS=="):
                assert "(default: " in said, f"vlkv {name}: {action.dest}"


def test_completion_knows_every_command_and_option(capsys):
    with pytest.raises(SystemExit):
        main(["--print-completion", "bash"])
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS) and "--from-cache" in said


def test_a_reader_who_stops_reading_is_no_error():
    """As in `vlkv policies | head -1`."""
    code = "import sys; from vlkv.cli import main; sys.exit(main(['policies', '--json']))"
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()
    assert run.wait() == 0 and run.stderr.read() == b""


def test_libtpu_without_a_tpu_is_left_alone():
    """Loading it prints alarms. Nothing to see where libtpu is not installed."""
    code = """import os
os.environ.pop("JAX_PLATFORMS", None)
from vlkv import cli
cli._skip_absent_tpu()
import jax
jax.devices()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "TPU" not in run.stderr


def test_tables_fit_eighty_columns(capsys):
    numbers = [f"{value}.123" for value in range(9)]
    names = ["policy", "prefill s", "ms/step", "token/s", "cache MiB", "peak GiB", "prefill", "decode", "peak"]
    table = Table("batch", *names, title="of the full cache")
    table.add_row("8", *numbers)
    table.add_row("8", *numbers[1:], numbers[0])
    tables.show(Console(width=80), table)
    said = capsys.readouterr().out
    assert "batch 8" in said and all(number in said for number in numbers)


def test_public_names_are_those_that_type_checkers_see(root):
    stub = ast.parse((root / "vlkv" / "__init__.pyi").read_text())
    listed = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert listed == set(vlkv.__all__)
    for name in listed:
        assert getattr(vlkv, name) is not None
    assert (root / "vlkv" / "py.typed").exists()


@pytest.mark.full
def test_mypy_sees_types_in_a_users_script(root, tmp_path):
    (tmp_path / "user.py").write_text(
        "import vlkv\nfrom vlkv import policies\n\n"
        'params, processor = vlkv.load("mini")\n'
        'inputs = processor("page.png", "read the page")\n'
        "output = vlkv.generate(params, inputs, policy=policies.AirCache(keep=0.1))\n"
        "text = processor.decode(output.tokens[0])\n"
        "reveal_type(processor)\nreveal_type(inputs)\nreveal_type(output)\nreveal_type(text)\n"
        "wrong: int = vlkv.Greedy()\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "", "--ignore-missing-imports", "user.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    for name in ("Processor", "Inputs", "Output", '"str | list[str]"'):
        assert f"{name}" in said, said
    assert "Any" not in said and "Incompatible types" in said, said


def test_methods_are_compared_with_one_scope():
    """H2O's default is "all", AirCache's "vision"; what the user names goes first."""
    from vlkv.tools.commands.options import policies_from

    def scopes(*options):
        args = build_parser("eval").parse_args(["eval", "x.jsonl", "--model", "mini", "--out", "x", "--keep", "0.5",
                                                "--policy", *options])  # fmt: skip
        return [policy.scope for policy in policies_from(args, lambda: None)[1:]]

    assert scopes("full", "h2o", "aircache") == ["vision", "vision"]
    assert scopes("full", "h2o", "snapkv") == ["all", "all"]
    assert scopes("full", "h2o", "aircache", "--scope", "all") == ["all", "all"]
    assert scopes("full", "h2o(scope='all')", "aircache") == ["all", "vision"]


def test_a_policy_without_a_keep_of_its_own_runs_once():
    from vlkv.tools.commands.evaluate import policies_from

    args = build_parser("eval").parse_args(["eval", "x.jsonl", "--model", "mini", "--out", "x", "--keep", "0.5", "0.2",
                                            "--policy", "downsample", "downsample(side=3)", "snapkv"])  # fmt: skip
    snapkv = [policies.SnapKV(keep=keep, scope="vision") for keep in (0.5, 0.2)]
    assert policies_from(args, lambda: None) == [policies.Downsample(), policies.Downsample(side=3), *snapkv]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_on_terminals_only(capsys, monkeypatch, terminal):
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")  # rich takes the first for a terminal
    monkeypatch.delenv("NO_COLOR" if terminal else "FORCE_COLOR", raising=False)
    with progress_bar("measuring", 3) as advance:
        advance()
        advance(2, text="the rest")
    with progress_bar("hidden", 1, hidden=True):
        pass
    assert list(track([1, 2], "reading")) == [1, 2]
    out, err = capsys.readouterr()
    assert out == "" and ("the rest" in err and "reading" in err if terminal else err == "") and "hidden" not in err
