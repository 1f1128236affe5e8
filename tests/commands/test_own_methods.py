"""A user's own methods on the command line: tried on shapes before weights are read, and named in tables."""

import json

import pytest

from vlkv import loading, policies
from vlkv.cli import main
from vlkv.mini import CHECKPOINT, PAGE
from vlkv.policies import syntax
from vlkv.tools.commands import evaluate
from vlkv.tools.commands.options import labels

SOURCE = """import jax.numpy as jnp
from vlkv import policies


class Good(policies.Policy):
    alpha: float = 0.5

    def score(self, obs):
        return self.alpha * obs.k[..., 0]


class Product(policies.Policy):
    def score(self, obs):
        return obs.k @ obs.v


class Branch(policies.Policy):
    def score(self, obs):
        return obs.k[..., 0] if obs.k.sum() > 0 else obs.k[..., 1]


class Shape(policies.Policy):
    def score(self, obs):
        return obs.k[0, :, 0]


class Numpy(policies.Policy):
    def score(self, obs):
        return __import__("numpy").linalg.norm(obs.k, axis=-1)


class Loop(policies.Policy):
    def score(self, obs):
        return sum(obs.k[..., i] for i in range(obs.valid.sum()))


class Masked(policies.Policy):
    def score(self, obs):
        return obs.k[:, obs.is_vision, 0]


class Number(policies.Policy):
    def score(self, obs):
        return obs.k[..., 0] * float(obs.k.mean())


class Budgets(Good):
    def allocate(self, statistics, *, total, most, layers):
        return statistics["absent"]


class Step(policies.DecodingStages):
    def score(self, obs):
        return obs.k[..., 0]

    def step(self, *args, **options):
        raise RuntimeError("no step\\nat all\\n\\nmore")


class Nothing(policies.Policy):
    pass


class Options(Good):
    def __post_init__(self):
        super().__post_init__()
        self.absent


class Falling(policies.PyramidKV):
    pass
"""


@pytest.fixture
def own(tmp_path):
    folder = tmp_path / "my methods (1)"
    folder.mkdir()
    (folder / "own [2], a.py").write_text(SOURCE)
    return f"{folder}/own [2], a.py"


FAILS = {
    "Product": "a.py, line 14: TypeError: dot_general requires",
    "Branch": "a.py, line 19: TracerBoolConversionError: `if` cannot use an array's values: use jnp.where",
    "Numpy": "a.py, line 29: TracerArrayConversionError: use jax.numpy instead of numpy",
    "Loop": "a.py, line 34: TracerIntegerConversionError: range() and lists cannot use an array's values",
    "Masked": "a.py, line 39: NonConcreteBooleanIndexError: use jnp.where instead of a mask as index",
    "Number": "a.py, line 44: ConcretizationTypeError: float(), int() and sizes cannot use an array's values",
    "Shape": "a.py, line 23: Shape: score returned shape (128,): return one number per key head and token",
    "Budgets": "a.py, line 49: KeyError: 'absent'",
    "Step": "a.py, line 57: RuntimeError: no step at all",
    "Nothing": "a.py, line 60: NotImplementedError: Nothing has no method score(self, obs)",
    "Options": "a.py, line 67: AttributeError: 'Options' object has no attribute 'absent'",
}


@pytest.mark.parametrize("name", FAILS)
def test_a_stage_that_fails_is_named_by_its_line(own, refused, name):
    refused(main, "policies", f"{own}:{name}", "--check", says=FAILS[name])
    if name == "Shape":
        refused(main, "policies", f"n={own}:{name}", "--check", says=FAILS[name].replace("Shape", "n"))
    if name == "Budgets":
        refused(main, "policies", f"compose(snapkv, allocate={own}:{name})", "--check", says=FAILS[name])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\ndef f(:", "bad.py, line 2: SyntaxError: invalid syntax"),
        ("x = 1\ny = z", "bad.py, line 2: NameError: name 'z' is not defined"),
        ("import nosuch", "bad.py, line 1: ModuleNotFoundError: No module named 'nosuch'"),
        ("x = 1", "bad.py has no class 'Good'"),
    ],
)
def test_a_file_that_fails_is_named_by_its_line(tmp_path, refused, source, says):
    (tmp_path / "bad.py").write_text(source)
    refused(main, "policies", f"{tmp_path}/bad.py:Good", "--check", says=says)


