"""A tiny model planned for four chips that are not there, through the real TPU compiler; what cannot be planned."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from tests.models import CONFIG
from vlkv.cli import main
from vlkv.families import presets
from vlkv.policies import AirCache, SnapKV
from vlkv.tools import planning
from vlkv.tools.planning import as_json
from vlkv.tools.planning.arithmetic import gib

needs_libtpu = pytest.mark.skipif(
    "not __import__('importlib').util.find_spec('libtpu')", reason="libtpu, a wheel for Linux only, is not installed"
)


pytestmark = pytest.mark.usefixtures("shapes_for_arrays")


@pytest.fixture(scope="module")
def tiny():
    """Four heads, two key heads and 128 channels each, so that nothing is padded but the smallest arrays."""
    decoder = dataclasses.replace(CONFIG.decoder, layers=2, head_dim=128, width=256, mlp_width=512, vocab_size=512)
    return dataclasses.replace(CONFIG, decoder=decoder)


def table(plan):
    """The lines of a plan's table with one column: name -> number."""
    text = io.StringIO()
    Console(file=text, width=100).print(planning.as_table(plan))
    rows = [line.split("│")[1:3] for line in text.getvalue().splitlines() if "│" in line]
    return {name.strip(): value.strip() for name, value in rows}


@pytest.fixture(scope="module")
def made(tiny):
    pytest.importorskip("libtpu")
    return planning.plan(tiny, topology="v5e:2x2", batch=4, prompt=300, new_tokens=16, policy=AirCache(keep=0.1))


