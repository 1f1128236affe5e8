"""`vlkv generate`, `demo` and `policies` on the demo model with two layers and a small image."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import vlkv
from tests.models import random_model
from vlkv import loading, policies
from vlkv.cli import main
from vlkv.generation import jitted
from vlkv.mini import CHECKPOINT, PAGE, pages
from vlkv.tools.commands import demo

ASK = ["--image", str(PAGE), "--prompt", "read the page"]


@pytest.fixture
def begun(monkeypatch, miniature):
    """What `generate` has made of a prompt; one layer has a window and heads of its own, the other full attention."""
    processor, made = vlkv.load_processor(miniature()), []
    decoder = dataclasses.replace(processor.config.decoder, windows=(16, None), sliding_heads=(1, 16))
    config = dataclasses.replace(processor.config, decoder=decoder)
    params, begin = random_model(config), jitted.begin

    def copied(*args, **options):
        made.append(begin(*args, **options))
        return jax.tree.map(lambda x: jax.device_put(np.array(x)), made[-1])  # decoding will overwrite its cache

    monkeypatch.setattr(loading, "load_processor", lambda source: dataclasses.replace(processor, config=config))
    monkeypatch.setattr(loading, "load_params", lambda source, dtype: params)
    monkeypatch.setattr(jitted, "begin", copied)
    return made


def test_generate(capsys, monkeypatch, begun, miniature):
    """The command prints JSON or text; a third call compresses after two tokens that the full cache decoded."""
    command, new = ["generate", "--model", "any", *ASK, "--max-new-tokens", "3", "--policy"], 3
    assert main([*command, "AirCache", "--keep", "0.5", "--json"]) == 0
    result, cache = json.loads(capsys.readouterr().out), begun[0].cache
    processor, vision = loading.load_processor(miniature()), 36
    assert result["policy"] == "aircache(keep=0.5)" and result["scope"] == "vision" and result["bytes_before"] is None
    assert result["kept_per_layer"] == [result["prompt_tokens"] - vision + vision // 2]
    _, heads, slots, channels = cache.k.shape
    assert (heads, channels) == (2, 32) and cache.rings.layers[0].k.shape == (1, 1, 16, 16)
    assert result["kept_bytes"] == {
        "pool": 4 * 2 * heads * slots * channels, "tail": 4 * 2 * heads * new * channels, "rings": 4 * 2 * 16 * 16,
        "states": 0,
    }  # fmt: skip
    assert result["slots"] == slots + new + 16 and 0 < result["tokens"] <= new
    numbers = result["cache_bytes"] - sum(result["kept_bytes"].values())  # of the token of each slot of the pool
    assert 0 < numbers <= 4 * result["slots"] * heads
    assert main([*command, "AirCache", "--keep", "0.5"]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == result["answer"].strip()
    assert f"aircache(keep=0.5, scope='vision'): {result['kept_per_layer'][0]:.1f} of" in shown.err.replace("\n", " ")
    first = processor.encode("7 8", begin=False)
    late = dataclasses.replace(begun[0], tokens=jnp.asarray(first[None]), bytes_before=3 * 2**20)
    monkeypatch.setattr(jitted, "begin", lambda *args, **options: late)
    assert main([*command, "compose(aircache(keep=0.5), answer=2)", "--json", "--max-new-tokens", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["compressed_after"] == 2 and result["bytes_before"] == 3 * 2**20
    assert 2 < result["tokens"] <= 4 and result["answer"].split()[:2] == ["7", "8"]


LATE = "compose(snapkv(keep=0.1), answer={})"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--save-cache", "x"], "at least one --image"),
        (["--save-cache", "none/x", "--image", str(PAGE)], "none/x: no such folder"),
        (["--from-cache", "x", "--image", "page.png"], "leave out --save-cache and --image"),
        (["--from-cache", "x", "--policy", "h2o", "--keep", "0.5"], "leave out --policy"),
        (["--from-cache", "none.safetensors"], "none.safetensors: no such file"),
        (["--from-cache", str(CHECKPOINT / "model.safetensors")], "not a cache"),
        (["--max-new-tokens", "4", "--policy", LATE.format(3)], "leaves none to the compressed cache: give at least 5"),
        (["--save-cache", "x", "--policy", LATE.format(2)], "leave out answer="),
        *(
            (["--policy", f"compose(snapkv(keep=0.5), {part})"], said)
            for part, said in {
                "colour=kivi": "stages among",
                "store=kivi(4)": "give options by name",
                "store=kivi(bits=4, bits=2)": "literals",
                "store=kivi(bits=four)": "literals",
                "store=kivy": "did you mean kivi",
                "smooth=smooth(size=3)": "smooth(KERNEL",
            }.items()
        ),
    ],
)
def test_what_generate_refuses(refused, options, said):
    refused(main, "generate", "--model", CHECKPOINT, "--prompt", "read the page", *options, says=said)


def test_policies(capsys):
    assert main(["policies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [method["name"].lower() for method in listed] == [*policies.registry, "downsample"]
    facts = ("paper", "equations", "stages", "source", "description")
    assert len(listed) >= 46 and all(method[fact] for method in listed for fact in facts)
    for argv, wanted in (
        ([], [cls.__name__ for cls in policies.registry.values()]),
        (["aircache"], ["alpha = 0.9", "Source: arXiv:2503.23956\n"]),
        (["downsample"], ["side = 2"]),
    ):
        assert main(["policies", *argv]) == 0
        said = capsys.readouterr().out
        assert all(text in said for text in wanted)
    assert policies.make("Downsample", side=3) == policies.Downsample(side=3)


def test_demo_draws_what_is_kept(capsys, monkeypatch, tmp_path, miniature):
    """Two rows, which share one program."""
    monkeypatch.setattr(demo, "CHECKPOINT", miniature(2, pages.GRID))
    monkeypatch.setattr(demo, "plan", lambda plan=demo.plan: plan()[:2])
    monkeypatch.setattr(demo, "SHOWN", demo.BYTES[0])
    assert main(["demo", "--json", "--out", str(tmp_path / "demo.png")]) == 0
    result = json.loads(capsys.readouterr().out)
    full, few = result["rows"]
    assert (full["name"], few["name"]) == ("Full", "ImgRandom") and few["bytes"] == pytest.approx(
        0.1 * full["bytes"], rel=0.01
    )
    assert full["bytes"] == 2 * 2 * pages.GRID**2 * 2 * 32 * 2, (
        "layers, heads, patches, keys and values, channels, 16 bits"
    )
    assert all(row["right"] == (row["answer"] == result["truth"]) for row in (full, few))
    assert full["recall"] == 1 and 0 <= few["recall"] < 0.5
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.width > 500 and len(picture.convert("RGB").getcolors(2**24)) > 50
    assert main(["demo", "--model", "mini", *ASK[:2]]) == 2
    assert "must be given together" in capsys.readouterr().err
