"""Policies at equal bytes, the frontier by hand, and the command, whose line of Python makes the policy."""

import argparse
import json

import jax
import numpy as np
import pytest
from PIL import Image

import vlkv
from tests.evaluation.entries import answering
from tests.mechanisms import IN_BITS
from tests.models import CONFIG, unequal_batch
from vlkv import policies
from vlkv.cli import main
from vlkv.compression.compose import at_keep
from vlkv.compression.sizes import cache_spec
from vlkv.generation.prefill import fill_cache_with
from vlkv.mini import CHECKPOINT
from vlkv.policies import KIVI, AirCache, Composed, FastV, PrefixKV, Smooth, SnapKV, compose
from vlkv.tools.commands import evaluate, frontier
from vlkv.tools.evaluation import curves, statistics
from vlkv.tools.evaluation.keeps import at_bytes, relative_size, share_of_bytes

SNAP = SnapKV(keep=0.4, scope="vision")
COMPOSED = compose(AirCache(keep=0.1, window="text"), allocate=PrefixKV, smooth=Smooth(3), store=KIVI(bits=2))


def test_equal_bytes_by_hand():
    """A number of 4 bits in a group of 32 with two bfloat16 ranges takes 5 bits of 16."""
    assert relative_size(policies.TurboQuant(bits=3), head_dim=64) == 3.25 / 16
    assert relative_size(KIVI(bits=4)) == 5 / 16 and relative_size(KIVI(bits=2)) == 3 / 16
    assert at_bytes(SNAP, 0.1) == at_keep(SNAP, 0.1) and at_bytes(SNAP, 0.1).keep == 0.1
    quarter = at_bytes(SNAP, 0.1, 4)
    assert isinstance(quarter, Composed) and quarter.keep == 0.1 * 16 / 5 and quarter.slots.store == KIVI(bits=4)
    assert at_bytes(SNAP, 0.5, 2).keep == 1
    with pytest.raises(vlkv.InputError, match="bits=3"):
        at_bytes(SNAP, 0.1, 3)
    again = at_keep(COMPOSED, 0.3)
    assert (again.keep, again.slots.score.keep, again.slots.allocate.keep, again.slots.smooth) == (
        0.3,
        0.3,
        0.3,
        Smooth(3),
    )


def test_pool_bytes_are_those_that_prefill_allocates(params):
    """The prompt is read once for all that do not reduce it."""
    inputs, reduces, decoder = unequal_batch(), FastV(keep=0.5, layer=1), params.config.decoder
    every = [SNAP, COMPOSED, KIVI(bits=4), policies.TurboQuant(), *IN_BITS.values()]

    def pools():
        prompt = vlkv.read_prompt(params, inputs, observers=tuple(every))
        caches = [fill_cache_with(prompt, policy, None, new_tokens=1) for policy in every]
        return [(cache.k, cache.v) for cache in (*caches, vlkv.prefill(params, inputs, reduces, new_tokens=1)[0])]

    for policy, pool in zip([*every, reduces], jax.eval_shape(pools), strict=True):
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
        spec = cache_spec(
            policy, layers=decoder.full_layers, vision=inputs.max_vision, text=inputs.max_text, new_tokens=0
        )
        assert size == 3 * decoder.kv_heads * spec.pool_bytes(decoder.head_dim, 4), policy


def test_shares_of_bytes():
    inputs = unequal_batch()
    assert share_of_bytes(SNAP, CONFIG, inputs) == pytest.approx(0.4)
    assert share_of_bytes(at_bytes(SNAP, 0.1, 4), CONFIG, inputs) == pytest.approx(0.1, abs=0.01)
    assert share_of_bytes(KIVI(bits=2), CONFIG, inputs) == pytest.approx(3 / 16)
    for policy in IN_BITS.values():
        unequal = at_bytes(policy, 0.5, head_dim=CONFIG.decoder.head_dim)
        assert 0.4 < share_of_bytes(unequal, CONFIG, inputs) <= 0.5  # budgets are whole tokens
    whole, half = inputs.max_vision, inputs.max_vision / 2
    assert share_of_bytes(FastV(keep=0.5, layer=1), CONFIG, inputs) == pytest.approx((whole + 2 * half) / (3 * whole))


def test_the_text_makes_the_same_policy():
    for policy in (
        SNAP,
        COMPOSED,
        policies.Full(),
        compose(SnapKV(keep=0.4), step=policies.H2O),
        compose(SNAP, reduce=FastV(keep=0.5)),
        compose(FastV(keep=0.5), store=KIVI(bits=4)),
        at_keep(compose(FastV(keep=0.5), store=KIVI(bits=4)), 0.2),
    ):
        assert policies.make(policies.text_of(policy)) == policy
    assert policy == compose(FastV(keep=0.2), store=KIVI(bits=4)) and policy.slots.reduce.keep == 0.2