@pytest.mark.full
def test_bytes_by_hand(tiny, made):
    """300 tokens: 9 pictures of 25 (a bucket of 12: 300 tokens) and 75 others (96); two bytes a number."""
    assert (made.data, made.model_axis) == (4, 1)
    full, compressed = made.runs
    for step in (full.prefill, full.decode, compressed.prefill, compressed.decode):
        assert step.program.arguments == pytest.approx(step.argument_bytes, rel=0.02)
    layers, number = 2, 2 * 2 * 128 * 2  # keys and values of a row on each chip: heads, channels, bytes
    assert full.pool == number * layers * math.ceil((300 + 96) / 16) * 16
    kept = round(0.1 * layers * 300) + layers * 96
    assert compressed.pool == number * ((kept + layers * 15) // 16 * 16)  # whole tiles of 16 for each layer
    assert full.tail == compressed.tail == number * layers * 16
    c = tiny.decoder
    layer = 2 * c.width * (c.heads + c.kv_heads) * c.head_dim + 3 * c.width * c.mlp_width
    matrices = layers * layer + 2 * c.vocab_size * c.width
    assert 2 * matrices < full.weights < 2 * matrices * 1.2  # the tower, norms and biases are small and padded


@pytest.mark.full
def test_what_is_said(made):
    said = json.loads(json.dumps(as_json(made)))
    assert said["parameters"]["stored"] == said["parameters"]["active"] > 1_000_000
    assert said["estimates"] is True and said["fits"] is True and "estimates" in said["notes"][0]
    assert said["prompt"] == {"tokens": 300, "padded": 396, "pictures": 9, "vision": 225, "text": 75}
    assert [run["policy"] for run in said["runs"]] == ["full", "aircache(keep=0.1)"]
    for run in said["runs"]:
        assert set(run["bytes_per_chip"]) == {
            "weights", "pool", "tail", "rings", "states", "index", "inputs", "temporaries", "used"
        }  # fmt: skip
        assert run["tokens_per_second"] > 0 and run["decode_step"]["compiler"]["kernels"] > 0
        assert run["prefill"]["compile_seconds"] > 0 and run["prefill"]["estimate"]["seconds"] > 0

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(planning.as_table(made))
    text = console.export_text()
    assert "estimates" in text and "aircache(keep=0.1, scope='vision')" in text and "tokens a second" in text


@pytest.mark.full
@needs_libtpu
def test_what_does_not_fit_says_what_would(tiny):
    """A vocabulary of eight million fills a v5e: 2 x 8 GiB in float32, in bfloat16 half of that."""
    decoder = dataclasses.replace(tiny.decoder, vocab_size=2**23 + 2**20, layers=2)
    big = dataclasses.replace(tiny, decoder=decoder)
    made = planning.plan(big, topology="v5e:1x1", prompt=100, new_tokens=4, dtype="float32")
    (run,) = made.runs
    assert not made.fits and not run.fits and run.used > made.topology.chip.usable
    assert any("--dtype bfloat16" in text for text in run.remedies)
    assert any("chips with --mesh data=1,model=2" in text for text in run.remedies)
    lines = table(made)
    assert lines["prefill: time"] == lines["decode step: time"] == lines["tokens a second, all rows"] == "does not fit"


@pytest.mark.full
@needs_libtpu
def test_a_prefill_that_does_not_fit_before_steps_that_do(tiny):
    """4,096 rows of 320 tokens with 4,096 channels of an MLP need 20 GiB; the compiler refuses them."""
    decoder = dataclasses.replace(tiny.decoder, mlp_width=4096, layers=2)
    wide = dataclasses.replace(tiny, decoder=decoder)
    made = planning.plan(wide, topology="v5e:1x1", prompt=300, batch=4096, images=0, new_tokens=4, dtype="float32")
    (run,), (said,), lines = made.runs, as_json(made)["runs"], table(made)
    assert run.used > 4 * 4096 * 320 * 4096 and not run.fits and run.weights < 2**30
    assert said["prefill"]["refused"] and "estimate" not in said["prefill"]
    assert not said["decode_step"]["refused"] and said["decode_step"]["estimate"]["seconds"] > 0
    assert said["bytes_per_chip"]["temporaries"] is None  # the largest are those of prefill
    assert lines["prefill: time"] == lines["temporaries"] == "does not fit" and lines["decode step: time"][-2:] == "ms"


BAD = [
    (["llava-9"], "no preset"),
    (["llava-1.5-7b", "--topology", "v9:4x4"], "no chip 'v9'"),
    (["llava-1.5-7b", "--topology", "v5e:4"], "2 dimension"),
    (["llava-1.5-7b", "--topology", "v5e:"], "as in v5e:4x4"),
    (["llava-1.5-7b", "--mesh", "data=3,model=4"], "the topology has 16"),
    (["llava-1.5-7b", "--mesh", "4x4"], "expected data=D,model=M"),
    (["llava-1.5-7b", "--mesh", "data=8,model=2", "--batch", "12"], "multiple of 8"),
    (["llava-1.5-7b", "--prompt", "500"], "at least --prompt 640"),
    (["llava-1.5-7b", "--prompt", "8192"], "limit of 4096 positions"),
    (["llava-1.5-7b", "--batch", "0"], "--batch 0"),
    (["llava-1.5-7b", "--new", "-1"], "--new -1"),
    (["llava-1.5-7b", "--images", "3"], "3 images have 1728 tokens"),
    (["vicuna-1.5-7b", "--images", "1"], "no vision tower"),
    (["llava-1.5-7b", "--policy", "aircash"], "aircache"),
    (["llava-1.5-7b", "--topology", "v5e:16x16", "--batch", "3"], "give a multiple of 8"),
]


@pytest.mark.parametrize(("options", "said"), BAD)
def test_bad_input_is_one_line(refused, monkeypatch, options, said):
    monkeypatch.setattr(planning.planning, "run", lambda *_, **__: pytest.fail("nothing may be compiled"))
    given = {"--topology": "v5e:4x4", "--prompt": "1300", "--batch": "16", "--new": "64"}
    given |= dict(zip(options[1::2], options[2::2], strict=True))
    refused(main, "plan", options[0], *(word for pair in given.items() for word in pair), says=said)


@needs_libtpu
def test_a_slice_that_does_not_exist(refused):
    refused(
        main, "plan", "llava-1.5-7b", "--topology", "v5e:3x5", "--prompt", 1300, "--batch", 15, says="no such slice"
    )


@pytest.mark.full
def test_gpus_are_planned_from_shapes(capsys):
    command = ["plan", "qwen2-0.5b", "--topology", "a100:2", "--batch", "4", "--prompt", "200", "--mesh"]
    assert main([*command, "data=2,model=1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (run,) = said["runs"]
    assert any("without a compiler" in note for note in said["notes"])
    # 24 layers, 2 key heads of 64 channels, 224 slots for 200 tokens of text, 2 of the 4 rows on each chip.
    assert run["bytes_per_chip"]["pool"] == 2 * 2 * 24 * 224 * 2 * 64 * 2 and run["fits"] is None
    assert not {"compiler", "compile_seconds"} & set(run["prefill"])
    # A step reads all weights (the embedding is the head too) and the cache: 494 million and 2 x 2 rows of cache.
    c = presets["qwen2-0.5b"].decoder
    layer = 2 * c.width * (c.heads + c.kv_heads) * c.head_dim + 3 * c.width * c.mlp_width
    moved = 2 * (c.layers * layer + c.vocab_size * c.width) + run["bytes_per_chip"]["pool"]
    assert run["tokens_per_second"] == pytest.approx(4 / (moved / 2.039e12), rel=0.02)
    assert main([*command, "data=2,model=1", "--dtype", "float32", "--json"]) == 0
    (slow,) = json.loads(capsys.readouterr().out)["runs"]
    assert slow["prefill"]["estimate"]["compute"] == pytest.approx(6 * run["prefill"]["estimate"]["compute"])


@pytest.mark.full
def test_the_cache_of_each_kind_of_layer():
    """Gemma 3 12B: what is printed for each kind; its bytes are tested in test_arithmetic.py."""
    plan = planning.plan("gemma-3-12b", topology="a100:1", prompt=4096, images=4,
                         policy=SnapKV(keep=0.1, scope="all"), compare=False)  # fmt: skip
    assert as_json(plan)["layers"] == {"full": 8, "sliding": 40, "shared": 0, "windows": [1024], "recurrent": 0}
    lines = table(plan)
    assert lines["cache of 40 layers with a window of 1024"] == "0.31 GiB"  # 320 MiB
    assert lines["cache of 8 full layers: prompt"] == gib(plan.runs[0].pool)
    assert lines["cache of 8 full layers: new tokens"] == "4.0 MiB"
