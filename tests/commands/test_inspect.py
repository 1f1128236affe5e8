"""`vlkv inspect` on the shipped miniature: every measure, from the command line to JSON."""

import functools
import json
import math
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

import vlkv
from tests import programs
from vlkv import analysis, policies
from vlkv.analysis import drawing, profiles
from vlkv.cli import main
from vlkv.mini import pages
from vlkv.tools.commands import case as cases
from vlkv.tools.commands import inspect as command
from vlkv.tools.commands import measures, plots
from vlkv.tools.commands.inspect import WHAT
from vlkv.tools.commands.samples import inputs_of, read_samples
from vlkv.tools.evaluation.records import Record, Turn

LAYERS, GRID = 4, 6
VISION = GRID**2
PAGE = next(pages.held_out(1))  # what is measured if nothing is given
FAST = ("--max-new-tokens", "8")


@pytest.fixture(autouse=True)
def model(monkeypatch, miniature):
    """A few layers of the miniature take its place: as many as LightKV's three stages need."""
    folder = miniature(LAYERS, GRID)
    monkeypatch.setattr(command, "CHECKPOINT", folder)
    return folder


@pytest.fixture(scope="module")
def measured():
    """What has been measured so far: each of them once."""
    return {}


@pytest.fixture
def text(model):
    """Text tokens of the prompt."""
    return int(vlkv.load_processor(model)(PAGE.image, PAGE.question).valid.sum()) - VISION


@pytest.fixture
def inspect(capsys, measured, text):
    """A measurement as JSON, which says what it is of."""

    def run(what):
        if what not in measured:
            assert main(["inspect", "--what", what, *FAST, "--json"]) == 0
            got = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # strict JSON: no NaN
            assert got["what"] == what and got["policy"].startswith(WHAT[what].policy.lower())
            assert WHAT[what].keep is None or f"keep={WHAT[what].keep}" in got["policy"]
            assert (got["prompt_tokens"], got["samples"], got["picture"]) == (VISION + text, 1, None)
            measured[what] = got
        return measured[what]

    return run


@pytest.mark.full
def test_budgets_and_lorenz(inspect, text):
    got, curves = inspect("budgets"), inspect("lorenz")
    assert sum(got["entries"]) == math.floor(0.5 * LAYERS * (VISION + text) + 0.5)
    assert got["entries"] == curves["budgets"]
    assert all(v <= n for v, n in zip(got["vision"], got["entries"], strict=True))
    np.testing.assert_allclose(np.array(curves["lorenz"])[:, -1], 1)
    assert np.shape(curves["lorenz"]) == (LAYERS, 101)
    assert np.ptp(curves["retained"]) < np.ptp(curves["retained_by_equal_budgets"])  # the point of PrefixKV
    assert np.corrcoef(curves["gini"], curves["budgets"])[0, 1] < -0.8  # concentrated: fewer entries (Fig. 4)


@pytest.mark.full
def test_strength_and_divergence(inspect):
    strength, divergence = inspect("strength"), inspect("divergence")
    np.testing.assert_allclose(np.sum(strength["importance"], axis=1), strength["strength"], rtol=1e-4)
    x = np.array(strength["importance"])
    z = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True, ddof=1)
    skewness = (z**3).sum(axis=1) * VISION / (VISION - 1) / (VISION - 2)
    np.testing.assert_allclose(skewness, strength["skewness"], rtol=1e-3)
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
def test_error(inspect):
    error = inspect("error")
    assert np.shape(error["error"])[1:] == (LAYERS,) and 1 <= len(error["error"]) <= 7  # the answer may end earlier
    np.testing.assert_allclose(np.mean(error["error"], axis=0), error["mean"], rtol=1e-5)
    assert 0 < error["mean"][0] < error["mean"][-1] and 0 <= error["agreement"] <= 1