def test_what_runs_on_shapes(own, capsys, refused):
    assert main(["policies", f"mine={own}:Good(alpha=0.2)", "--check"]) == 0
    assert f"mine={own}:Good(keep=0.5, alpha=0.2): runs on the shapes of mini" in capsys.readouterr().out
    assert main(["policies", "fastv", "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == "reduce"
    refused(main, "policies", "--check", says="give its NAME")


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "eval", "frontier", "bench", "plan"])
def test_commands_try_own_methods_before_weights_are_read(own, refused, tmp_path, monkeypatch, command):
    def unexpected(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr(loading, "load_params", unexpected)
    page, model, out = ["--image", PAGE, "--prompt", "x"], ["--model", CHECKPOINT], tmp_path / "out"
    (tmp_path / "q.jsonl").write_text(json.dumps({"image": str(PAGE), "question": "x", "answer": "1"}))
    options = {
        "generate": [*model, *page], "chat": [*model, *page[:2]],
        "inspect": [*model, *page, "--what", "budgets", "--json"],
        "eval": [tmp_path / "q.jsonl", *model, "--out", out], "frontier": ["--questions", "2", "--out", out],
        "bench": ["--model", "tiny", "--prompt", "40", "--text", "8"],
        "plan": ["mini", "--topology", "v5e:1x1", "--prompt", "640"],
    }[command]  # fmt: skip
    keep = [] if command == "frontier" else ["--keep", "0.2"]
    refused(main, command, *options, *keep, "--policy", f"{own}:Product", says="line 14: TypeError")
    assert not out.exists()


def test_names_of_own_classes(own):
    """NAME stands in tables; the text makes the same policy again, within a composition too."""
    text = f"mine={own}:Good(alpha=0.2)"
    named = policies.make(text, keep=0.2)
    assert isinstance(named, policies.named(f"{own}:Good")) and type(named).__name__ == "mine" and named.alpha == 0.2
    assert policies.make(policies.text_of(named)) == named != policies.make(text.replace("mine=", ""), keep=0.2)
    assert policies.text_of(named, scope=True) == "mine(keep=0.2, scope='all', alpha=0.2)"
    whole = policies.make(f"compose(snapkv, allocate=my method={own}:Falling, store=kivi(bits=4))", keep=0.2)
    assert policies.make(policies.text_of(whole)) == whole
    assert "allocate=my method, store" in policies.text_of(whole, scope=True)
    assert [syntax.short(f"{name}some.module:Good(x=1)") for name in ("", "fast=")] == ["Good(x=1)", "fast(x=1)"]


def test_names_in_tables_are_what_the_user_wrote(own):
    other = own.replace("own [2]", "other")
    assert labels(["snapkv(window=8)", f"{own}:Good", f"a b={other}:Good(alpha=1)"]) == {
        "snapkv(window=8)": "snapkv(window=8)", f"{own}:Good": "Good", f"a b={other}:Good(alpha=1)": "a b(alpha=1)",
    }  # fmt: skip
    assert list(labels([f"{own}:Good", f"{other}:Good", f"{own}:Good"]).values()) == [f"{own}:Good", f"{other}:Good"]


def test_names_reach_the_results(own, tmp_path, capsys, monkeypatch):
    from tests.evaluation.entries import answering

    (tmp_path / "q.jsonl").write_text(json.dumps({"image": str(PAGE), "question": "x", "answer": "1"}))
    monkeypatch.setattr(evaluate, "run_all", answering(lambda policy: policy.keep == 1))
    monkeypatch.setattr(loading, "load_params", lambda *_, **__: {})
    command = ["eval", str(tmp_path / "q.jsonl"), "--model", "mini", "--out", str(tmp_path / "out"), "--keep", "0.5",
               "--policy", "full", f"mine={own}:Good", "snapkv(keep=0.2)", "--json"]  # fmt: skip
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["name"], row["keep"]) for row in rows] == [("full", 1), ("mine", 0.5), ("snapkv(keep=0.2)", 0.2)]
    assert rows[1]["policy"] == f"mine={own}:Good(keep=0.5)"
    assert [(row["exact"], row["from_full"].get("exact", [None])[0]) for row in rows] == [(1, None), (0, -1), (0, -1)]
