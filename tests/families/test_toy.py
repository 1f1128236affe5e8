"""A new family is one module and its name: tests/toy.py is converted, loaded, asked, planned, timed and extended."""

import json

import jax
import numpy as np
import PIL.Image
import pytest
from safetensors.numpy import save_file

import vlkv
from checkpoints_convert.__main__ import convert
from checkpoints_convert.entry import make_entries
from tests import programs, toy
from tests.models import same
from tests.processing.conftest import write_folder
from tests.toy import RAW
from vlkv import policies
from vlkv.cli import main
from vlkv.families import FAMILIES
from vlkv.families.folders import describe

VISION = 4**2 + 1  # of a picture
QUESTION = "What is it?"


@pytest.fixture(scope="module", autouse=True)
def line():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "toy", toy.FAMILIES["toy"])
        patch.setitem(vlkv.presets.raw, "toy-tiny", RAW)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("toy") / "source", template=None)
    (folder / "config.json").write_text(json.dumps(RAW))
    table, rng = describe(folder), np.random.default_rng(0)
    shapes = {entry.key: entry.shape for entry in make_entries(table.names, table.shapes())}
    assert shapes["eyes.0.qkv.weight"] == (3 * 16, 16), "one tensor for three parameters"
    save_file({key: rng.normal(0, 0.2, shape).astype(np.float32) for key, shape in shapes.items()},
              folder / "model.safetensors")  # fmt: skip
    return folder


@pytest.fixture(scope="module", params=["safetensors", "orbax"])
def loaded(request, folder):
    out = folder.with_name(request.param)
    return vlkv.load(convert(folder, out, format=request.param, progress=False))


def test_both_conversions_hold_what_the_source_holds(folder, loaded):
    same(vlkv.load_params(folder), loaded[0])


@pytest.mark.full
@pytest.mark.parametrize("method", [policies.SnapKV, policies.PrefixKV, policies.FasterVLM])
def test_it_answers_and_is_asked_again(folder, method):
    """FasterVLM uses the attention of the tower's class token, which works without code in the family."""
    policy, (params, processor) = method(keep=0.5), vlkv.load(folder)
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8))
    inputs = processor(image, QUESTION)
    assert inputs.is_vision.sum() == VISION and inputs.grid[0][inputs.is_vision[0]][0].tolist() == [0, -1, -1]
    sampling = vlkv.Greedy(max_new_tokens=4, stop=())
    output = programs.generate(params, inputs, policy=policy, sampling=sampling)
    assert isinstance(processor.decode(output.tokens[0]), str)
    cache, logits = jax.jit(vlkv.prefill, static_argnames=("policy", "new_tokens"))(
        params, inputs, policy, new_tokens=96
    )
    assert logits.argmax() == output.tokens[0, 0], "prefill says what generate says"
    again = processor.extension(["a"], ["a and more"])
    _, logits = programs.extend(params, cache, again)
    assert np.isfinite(np.asarray(logits)).all()


@pytest.mark.full
@pytest.mark.usefixtures("shapes_for_arrays")
def test_plan_and_bench_know_its_sizes(capsys, tmp_path):
    assert main(["plan", "toy-tiny", "--topology", "a100:1", "--prompt", "200", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["prompt"]
    assert planned["vision"] % VISION == 0 and planned["vision"] + VISION > 200 - 64 >= planned["vision"]
    options = ["--prompt", "40", "--text", "8", "--new", "2", "--rounds", "1", "--keep", "0.5"]
    assert main(["bench", "--model", "toy-tiny", *options, "--out", str(tmp_path / "grid.json")]) == 0
    rows = json.loads((tmp_path / "grid.json").read_text())["rows"]
    assert [row["kept_per_layer"] for row in rows] == [40, 20]
