"""`vlkv eval --against kvpress` with stand-ins for kvpress and for both models: what it asks, keeps and prints.

tests/benchmarks/real/test_quality.py compares with kvpress itself, where it is installed.
"""

import json
import sys
import types

import jax.numpy as jnp
import pytest

import vlkv
from tests.evaluation.entries import answering
from tests.processing.conftest import TEXT_CONFIG, write_folder
from vlkv import loading, policies
from vlkv.cli import main
from vlkv.families import config_from_hf
from vlkv.mini import PAGE
from vlkv.processing import Processor
from vlkv.tools.commands import evaluate
from vlkv.tools.evaluation import peers
from vlkv.tools.evaluation.peers import PRESSES, Answer, press_of


class Presses(types.ModuleType):
    """A package in which every class returns its name and its arguments."""

    def __getattr__(self, name):
        return lambda *args, **options: (name, *args, options)


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", Presses("kvpress"))


def test_presses_have_the_options_of_the_policies(package):
    snapkv = ("SnapKVPress", 0.75, {"window_size": 16, "kernel_size": 3})
    for policy, wanted in (
        (policies.Full(), None),
        (policies.SnapKV(keep=0.2, window=16, kernel=3), snapkv),
        (policies.AdaKV(keep=0.2, window=16, kernel=3, pooling="avg", safeguard=0.0),
         ("AdaKVPress", snapkv, {"alpha_safeguard": 0.0})),
        (policies.CriticalKV(budget=9, window=16, kernel=3), ("CriticalKVPress", snapkv, {})),
        (policies.PyramidKV(keep=0.2, pooling="avg"),
         ("PyramidKVPress", 0.75, {"window_size": 8, "kernel_size": 7, "beta": 20})),
        (policies.StreamingLLM(keep=0.2, sinks=2), ("StreamingLLMPress", 0.75, {"n_sink": 2})),
        (policies.RoCo(keep=0.2, recent=0, spread=0.0, evict=False), ("ObservedAttentionPress", 0.75, {})),
    ):  # fmt: skip
        assert press_of(policy)(0.75) == wanted
    for policy, says in (
        (policies.H2O(keep=0.2), "kvpress has no such method"),
        (policies.compose(policies.SnapKV(keep=0.2), store=policies.KIVI(bits=4)), "kvpress has no such method"),
        (policies.SnapKV(keep=0.2, scope="vision"), "give --scope all"),
        (policies.TOVA(keep=0.2), "give recent=1, evict=False"),
        (policies.PyramidKV(keep=0.2), "give pooling='avg'"),
    ):
        with pytest.raises(vlkv.InputError, match=says):
            press_of(policy)
    known = {cls: cls.__dataclass_fields__ for cls in PRESSES}
    assert all(set(press.needs) <= set(known[cls]) for cls, press in PRESSES.items())


class Theirs:
    """Answers "yes" with the full cache, else "no", and notes what it is asked."""

    asked: list = []  # noqa: RUF012

    def __init__(self, folder, dtype):
        self.asked.append(("loaded", dtype))

    def prefill(self, ids, presses):
        self.asked.append((ids.tolist(), {name: press and press[1] for name, press in presses.items()}))
        return dict(presses), "logits", 0.0

    def answer(self, prompt, made, logits, stop, new):
        self.asked.append((prompt.fed.tolist(), new))
        return Answer(self.encode("yes" if made is None else "no").tolist(), 1.0, 64, 0.0, 0.5)


@pytest.fixture
def text_model(tmp_path, monkeypatch, package):
    """A processor with a token for each byte; our side and theirs are stand-ins."""
    folder = write_folder(tmp_path / "model", template=None)
    processor = Processor.from_folder(folder, config_from_hf(TEXT_CONFIG))
    monkeypatch.setattr(loading, "load_processor", lambda source: processor)
    monkeypatch.setattr(loading, "load_params", lambda *_, **__: {"x": jnp.zeros(3)})
    monkeypatch.setattr(evaluate, "run_all", answering(lambda policy: 2))
    monkeypatch.setattr(peers, "available", lambda: None)
    monkeypatch.setattr(peers, "Theirs", Theirs)
    monkeypatch.setattr(Theirs, "encode", lambda self, text: processor.encode(text, begin=False), raising=False)
    Theirs.asked.clear()
    rows = [{"context": "a long text", "question": f"q{i}?", "answer": "yes"} for i in range(2)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return processor, ["eval", str(tmp_path / "q.jsonl"), "--model", str(folder), "--out", str(tmp_path / "out"),
                       "--against", "kvpress", "--keep", "0.5", "--max-new-tokens", "5"]  # fmt: skip


def test_both_sides_are_in_one_table(text_model, capsys):
    processor, command = text_model
    command += ["--policy", "full", "snapkv", "h2o"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "not compared: h2o(keep=0.5, scope='all'): kvpress has no such method" in err
    assert "full, kvpress: 2 of 2 answers are the same as ours" in out
    assert "snapkv, kvpress: 0 of 2 answers are the same as ours" in out
    loaded, (ids, removed), *_ = Theirs.asked
    assert loaded == ("loaded", "float32")
    assert processor.decode(ids).endswith("q0?") and list(removed) == ["3", "4"] and removed["3"] is None
    kept = round(len(ids) / 2 + 1e-9) if len(ids) % 2 == 0 else len(ids) / 2
    assert (1 - removed["4"]) * len(ids) == pytest.approx(kept, abs=0.51)
    assert [asked for asked in Theirs.asked if asked == ([], 5)] == [([], 5)] * 4, "nothing is fed; five new tokens"
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["name"], row["exact"]) for row in rows] == [
        ("full", 1), ("snapkv", 1), ("h2o", 1), ("full, kvpress", 1), ("snapkv, kvpress", 0),
    ]  # fmt: skip
    assert rows[4]["from_full"]["exact"][0] == -1 and rows[4]["cache_bytes"] == 64
    assert len(Theirs.asked) == 1 + 2 * 3, "the second run has nothing to ask"


def test_before_the_question(text_model, capsys):
    processor, command = text_model
    assert main([*command, "--policy", "snapkv", "--query-agnostic"]) == 0
    _, (ids, _), (fed, _), *_ = Theirs.asked
    assert "q0" not in processor.decode(ids) and "q0?" in processor.decode(fed)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--policy", "full", "tova"], "--against kvpress: tova(keep=0.5, scope='all'): kvpress' press has other"),
        (["--policy", "snapkv", "--metric", "perplexity", "--max-new-tokens", "9"], "leave out the metric perplexity"),
        (["--policy", "snapkv"], "kvpress is missing: pip install '.[peers]'"),
        (["--policy", "snapkv", "--model", "mini"], "this model has a vision tower"),
    ],
)
def test_what_cannot_be_compared_is_one_line(text_model, refused, monkeypatch, more, says):
    monkeypatch.setattr(peers, "available", lambda: "kvpress is missing: pip install '.[peers]'")
    if "mini" in more:
        monkeypatch.undo()
    refused(main, *text_model[1], *more, says=says)


def test_questions_about_images_are_refused(text_model, refused, tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps({"image": str(PAGE), "question": "x", "answer": "yes"}))
    refused(main, *text_model[1], "--policy", "snapkv", says="line 1: --against kvpress needs questions of one turn")
