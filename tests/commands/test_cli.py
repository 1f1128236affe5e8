"""The commands on the shipped miniature."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import vlkv
from tests.models import random_model
from vlkv import loading, policies
from vlkv.cli import main
from vlkv.generation import jitted
from vlkv.mini import CHECKPOINT, PAGE, pages
from vlkv.saving import read_note
from vlkv.tools.commands import demo


@pytest.fixture
def sample(tmp_path):
    """A held-out page on disk."""
    page = pages.digit_page(pages.held_out_digits(), np.random.default_rng(5), rows=(2, 2), length=(3, 3))
    page.image.save(tmp_path / "page.png")
    return page, tmp_path / "page.png"


def test_generate(capsys, sample, miniature):
    """What the whole miniature answers is tested in tests/mini."""
    _, path = sample
    command = ["generate", "--model", str(miniature()), "--image", str(path), "--prompt", "read the page"]
    assert main([*command, "--max-new-tokens", "4"]) == 0
    assert 0 < len(capsys.readouterr().out.split()) <= 4
    assert main([*command, "--max-new-tokens", "4", "--policy", "AirCache", "--keep", "0.1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["policy"] == "aircache(keep=0.1)" and result["scope"] == "vision"
    layers = len(result["kept_per_layer"])
    vision = vlkv.load_processor(miniature()).config.vision.tokens
    text = result["prompt_tokens"] - vision
    assert sum(result["kept_per_layer"]) == layers * text + round(0.1 * layers * vision)
    c = vlkv.load_processor(miniature()).config.decoder
    assert sum(result["kept_bytes"].values()) == 4 * 2 * c.kv_heads * c.head_dim * result["slots"]
    numbers = result["cache_bytes"] - sum(result["kept_bytes"].values())  # of the token of each slot of the pool
    assert 0 < numbers <= 4 * result["slots"] * c.kv_heads


def test_generate_reports_bytes_of_allocated_arrays(capsys, monkeypatch, sample, miniature):
    """A layer with a window, whose heads differ in number and size, and one with full attention."""
    processor, made, new = vlkv.load_processor(miniature()), [], 3
    c = dataclasses.replace(processor.config.decoder, windows=(16, None), sliding_heads=(1, 16))
    config = dataclasses.replace(processor.config, decoder=c)
    params, begin = random_model(config), jitted.begin
    monkeypatch.setattr(loading, "load_processor", lambda source: dataclasses.replace(processor, config=config))
    monkeypatch.setattr(loading, "load_params", lambda source, dtype: params)
    monkeypatch.setattr(jitted, "begin", lambda *args, **options: made.append(begin(*args, **options)) or made[0])
    command = ["generate", "--model", "any", "--image", str(sample[1]), "--prompt", "read the page", "--json"]
    assert main([*command, "--max-new-tokens", str(new), "--policy", "snapkv", "--keep", "0.5"]) == 0
    result, cache = json.loads(capsys.readouterr().out), made[0].cache
    _, heads, slots, channels = cache.k.shape
    assert (heads, channels) == (2, 32) and cache.rings.layers[0].k.shape == (1, 1, 16, 16)
    assert result["kept_bytes"] == {
        "pool": 4 * 2 * heads * slots * channels, "tail": 4 * 2 * heads * new * channels, "rings": 4 * 2 * 16 * 16,
        "states": 0,
    }  # fmt: skip
    assert result["slots"] == slots + new + 16


def test_generate_compresses_during_the_answer(capsys, sample, miniature):
    """Bytes of both caches are reported; a cache that is saved before the question is refused."""
    command = ["generate", "--model", str(miniature()), "--image", str(sample[1]), "--prompt", "read the page"]
    command += ["--max-new-tokens", "4", "--policy"]
    assert main([*command, "compose(snapkv(keep=0.1), answer=2)", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["policy"] == "compose(snapkv(keep=0.1), answer=2)" and result["compressed_after"] == 2
    assert result["bytes_before"] > result["cache_bytes"] and 0 < result["tokens"] <= 4
    for policy, *more, said in (
        ("compose(snapkv(keep=0.1), answer=3)", "leaves none to the compressed cache: give at least 5"),
        ("compose(snapkv(keep=0.1), answer=2)", "--save-cache", "cache", "leave out answer="),
    ):
        assert main([*command, policy, *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.full
def test_generate_with_parts_of_several_methods(capsys, sample):
    _, path = sample
    command = ["generate", "--model", str(CHECKPOINT), "--image", str(path), "--prompt", "read the page", "--json"]
    policy = "compose(snapkv, allocate=prefixkv, store=kivi(bits=4))"
    assert main([*command, "--max-new-tokens", "4", "--policy", policy, "--keep", "0.5"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["policy"] == "compose(snapkv(keep=0.5), allocate=prefixkv, store=kivi(bits=4))"
    c = vlkv.load_processor("mini").config.decoder
    assert result["cache_bytes"] < 0.6 * 4 * 2 * c.kv_heads * c.head_dim * result["slots"]


@pytest.mark.full
def test_a_saved_cache_answers_other_questions(capsys, sample, tmp_path):
    """With the full cache as if each had been asked at once; what was kept does not depend on the question."""
    page, path = sample
    file, model = tmp_path / "page.safetensors", ["generate", "--model", str(CHECKPOINT), "--max-new-tokens", "12"]
    said = {}
    for question in ("read the page", "what does row two say?"):
        assert main([*model, "--image", str(path), "--prompt", question]) == 0
        said[question] = capsys.readouterr().out
    assert said["what does row two say?"].strip() == page.entries[2].answer
    saved = [*model, "--save-cache", str(file), "--image", str(path), "--prompt", "read the page"]
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
def test_a_saved_cache_with_long_rope(capsys, sample, tmp_path, miniature):
    """The first question and its answer cross the first length, so the saved keys have the long factors."""
    shutil.copytree(miniature(), tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    first = raw["image_seq_length"] + 10
    raw["text_config"]["rope_parameters"] |= {
        "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
        "original_max_position_embeddings": first,
    }  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    model = ["generate", "--model", str(tmp_path / "model"), "--prompt", "read the page", "--json"]
    image, file = ["--image", str(sample[1])], ["--save-cache", str(tmp_path / "cache")]
    said = []
    for options in ([], file):
        assert main([*model, "--max-new-tokens", "12", *image, *options]) == 0
        said.append(json.loads(capsys.readouterr().out)["answer"])
    assert said[0] == said[1]
    params, file = vlkv.load_params(tmp_path / "model"), tmp_path / "cache"
    policy, note = read_note(file)
    cache = dataclasses.replace(vlkv.load_cache(file, params), position_limit=jnp.array([first + 20]))
    vlkv.save_cache(file, params, cache, policy=policy, note=note)  # as after a shorter question
    assert main([*model, "--max-new-tokens", "40", "--from-cache", str(file)]) == 2
    assert re.search(r"need long-RoPE's long factors.* \(--max-new-tokens\)", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--save-cache", "x"], "at least one --image"),
        (["--save-cache", "none/x", "--image", str(PAGE)], "none/x: no such folder"),
        (["--from-cache", "x", "--image", "page.png"], "leave out --save-cache and --image"),
        (["--from-cache", "x", "--policy", "h2o", "--keep", "0.5"], "leave out --policy"),
        (["--from-cache", "none.safetensors"], "none.safetensors: no such file"),
        (["--from-cache", str(CHECKPOINT / "model.safetensors")], "not a cache"),
    ],
)
def test_what_does_not_go_with_a_saved_cache(refused, options, said):
    refused(main, "generate", "--model", CHECKPOINT, "--prompt", "read the page", *options, says=said)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("colour=kivi", "stages among"),
        ("store=kivi(4)", "give options by name"),
        ("store=kivi(bits=4, bits=2)", "literals"),
        ("store=kivi(bits=four)", "literals"),
        ("store=kivy", "did you mean kivi"),
        ("smooth=smooth(size=3)", "smooth(KERNEL"),
    ],
)
def test_a_bad_part_is_named(refused, part, said):
    policy = f"compose(snapkv(keep=0.5), {part})"
    refused(main, "generate", "--model", CHECKPOINT, "--prompt", "x", "--policy", policy, says=said)


def test_policies(capsys):
    assert main(["policies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [method["name"].lower() for method in listed] == [*policies.registry, "downsample"]
    facts = ("paper", "equations", "stages", "source", "description")
    assert len(listed) >= 46 and all(method[fact] for method in listed for fact in facts)
    assert main(["policies"]) == 0
    table = capsys.readouterr().out
    assert all(cls.__name__ in table for cls in policies.registry.values())
    assert main(["policies", "aircache"]) == 0
    described = capsys.readouterr().out
    assert "alpha = 0.9" in described and "Source: arXiv:2503.23956\n" in described
    assert main(["policies", "downsample"]) == 0
    assert "side = 2" in capsys.readouterr().out
    assert policies.make("Downsample", side=3) == policies.Downsample(side=3)


def test_demo_draws_what_is_kept(capsys, monkeypatch, tmp_path, miniature):
    monkeypatch.setattr(demo, "CHECKPOINT", miniature(2, pages.GRID))
    monkeypatch.setattr(demo, "METHODS", ("ImgRandom",))
    monkeypatch.setattr(demo, "BYTES", (demo.SHOWN,))
    assert main(["demo", "--json", "--out", str(tmp_path / "demo.png")]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == {"Full", "ImgRandom", demo.BEST}
    for name, row in rows.items():
        assert row["right"] == (row["answer"] == result["truth"])
        assert name == "Full" or row["bytes"] < 0.2 * rows["Full"]["bytes"]
        assert 0 <= row["recall"] <= 1
    assert rows["Full"]["recall"] == 1 and rows["ImgRandom"]["recall"] < 0.2
    with Image.open(tmp_path / "demo.png") as picture:
        colours = picture.convert("RGB").getcolors(2**24)
        assert picture.width > 1000 and len(colours) > 50


@pytest.mark.full
def test_demo_on_ones_own_image(capsys, monkeypatch, sample, tmp_path, miniature):
    monkeypatch.setattr(demo, "METHODS", ())
    monkeypatch.setattr(demo, "BYTES", (demo.SHOWN,))
    own = ["--model", str(miniature()), "--image", str(sample[1]), "--question", "what does row one say?"]
    assert main(["demo", *own, "--out", str(tmp_path / "demo.png")]) == 0
    said = capsys.readouterr().out
    assert "as full" in said and "evidence" in said
    assert main(["demo", *own[:4]]) == 2
    assert "must be given together" in capsys.readouterr().err


def test_demo_takes_texts_and_images_as_they_are(sample, tmp_path, miniature):
    """Brackets are no markup; a picture that lies on its side is shown as the model sees it."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    with Image.open(sample[1]) as picture:
        picture.convert("RGB").resize((40, 20)).save(tmp_path / "photo.jpg", exif=exif)
    own = dict(model=str(miniature()), image=str(tmp_path / "photo.jpg"), question="which of [yes, no]?")
    case = demo.find_case(argparse.Namespace(**own))
    assert case.image.size == (20, 40)
    console = Console(record=True, width=120, file=io.StringIO())
    demo.show(console, case, [demo.Row("Full", 1.0, "[/INST] [cat]", True, None, 0, 1.0, np.ones(1))])
    shown = console.export_text()
    assert "[/INST] [cat]" in shown and "which of [yes, no]?" in shown


@pytest.mark.full
def test_smoothing_on_the_command_line(capsys, sample, miniature):
    own = ["--model", str(miniature()), "--image", str(sample[1]), "--prompt", "read the page"]
    command = ["generate", *own, "--json"]
    policy = ["--policy", "compose(aircache, smooth=smooth((1, 3)))", "--keep", "0.1", "--max-new-tokens", "2"]
    assert main([*command, *policy]) == 0
    assert "smooth=smooth((1, 3))" in json.loads(capsys.readouterr().out)["policy"]


def test_import_needs_neither_torch_nor_transformers_nor_matplotlib():
    code = "import sys, vlkv; assert not {'torch', 'transformers', 'matplotlib', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