def test_two_classes_of_one_name_are_two_methods(tmp_path):
    source = "from vlkv import policies\n\n\nclass Mine(policies.SnapKV):\n    pass\n"
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text(source)
    args = argparse.Namespace(policy=[f"{file}:Mine" for file in files], quick=False, bits=[16], bytes=[0.1])
    plan = frontier._plan(args, vlkv.load_processor("mini"))
    assert [name for name, _, _ in plan] == ["Full", f"{files[0]}:Mine", f"{files[1]}:Mine"]
    args.policy = [f"first=/{files[0]}:Mine", f"{files[1]}:Mine", f"{files[0]}:Mine(window=8)", "snapkv", "random"]
    plan = frontier._plan(args, vlkv.load_processor("mini"))
    assert [name for name, _, _ in plan] == ["Full", "first", "Mine", "Mine(window=8)", "SnapKV", "Random"]


def test_the_frontier_by_hand():
    points = [
        dict(bytes=b, quality=q) for b, q in ((0.1, 0.5), (0.02, 0.5), (0.2, 0.9), (0.05, 0.4), (0.3, 0.9), (0.02, 0.1))
    ]
    assert [(p["bytes"], p["quality"]) for p in curves.pareto(points)] == [(0.02, 0.5), (0.2, 0.9)]
    assert curves.best_at(points, 0.1) == points[1] and curves.best_at(points, 0.01) is None
    np.testing.assert_allclose(statistics.wilson(0.3, 10), (0.1078, 0.6032), atol=1e-4)  # Wilson 1927


def test_a_plot_names_the_eight_best_lines_and_has_a_band_of_controls(tmp_path, monkeypatch):
    """Ten methods, of which method 0 is the worst and method 1 the next; controls are no lines."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    seen = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *a, **k: (seen.append(self), save(self, *a, **k)))
    values = [(f"method {i}", 0.1 * i) for i in range(10)] + [("Random", 0.05), ("ImgRandom", 0.15)]
    points = [dict(name=name, bits=16, bytes=share, quality=q, low=max(0, q - 0.02), high=q + 0.02, scope="vision")
              for name, q in values for share in (0.1, 0.2)]  # fmt: skip
    curves.plot(points, tmp_path / "a.png", title="t", label="l", full=0.95)
    _, labels = seen[0].axes[0].get_legend_handles_labels()
    assert sorted(label for label in labels if label.startswith("method")) == [f"method {i}" for i in range(2, 10)]
    assert "2 other methods" in labels and "controls: Random, ImgRandom" in labels


def test_the_command(capsys, tmp_path, monkeypatch):
    """Twice: the second run has nothing to ask, and says the same. The line of Python makes the policy."""
    pytest.importorskip("matplotlib")
    shares, bits, out = [0.2, 0.1], [16, 4], tmp_path / "out"
    pretend = answering(lambda policy: 4 if policy.keep == 1 else 3 if isinstance(policy, SnapKV) else 2)
    monkeypatch.setattr(evaluate, "run_all", pretend)
    command = ["frontier", "--policy", "snapkv", "--bytes", *map(str, shares), "--bits", *map(str, bits)]
    command += ["--questions", "4", "--batch", "2", "--max-new-tokens", "4", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(p["name"], p["bits"], p["quality"], p["cache_bytes"]) for p in result["points"]] == [
        ("Full", 16, 1, 0), ("SnapKV", 16, 0.75, 1000), ("SnapKV", 16, 0.75, 2000), ("SnapKV", 4, 0.5, 3000),
        ("SnapKV", 4, 0.5, 4000),
    ]  # fmt: skip
    found = [point["bytes"] for point in result["points"]]
    assert found == pytest.approx([1, 0.2, 0.1, 0.2, 0.1], abs=0.005)
    assert [(line["share"], line["quality"], line["bits"]) for line in result["best"]] == [
        (0.2, 0.75, 16), (0.1, 0.75, 16),
    ]  # fmt: skip
    assert (result["points"][1]["low"], result["points"][1]["high"]) == statistics.wilson(0.75, 4)
    with Image.open(out / "frontier.png") as picture:
        assert picture.width > 1000 and len(picture.convert("RGB").getcolors(2**24)) > 20
    before = (out / "journal.jsonl").read_bytes()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert (out / "journal.jsonl").read_bytes() == before
    line = next(line for line in said.splitlines() if line.startswith("from vlkv"))
    made = {}
    exec(line, made)
    assert line == result["best"][0]["python"] and made["policy"] == SnapKV(keep=0.1, scope="vision")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bytes", "0"], "--bytes 0.0 must lie in"),
        (["--metric", "perplexity"], "choose one that is a share of right answers"),
        (["--metric", "exact", "questions.jsonl"], "--questions 2 is a number of ledger pages"),
        (["--bits", "5"], "bits=5"),
        (["--model", "CHECKPOINT"], "give FILE.jsonl"),
        (["--policy", "prefixkv(profile='profile.json')"], "a profile is for one keep"),
    ],
)
def test_bad_input_is_one_line(refused, tmp_path, options, said):
    pytest.importorskip("matplotlib")
    options = [str(CHECKPOINT / ".") + "/../checkpoint" if option == "CHECKPOINT" else option for option in options]
    refused(main, "frontier", "--questions", "2", "--out", tmp_path / "out", *options, says=said)
    assert not (tmp_path / "out").exists()