@pytest.mark.full
def test_attention_and_concordance(inspect):
    attention, concordance = inspect("attention"), inspect("concordance")
    shares = np.array(attention["shares"])
    steps = len(shares)
    assert attention["types"] == ["system", "vision", "instruction", "new"]
    assert 1 <= steps <= 7 and shares.shape == (steps, LAYERS, 4)
    np.testing.assert_allclose(shares.sum(axis=-1), 1, atol=1e-4)
    with_layer, with_step = (np.array(concordance[f"with_first_{name}"]) for name in ("layer", "step"))
    assert with_layer.shape == with_step.shape == (2, steps, LAYERS)
    assert (with_layer[:, :, 0] == 1).all() and (with_step[:, 0] == 1).all()
    assert with_layer[:, :, 1:].min() >= 0 and with_layer[:, :, 1:].max() < 1
    with_last = np.array(concordance["with_last_layer"])  # the overlap of two layers is mutual
    assert (with_last[:, :, -1] == 1).all() and (with_last[:, :, 0] == with_layer[:, :, -1]).all()


@pytest.mark.full
def test_survival_and_cost(inspect, text, capsys, tmp_path, model):
    survival, cost = inspect("survival"), inspect("cost")
    assert survival["computed"] == survival["cached"] == [VISION, VISION] + [VISION // 2] * (LAYERS - 2)
    (image,) = survival["cached_by_image"]
    assert np.shape(image) == (LAYERS, GRID, GRID)
    assert np.sum(image, axis=(1, 2)).tolist() == survival["cached"]
    assert cost["tokens"] == [n + text for n in survival["computed"]]
    assert cost["cache_bytes"] == [n * 2 * 2 * 32 * 4 for n in cost["tokens"]]
    assert sum(cost["cache_bytes"]) <= cost["allocated_bytes"]
    memory = cost["memory"]
    assert memory["vision"] == sum(survival["cached"]) * 2 * 2 * 32 * 4
    assert memory["vision"] + memory["text"] == sum(cost["cache_bytes"]) < memory["weights"]
    assert cost["total"]["prefill_flops"] == sum(cost["prefill_flops"])
    assert 0.5 < cost["of_full"]["prefill_flops"] < cost["of_full"]["cache_bytes"] < 1
    pytest.importorskip("matplotlib")
    PAGE.image.save(tmp_path / "page.png")
    question = ["--model", str(model), "--image", str(tmp_path / "page.png"), "--prompt", PAGE.question]
    for what in ("cost", "survival"):  # curves, and maps
        out = tmp_path / f"{what}.png"
        assert main(["inspect", "--what", what, *question, *FAST, "--out", str(out)]) == 0
        said = capsys.readouterr().out
        assert "fastv(keep=0.5, scope='vision')" in said and "LightKV" in said and "layer" in said
        assert out.name in said.replace("\n", "")
        with Image.open(out) as picture:
            assert picture.width > 500 and len(set(picture.convert("L").getdata())) > 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cost.png", "page.png", "survival.png"]


def page_file(path):
    """Two pages and their questions as JSON lines."""
    rows = []
    for i, page in enumerate(pages.held_out(2)):
        page.image.save(path / f"{i}.png")
        rows.append(json.dumps({"image": f"{i}.png", "question": page.question}))
    (path / "both.jsonl").write_text("\n".join(rows))
    (path / "second.jsonl").write_text(rows[1])
    return path / "both.jsonl", path / "second.jsonl"


def test_the_mean_of_samples_by_hand():
    """Two samples, of which the second has one more step: its place is the mean of those that have it."""

    def view(numbers, count):
        panel = plots.Curves("t", "x", "y", np.arange(len(numbers)), {"a": np.array(numbers)})
        maps = plots.Maps("m", {"l": np.array([[count, np.nan]])})
        arrays = {"n": count, "a": [np.array(numbers)], "s": np.array(["text"]), "same": np.arange(2)}
        return cases.View(arrays, {}, [panel, maps])

    got = cases.mean_view([view([1.0, 3.0], 2), view([2.0, 5.0, 7.0], 4)])
    assert got.arrays["n"] == 3 and got.arrays["s"] == ["text"] and got.arrays["same"].dtype.kind == "i"
    np.testing.assert_array_equal(got.arrays["a"][0], [1.5, 4, 7])
    curves, maps = got.panels
    np.testing.assert_array_equal(curves.lines["a"], [1.5, 4, 7])
    np.testing.assert_array_equal(curves.spread["a"], [0.5, 1, 0])
    np.testing.assert_array_equal(curves.x, [0, 1, 2])
    np.testing.assert_array_equal(maps.pictures["l"], [[3, np.nan]])


@pytest.mark.full
def test_many_samples(capsys, tmp_path, model):
    """The mean of two held-out pages is that of the two rows of a file, and of a folder with one question."""
    both, second = page_file(tmp_path)

    def entries(*argv):
        assert main(["inspect", *map(str, argv), "--what", "budgets", *FAST, "--json"]) == 0
        got = json.loads(capsys.readouterr().out)
        return got["samples"], got["entries"]

    (one, first), (_, other) = entries(), entries(second, "--model", model)
    count, mean = entries("--samples", 2)
    assert (one, count) == (1, 2)
    np.testing.assert_allclose(mean, (np.array(first) + other) / 2)
    assert entries(both, "--model", model) == (2, mean)
    drawn = (first, other)[np.random.default_rng(0).permutation(2)[0]]
    assert entries(both, "--model", model, "--samples", 1) == (1, drawn)
    assert entries(tmp_path, "--model", model, "--prompt", PAGE.question)[0] == 2


@pytest.mark.full
def test_observers_and_patches(inspect):
    observers, patches = inspect("observers"), inspect("patches")
    assert list(observers["consistency"]) == list(measures.WINDOWS)
    for name, rows in observers["attention"].items():
        x = np.array(rows, np.float64)
        assert x.shape[1] == VISION and x.max() == 1
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        wanted = np.mean([a @ b for i, a in enumerate(unit) for b in unit[:i]] or [1])
        assert observers["consistency"][name][observers["layer"]] == pytest.approx(wanted, abs=1e-5)
    x = -np.sort(-np.array(patches["attention"]), axis=1)
    share = np.cumsum(x, axis=1) / x.sum(axis=1, keepdims=True)
    for row, few in zip(share, patches["tokens_for_80_percent"], strict=True):
        assert few == pytest.approx((np.flatnonzero(row >= 0.8 - 1e-6)[0] + 1) / VISION)


@pytest.mark.full
def test_densities_and_merged(inspect, model):
    densities, merged = inspect("densities"), inspect("merged")
    x = np.array(densities["log10_attention"])
    for rows in densities["density"].values():
        np.testing.assert_allclose(np.trapezoid(rows, x, axis=1), 1, atol=0.1)
    params, processor = vlkv.load(model)
    inputs = processor(PAGE.image, PAGE.question)
    assert densities["c"] == pytest.approx(profiles.cross_share(params, [inputs], policies.CSP(keep=0.2)), rel=1e-4)
    # Every patch belongs to one that is left, and these are the tokens that the layers after the stage compute.
    prompt = programs.read_prompt(params, inputs, policies.LightKV())
    reached = np.asarray(analysis.reached(prompt))[0]
    owners = analysis.merged_into(params, inputs, policies.LightKV())
    with pytest.raises(vlkv.InputError, match="no vision tokens"):
        analysis.merged_into(params, processor(None, "hello"), policies.LightKV())
    for stage, layer in zip(owners, policies.LightKV().reductions(LAYERS), strict=True):
        left = np.unique(stage[np.asarray(inputs.is_vision)[0]])
        np.testing.assert_array_equal(stage[left], left)
        np.testing.assert_array_equal(left, np.flatnonzero(reached[layer] & np.asarray(inputs.is_vision)[0]))
    assert merged["left"][-1] == len(left) and np.shape(merged["owner_by_image"]) == (1, len(owners), GRID, GRID)


def test_groups_of_patches_are_outlined():
    """Two of four patches in one group: their mean colour, and lines around the others."""
    base = Image.fromarray(np.array([[[0, 0, 0], [200, 0, 0]], [[0, 100, 0], [0, 0, 90]]], np.uint8))
    drawn = np.asarray(drawing.outlined(base, np.array([[0, 0], [2, 3]])))
    side = len(drawn) // 2
    assert tuple(drawn[1, 1]) == tuple(drawn[1, -1]) == (100, 0, 0)
    assert tuple(drawn[-1, 1]) == (0, 100, 0) and tuple(drawn[-1, -1]) == (0, 0, 90)
    assert (drawn[side] == drawing._FRAME).all() and (drawn[side:, side] == drawing._FRAME).all()
    assert (drawn[: side // 2, side] == (100, 0, 0)).all()


def test_values_over_several_decades_get_a_logarithmic_axis():
    assert plots._decades({"a": np.array([1e-4, 1.0]), "b": np.array([np.nan, 10.0])}) == pytest.approx(5)
    assert plots._decades({"a": np.array([0.0, 1000.0])}) == 0


def test_a_folder_may_hold_other_files(tmp_path):
    for name in ("b.png", "a.PNG", "notes.pdf", "clip.mpg"):
        (tmp_path / name).touch()
    assert [record.images[0].name for record in read_samples(tmp_path, "what?")] == ["a.PNG", "b.png"]


def test_bad_input_is_one_line(refused, monkeypatch, tmp_path, model):
    fails = functools.partial(refused, main, "inspect")
    fails("--what", "budget", says="choose one of budgets, lorenz, strength")
    fails("--what", "cost", "--image", "page.png", says="--image needs --model")
    fails("--what", "cost", "--model", model, says="--model needs --prompt")
    fails("--what", "cost", "--samples", 0, says="--samples 0")
    fails(page_file(tmp_path)[0], "--what", "cost", "--model", model, "--samples", 3, says="has only 2")
    for file in tmp_path.iterdir():
        file.unlink()
    fails(tmp_path, "--what", "cost", "--model", model, says="needs --prompt")
    fails(tmp_path, "--what", "cost", "--model", model, "--prompt", "?", says="no images in this folder")
    fails(tmp_path / "no.jsonl", "--what", "cost", "--model", model, says="no such file of questions")
    fails("--what", "observers", "--policy", "snapkv", "--keep", 0.2, "--json", says="compares AirCache's windows")
    fails("--what", "cost", "--max-new-tokens", 1, says="--max-new-tokens 1")
    fails("--what", "strength", "--policy", "snapkv", says="give either keep=")
    fails("--what", "strength", "--policy", "snapkv", "--keep", 0.2, "--json", says="AirCache's measure")
    fails("--what", "lorenz", "--policy", "fastv", "--keep", 0.2, "--json", says="FastV shortens the prompt")
    text = ("--model", model, "--prompt", pages.READ_PAGE, "--json", *FAST)
    fails("--what", "concordance", *text, says="no vision tokens")
    fails("--what", "cost", "--out", tmp_path / "no" / "x.png", says="no such folder")
    fails("--what", "cost", "--out", tmp_path / "x.pdf", says="ends in .png")
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    fails("--what", "cost", "--out", tmp_path / "x.png", says="pip install matplotlib")
    assert not list(tmp_path.iterdir())


def with_windows(model, folder, windows):
    """A copy of the model in which some layers have a window of 8 tokens."""
    shutil.copytree(model, folder)
    raw = json.loads((folder / "config.json").read_text())
    types = ["sliding_attention" if slides else "full_attention" for slides in windows]
    raw["text_config"] |= {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": types}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_models_with_few_or_no_layers_of_full_attention(refused, tmp_path, model):
    """One line that says why, before weights are read."""
    none = with_windows(model, tmp_path / "none", [True] * LAYERS)
    for what in WHAT:
        command = ["inspect", "--what", what, "--model", none, "--prompt", "?"]
        refused(main, *command, says="all layers of this model have a sliding")
    few = vlkv.families.abstract(vlkv.load_processor(with_windows(model, tmp_path / "few", [True, False] * 2)).config)
    inputs = vlkv.load_processor(model)(PAGE.image, PAGE.question)
    case = cases.Case(few, inputs, policies.LightKV(layers=(1, 2), windows=(2, 1)), jax.random.key(0), 8)
    with pytest.raises(vlkv.InputError, match="less than the model's 2 layers"):
        WHAT["merged"].view(case)


def test_a_sample_is_the_whole_first_prompt(model):
    """With the context before the question, and the beginning of the answer after it."""
    processor = vlkv.loading.load_processor(model)
    record = Record(0, "", (), (Turn("what does row two say?", ("4",), answer_prefix=" 4 2"),), context="row one say? ")
    inputs = inputs_of(processor, record)
    text = processor.decode(inputs.tokens[0][inputs.valid[0]])
    assert " ".join(text.split()) == "user : row one say ? what does row two say ? assistant : 4 2"
