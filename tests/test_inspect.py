"""`vlkv inspect` on the shipped miniature: every measure, from the command line to JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from PIL import Image

from vlkv.cli import main
from vlkv.commands import inspect as command
from vlkv.commands import plots, views
from vlkv.commands.views import WHAT
from vlkv.mini import pages

LAYERS, GRID = 3, 6
VISION, TEXT = GRID**2, 10
FAST = ("--max-new-tokens", "8")


@pytest.fixture(autouse=True)
def two_sweeps(monkeypatch):
    """Of the five: every value is a program of its own to compile."""
    monkeypatch.setattr(views, "SWEEPS", {"S": ("keep", (0.2, 0.6)), "P": ("prefill", (0.3,))})


@pytest.fixture(autouse=True)
def model(monkeypatch, miniature):
    """A few layers of the miniature take its place: as many as FastV's figure needs."""
    folder = miniature(LAYERS, GRID)
    monkeypatch.setattr(command, "CHECKPOINT", folder)
    return folder


@pytest.fixture(scope="module")
def measured():
    """What has been measured so far: each of them once."""
    return {}


@pytest.fixture
def inspect(capsys, measured):
    def run(what):
        if what not in measured:
            assert main(["inspect", "--what", what, *FAST, "--ranks", "6", "--json"]) == 0
            measured[what] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # strict JSON: no NaN
        return measured[what]

    return run


@pytest.mark.default("budgets")
@pytest.mark.parametrize("what", WHAT)
def test_every_measure_says_what_it_is_of(inspect, what):
    got = inspect(what)
    assert got["what"] == what and got["policy"] == WHAT[what].policy and got["picture"] is None
    assert got["options"]["keep"] == (WHAT[what].keep or 1.0)
    assert got["prompt_tokens"] == VISION + TEXT


def test_budgets_and_lorenz(inspect):
    got, curves = inspect("budgets"), inspect("lorenz")
    assert sum(got["entries"]) == math.floor(0.5 * LAYERS * (VISION + TEXT) + 0.5)
    assert got["entries"] == curves["budgets"]
    assert all(v <= n for v, n in zip(got["vision"], got["entries"], strict=True))
    np.testing.assert_allclose(np.array(curves["lorenz"])[:, -1], 1)
    assert np.ptp(curves["retained"]) < np.ptp(curves["retained_by_equal_budgets"])  # the point of PrefixKV
    assert np.corrcoef(curves["gini"], curves["budgets"])[0, 1] < -0.8  # concentrated: fewer entries (Fig. 4)


@pytest.mark.full
def test_strength_and_divergence(inspect):
    strength, divergence = inspect("strength"), inspect("divergence")
    np.testing.assert_allclose(np.sum(strength["importance"], axis=1), strength["strength"], rtol=1e-4)
    x = np.array(strength["importance"])
    z = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True, ddof=1)
    np.testing.assert_allclose(
        (z**3).sum(axis=1) * VISION / (VISION - 1) / (VISION - 2), strength["skewness"], rtol=1e-3
    )
    budgets = divergence["budgets"]
    assert set(budgets) == {"average", "strength", "skewness", "AirCache"}
    assert {round(sum(row)) for row in budgets.values()} == {math.floor(0.1 * LAYERS * VISION + 0.5)}
    p, q = (np.array(budgets[name]) / sum(budgets[name]) for name in ("strength", "skewness"))
    m = (p + q) / 2
    expected = (p * np.log2(p / m) + q * np.log2(q / m)).sum() / 2
    assert abs(divergence["between_budgets"]["strength & skewness"] - expected) < 1e-5
    assert len(divergence["between_budgets"]) == 6
    assert all(0 < value < 1 for value in divergence["self_and_cross"])


@pytest.mark.full
def test_sweep(inspect):
    got = inspect("sweep")
    assert got["S"]["values"] == [0.2, 0.6] and got["P"]["option"] == "prefill"
    few, many = got["S"]["stored"]
    assert few < many < 1
    # 0.45 asked for: P is raised to it.
    assert len(got["P"]["stored"]) == 1 and few < got["P"]["stored"][0] < many
    for part in (got["S"], got["P"]):
        assert all(0 < u <= s for u, s in zip(part["used"], part["stored"], strict=True))
        assert all(0 <= a <= 1 for a in part["agreement"])


