"""`vlkv generate`, `demo` and `policies` on the demo model with two layers and a small image."""

import argparse
import dataclasses
import io
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import vlkv
from tests.models import random_model
from vlkv import loading, policies
from vlkv.cli import main
from vlkv.compression.compose import Smooth
from vlkv.generation import jitted
from vlkv.mini import CHECKPOINT, PAGE, pages
from vlkv.saving import read_note
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


@pytest.mark.full
def test_a_saved_cache_answers_other_questions(capsys, tmp_path, miniature):
    """With the full cache as if each had been asked at once; what was kept does not depend on the question."""
    file, model = tmp_path / "page.safetensors", ["generate", "--model", str(miniature()), "--max-new-tokens", "12"]
    said = {}
    for question in ("read the page", "what does row two say?"):
        assert main([*model, *ASK[:2], "--prompt", question]) == 0
        said[question] = capsys.readouterr().out
    saved = [*model, "--save-cache", str(file), *ASK]
    assert main(saved) == 0
    assert capsys.readouterr().out == said["read the page"]
    for question, answer in said.items():
        assert main([*model, "--from-cache", str(file), "--prompt", question]) == 0
        assert capsys.readouterr().out == answer
    assert main([*saved, "--policy", "snapkv", "--keep", "0.5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main([*model, "--from-cache", str(file), "--prompt", "read the page", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {**again, "seconds_with_compilation": 0} == {**result, "seconds_with_compilation": 0}
    assert again["policy"].startswith("snapkv(") and again["cache_bytes"] > sum(again["kept_bytes"].values())


@pytest.mark.full
def test_a_saved_cache_with_long_rope(capsys, tmp_path, miniature):
    """The first question and its answer cross the first length, so the saved keys have the long factors."""
    folder, file = shutil.copytree(miniature(), tmp_path / "model"), tmp_path / "cache"
    raw = json.loads((folder / "config.json").read_text())
    first = raw["image_seq_length"] + 10
    raw["text_config"]["rope_parameters"] |= {
        "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
        "original_max_position_embeddings": first,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    model, said = ["generate", "--model", str(folder), "--prompt", "read the page", "--json"], []
    for options in ([], ["--save-cache", str(file)]):
        assert main([*model, "--max-new-tokens", "12", *ASK[:2], *options]) == 0
        said.append(json.loads(capsys.readouterr().out)["answer"])
    assert said[0] == said[1]
    params, (policy, note) = vlkv.load_params(folder), read_note(file)
    cache = dataclasses.replace(vlkv.load_cache(file, params), position_limit=jnp.array([first + 20]))
    vlkv.save_cache(file, params, cache, policy=policy, note=note)  # as after a shorter question
    assert main([*model, "--max-new-tokens", "40", "--from-cache", str(file)]) == 2
    assert re.search(r"need long-RoPE's long factors.* \(--max-new-tokens\)", capsys.readouterr().err)


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


def test_the_plan_of_the_demo():
    """The full cache, each method at all shares of bytes, and a composition with smoothing and four bits."""
    rows = demo.plan()
    names = ["Full", *(name for name in (*demo.METHODS, demo.BEST) for _ in demo.BYTES)]
    assert [(name, share) for name, share, _ in rows] == list(zip(names, [1.0, *demo.BYTES * 4], strict=True))
    assert rows[0][2].keep == 1 and rows[1][2] == policies.ImgRandom(keep=demo.BYTES[0])
    best = rows[-1][2]
    assert best.slots.smooth == Smooth(8, one_sided=True, pooling="max") and best.slots.store == policies.KIVI(bits=4)
    assert best.slots.score.window == "text" and best.keep == pytest.approx(demo.BYTES[-1] * 16 / 5)


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


def test_demo_takes_texts_and_images_as_they_are(tmp_path, miniature):
    """Brackets are no markup; a picture that lies on its side is shown as the model sees it."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (40, 20)).save(tmp_path / "photo.jpg", exif=exif)
    own = dict(model=str(miniature()), image=str(tmp_path / "photo.jpg"), question="which of [yes, no]?")
    case = demo.find_case(argparse.Namespace(**own))
    assert case.image.size == (20, 40)
    console = Console(record=True, width=120, file=io.StringIO())
    demo.show(console, case, [demo.Row("Full", 1.0, "[/INST] [cat]", True, None, 0, np.ones(1))])
    shown = console.export_text()
    assert "[/INST] [cat]" in shown and "which of [yes, no]?" in shown and "as full" in shown
    assert "evidence" not in shown, "nobody knows what the answer needs"
