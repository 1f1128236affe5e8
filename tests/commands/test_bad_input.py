"""Bad input: one line on stderr, exit status 2, nothing compiled, nothing left behind."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import vlkv
from tests.processing.conftest import png_header
from vlkv.cli import main
from vlkv.errors import shortened
from vlkv.mini import CHECKPOINT


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the miniature, to be damaged."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


@pytest.fixture
def page(tmp_path) -> Path:
    Image.new("RGB", (96, 96), "white").save(tmp_path / "page.png")
    return tmp_path / "page.png"


def asks(refused, model, image, *more, says: str, prompt: str = "read the page") -> None:
    images = [] if image is None else ["--image", image]
    refused(main, "generate", "--model", model, *images, "--prompt", prompt, *more, says=says)


def edit_config(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        where, _, leaf = key.rpartition("__")
        (raw[where] if where else raw)[leaf] = value
    (folder / "config.json").write_text(json.dumps(raw))


def test_folders(refused, folder, page, tmp_path):
    asks(refused, tmp_path / "nowhere", page, says="no such folder")
    (tmp_path / "empty").mkdir()
    asks(refused, tmp_path / "empty", page, says="config.json")
    asks(refused, page, page, says="not a folder")
    refused(main, "convert", tmp_path / "empty", tmp_path / "out", "--quiet", says="config.json")
    refused(main, "convert", folder, page.parent, "--quiet", says="already exists")
    refused(main, "convert", folder, page / "out", says="is a file")
    refused(main, "convert", folder, says="destination")
    (folder / "tokenizer.json").unlink()
    asks(refused, folder, page, says="tokenizer.json")
    assert vlkv.load_params(folder).config.family == "llava", "a folder without a tokenizer still gives parameters"
    (folder / "config.json").write_text('{"model_type": ')
    asks(refused, folder, page, says="config.json: not valid JSON")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": {}}, "model_type={} is not supported"),
        ({"architectures": [{}]}, "architectures=[{}] must be a list of names"),
        ({"text_config": [1]}, "text_config=[1] must be an object"),
        ({"model_type": "opt"}, "model_type='opt' is not supported (supported: llava, "),
        ({"text_config__model_type": "gemma"}, "text_config.model_type='gemma'"),
        ({"text_config__rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, "rope type='ntk'"),
        ({"text_config__hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"vision_feature_select_strategy": "middle"}, "vision_feature_select_strategy='middle'"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
        ({"vision_config__model_type": "siglip_vision_model"}, "siglip_vision_model"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"text_config__model_type": "mistral", "text_config__sliding_window": 0}, "sliding_window=0"),
    ],
)
def test_configs_that_we_do_not_honour(refused, folder, page, changes, says):
    edit_config(folder, **changes)
    asks(refused, folder, page, says=says)


def test_weights(refused, folder, page):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 100):
        weights.write_bytes(damaged)
        asks(refused, folder, page, says="truncated or corrupt safetensors")
    weights.unlink()
    asks(refused, folder, page, says="no model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    asks(refused, folder, page, says="pickle")


def test_indices(refused, folder, page):
    """Files outside the folder, and files that are not there."""
    (folder / "model.safetensors").unlink()  # which is preferred to an index
    index = folder / "model.safetensors.index.json"
    outside = dict.fromkeys(["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", ".."], "points outside")
    for name, says in {**outside, "model-9.safetensors": "model-9.safetensors, which is not in the folder"}.items():
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        asks(refused, folder, page, says=says)
    index.write_text("[]")
    asks(refused, folder, page, says="expected an object")


def test_keys(refused, folder, page):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = next(key for key in tensors if key.endswith(("model.norm.weight", "language_model.norm.weight")))

    def damaged(change, says):
        changed = dict(tensors)
        change(changed)
        save_file(changed, path)
        asks(refused, folder, page, says=says)
        refused(main, "convert", folder, folder.parent / "out", "--quiet", says=says)
        assert sorted(p.name for p in folder.parent.iterdir()) == ["model", "page.png"]

    damaged(lambda t: t.pop(norm), "missing key model.language_model.norm.weight")
    damaged(lambda t: t.update(surplus=tensors[norm]), "unknown key surplus")
    damaged(lambda t: t.update({norm: tensors[norm][:-1]}), f"{norm} has shape")
    damaged(lambda t: t.update({norm: tensors[norm].astype(np.int8)}), "quantised weights")
    twin = "model.language_model.norm.weight"
    twin = twin if twin != norm else "language_model.model.norm.weight"
    damaged(lambda t: t.update({twin: tensors[norm]}), "exists twice")


def test_images(refused, page, tmp_path):
    text, cut, bomb, zero = (tmp_path / name for name in ("a.txt", "cut.png", "bomb.png", "zero.png"))
    text.write_text("no picture")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(cut)
    cut.write_bytes(cut.read_bytes()[:-2000])
    bomb.write_bytes(png_header(50_000, 50_000))
    zero.write_bytes(png_header(0, 10))
    for bad in (tmp_path / "missing.png", tmp_path, text, cut, bomb, zero):
        asks(refused, CHECKPOINT, bad, says=str(bad))


def test_prompts(refused, page):
    asks(refused, CHECKPOINT, page, prompt="", says="empty")
    asks(refused, CHECKPOINT, page, prompt="   ", says="empty")
    asks(refused, CHECKPOINT, page, prompt="read \ud83d", says="lone surrogate '\\ud83d'")
    asks(refused, CHECKPOINT, page, prompt="<image> <image> read the page", says="<image>")
    asks(refused, CHECKPOINT, None, prompt="read the <image> page", says="<image>")
    asks(refused, CHECKPOINT, page, prompt="read the page " * 600, says="limit")
    asks(refused, CHECKPOINT, page, "--max-new-tokens", "1600", says="limit")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--keep", "0"], "keep=0.0 must lie in (0, 1]"),
        (["--keep", "1.5"], "keep=1.5 must lie in (0, 1]: it is a share, such as 0.2; a number of tokens is a budget"),
        (["--keep", "nan"], "keep=nan must lie in (0, 1]"),
        (["--keep", "much"], "--keep"),
        (["--keep", "0.5", "--budget", "3"], "give either keep="),
        ([], "give either keep="),
        (["--budget", "0"], "budget=0"),
        (["--policy", "aircache(alpha=2)", "--keep", "0.1"], "alpha=2.0 must lie in [0, 1]"),
        (["--policy", "aircache(beta=2)", "--keep", "0.1"], "no option 'beta'"),
        (["--policy", "aircache(alpha", "--keep", "0.1"], "brackets do not match; expected a name, NAME(OPTION=VALUE"),
        (["--policy", "aircache alpha", "--keep", "0.1"], "'aircache alpha': expected a name, NAME(OPTION=VALUE"),
        (["--policy", "own/mine.py", "--keep", "0.1"], "a file needs the name of its class, as in FILE.py:CLASS"),
        (["--policy", "aircache(keep=0.2)", "--keep", "0.1"], "has its own keep"),
        (["--keep", "0.1", "--scope", "text"], "--scope"),
        (["--keep", "0.1", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--keep", "0.1", "--temperature", "0"], "temperature=0.0"),
        (["--keep", "0.1", "--temperature", "1", "--top-p", "2"], "top_p=2.0"),
    ],
)
def test_options(refused, page, options, says):
    asks(refused, CHECKPOINT, page, "--policy", "aircache", *options, says=says)


def test_values_that_are_long_or_misspelt(refused, page, tmp_path):
    long = "x" * 10_000
    asks(refused, CHECKPOINT, long + ".png", says="check the path")
    asks(refused, long, page, says="too long")
    asks(refused, CHECKPOINT, "data:image/png;base64," + long, says="data URI")
    asks(refused, CHECKPOINT, page, "--keep", long, says="invalid float value")
    asks(refused, CHECKPOINT, page, "--policy", long, says="no policy")
    asks(refused, CHECKPOINT, page, "--policy", "aircash", says="did you mean aircache?")
    refused(main, "policies", "nosuch", says="no policy 'nosuch'")
    refused(main, "frobnicate", says="frobnicate")
    refused(main, "genrate", says="did you mean generate?")
    refused(main, "generate", "--imgae", page, says="no option --imgae; did you mean --image?")
    refused(main, "generate", "--model", "minni", "--prompt", "x", says="did you mean mini?")
    asks(refused, CHECKPOINT, page, "--keep", "0.2", says="give a --policy")
    asks(refused, CHECKPOINT, page, "keep=0.2", says="write --keep=0.2")
    refused(main, "demo", "--out", tmp_path / "no" / "picture.png", says="no such folder")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--imgae x generate", "no option --imgae; see the list of options (see vlkv --help)"),
        ("bench --model mini keep=0.2", "keep=0.2 is no option: write --keep=0.2 (see vlkv bench --help)"),
        ("policies snapkv keep=0.2", "no argument keep=0.2 (see vlkv policies --help)"),
        ("frontier --keep 0.2", "no option --keep; see the list of options (see vlkv frontier --help)"),
        (
            "eval q.jsonl --model mini --out x --policy full snapkv keep=0.2",
            "no policy, but an option: write --keep=0.2",
        ),
        ("eval q.jsonl --model mini --out x --policy full snapkv", "tokens per layer); as options --keep or --budget"),
        (
            "eval q.jsonl --model mini --out x --keep 0.2",
            "--keep 0.2 does not apply to full: it keeps all tokens; give",
        ),
        ("bench --model tiny --policy full --budget 9", "--budget 9 does not apply to full: it keeps all tokens; give"),
        ("eval q.jsonl --model mini --out x --policy snapkv(keep=0.5) --keep 0.2", "it has its own keep"),
    ],
)
def test_the_remedy_is_an_option_of_the_command(refused, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "q", "answer": "a"}')
    refused(main, *argv.split(), says=says)


def test_long_messages_lose_whole_words():
    names = [f"policy{i}" for i in range(60)]
    said = shortened(f"choose one of {', '.join(names)}, or your own class").replace(",", "").split()
    assert set(said) <= {"choose", "one", "of", "...", "or", "your", "own", "class", *names}
    assert said[:4] == ["choose", "one", "of", "policy0"] and said[-4:] == ["or", "your", "own", "class"]


def test_a_converted_folder_is_verified(refused, folder, tmp_path):
    assert main(["convert", str(folder), str(tmp_path / "out"), "--quiet", "--dtype", "bfloat16"]) == 0
    assert main(["convert", str(tmp_path / "out"), "--verify"]) == 0
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    refused(main, "convert", tmp_path / "out", "--verify", says="checksum differs")