@pytest.mark.full
def test_ranking_and_error(inspect):
    ranking, error = inspect("ranking"), inspect("error")
    assert ranking["ranks"] == np.rint(np.linspace(0, VISION, 7)).astype(int).tolist()
    assert all(value < 0 for value in ranking["log_probability"])
    assert np.shape(error["error"]) == (7, LAYERS)
    np.testing.assert_allclose(np.mean(error["error"], axis=0), error["mean"], rtol=1e-5)
    assert 0 < error["mean"][0] < error["mean"][-1] and 0 <= error["agreement"] <= 1


@pytest.mark.full
def test_attention_and_concordance(inspect):
    attention, concordance = inspect("attention"), inspect("concordance")
    shares = np.array(attention["shares"])
    assert shares.shape == (7, LAYERS, 4) and attention["types"] == ["system", "vision", "instruction", "new"]
    np.testing.assert_allclose(shares.sum(axis=-1), 1, atol=1e-4)
    with_layer, with_step = (np.array(concordance[f"with_first_{name}"]) for name in ("layer", "step"))
    assert with_layer.shape == with_step.shape == (2, 7, LAYERS)
    assert (with_layer[:, :, 0] == 1).all() and (with_step[:, 0] == 1).all()
    assert with_layer[:, :, 1:].min() >= 0 and with_layer[:, :, 1:].max() < 1


def test_survival_and_cost(inspect):
    survival, cost = inspect("survival"), inspect("cost")
    assert survival["computed"] == survival["cached"] == [VISION, VISION] + [VISION // 2] * (LAYERS - 2)
    (image,) = survival["cached_by_image"]
    assert np.shape(image) == (LAYERS, GRID, GRID)
    assert np.sum(image, axis=(1, 2)).tolist() == survival["cached"]
    assert cost["tokens"] == [n + TEXT for n in survival["computed"]]
    assert cost["cache_bytes"] == [n * 2 * 2 * 32 * 4 for n in cost["tokens"]]
    assert sum(cost["cache_bytes"]) <= cost["allocated_bytes"]
    assert cost["total"]["prefill_flops"] == sum(cost["prefill_flops"])
    assert 0.5 < cost["of_full"]["prefill_flops"] < cost["of_full"]["cache_bytes"] < 1


@pytest.mark.parametrize("what", ["cost", "survival"])  # curves, and maps
def test_a_table_and_a_picture(capsys, tmp_path, model, what):
    pytest.importorskip("matplotlib")
    page = pages.digit_page(pages.held_out_digits(), np.random.default_rng(5), rows=(2, 2))
    page.image.save(tmp_path / "page.png")
    question = ["--model", str(model), "--image", str(tmp_path / "page.png"), "--prompt", pages.READ_PAGE]
    out = tmp_path / "cost.png"
    assert main(["inspect", "--what", what, *question, *FAST, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "FastV" in said and "LightKV" in said and "layer" in said and "cost.png" in said.replace("\n", "")
    with Image.open(out) as picture:
        assert picture.width > 500 and len(set(picture.convert("L").getdata())) > 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cost.png", "page.png"]


def test_help_names_every_measure(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert all(what in said for what in WHAT)


def fails(capsys, *argv, says):
    assert main(["inspect", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and says in err, err


def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, model):
    fails(capsys, "--what", "budget", says="there are budgets, lorenz, strength")
    fails(capsys, "--what", "cost", "--image", "page.png", says="--image needs --model")
    fails(capsys, "--what", "cost", "--model", model, says="--model needs --prompt")
    fails(capsys, "--what", "cost", "--max-new-tokens", 1, says="--max-new-tokens 1")
    fails(capsys, "--what", "ranking", "--ranks", 0, says="--ranks 0")
    fails(capsys, "--what", "strength", "--policy", "snapkv", says="give keep=")
    fails(capsys, "--what", "strength", "--policy", "snapkv", "--keep", 0.2, "--json", says="AirCache's measure")
    fails(capsys, "--what", "lorenz", "--policy", "fastv", "--keep", 0.2, "--json", says="FastV shortens the prompt")
    text = ("--model", model, "--prompt", pages.READ_PAGE, "--json", *FAST)
    fails(capsys, "--what", "concordance", *text, says="no vision tokens")
    fails(capsys, "--what", "cost", "--out", tmp_path / "no" / "x.png", says="no such folder")
    fails(capsys, "--what", "cost", "--out", tmp_path / "x.pdf", says="ends in .png")
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    fails(capsys, "--what", "cost", "--out", tmp_path / "x.png", says="pip install matplotlib")
    assert not list(tmp_path.iterdir())
