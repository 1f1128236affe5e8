"""LoRA adapters written by hand: against numpy, alone and beside the base model, resumed, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from checkpoints_convert import converting
from checkpoints_convert.__main__ import convert
from tests.models import same
from vlkv.cli import main

MODULE = "model.language_model.layers.1.mlp.down_proj"
PREFIX = "base_model.model."
RANK, ALPHA = 3, 6
ROWS, COLUMNS = 192, 320  # of the module's weight


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def factors(module: str = MODULE, rows: int = ROWS, columns: int = COLUMNS) -> dict[str, np.ndarray]:
    return {f"{PREFIX}{module}.lora_A.weight": random(RANK, columns),
            f"{PREFIX}{module}.lora_B.weight": random(rows, RANK)}  # fmt: skip


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **fields) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["down_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def demo(miniature) -> Path:
    return miniature()


@pytest.fixture(scope="module")
def weights(demo) -> dict[str, np.ndarray]:
    return load_file(demo / "model.safetensors")


@pytest.fixture
def base(demo, tmp_path) -> Path:
    return Path(shutil.copytree(demo, tmp_path / "base"))


@pytest.fixture
def alone(demo, tmp_path) -> Path:
    return write(tmp_path / "alone", base_model_name_or_path=str(demo))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(converting, "SHARD_BYTES", 2**20)
    monkeypatch.setattr("checkpoints_convert.checkpoint.SLICE_BYTES", 3000)


def down(folder: Path) -> np.ndarray:
    return np.asarray(vlkv.load_params(folder).decoder.layers[1].down.weight)


def test_the_product_is_added(weights, alone, tmp_path, small):
    a, b = (x.astype(np.float64) for x in factors().values())
    exact = weights[f"{MODULE}.weight"] + ALPHA / RANK * (b @ a)
    np.testing.assert_allclose(down(alone), exact, atol=1e-5)
    convert(alone, tmp_path / "out", dtype="bfloat16", progress=False)
    converting.verify(tmp_path / "out")
    same(vlkv.load_params(tmp_path / "out"), vlkv.load_params(alone, dtype="bfloat16"))
    assert sorted(path.name for path in (tmp_path / "out").glob("adapter*")) == []


def test_settings_of_an_adapter_alone(demo, alone, tmp_path):
    """Those of its base model, except files that the adapter's folder has too."""
    _, processor = vlkv.load(alone)
    plain = vlkv.load_processor(demo)
    assert processor.prompts.write("hi", 1, 0) == plain.prompts.write("hi", 1, 0)
    (alone / "chat_template.jinja").write_text("{% for m in messages %}asked: {{ m.content }}{% endfor %}")
    changed = vlkv.load_processor(alone).prompts.write("hi", 0, 0)
    assert changed == "asked: hi"
    convert(alone, tmp_path / "out", progress=False)
    assert vlkv.load_processor(tmp_path / "out").prompts.write("hi", 0, 0) == changed
    (alone / "tokenizer.json").write_text("[]")
    with pytest.raises(vlkv.InputError, match=r"alone/tokenizer[.]json"):
        vlkv.load_processor(alone)


def test_a_base_model_in_the_cache_of_the_hub(demo, tmp_path, monkeypatch):
    root = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(demo, root / "snapshots" / "abc")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = write(tmp_path / "adapter", base_model_name_or_path="org/tiny")
    assert vlkv.load(folder)[1].config.family == "llava"
    write(folder, base_model_name_or_path="org/other")
    with pytest.raises(vlkv.InputError, match="its base model 'org/other' is not on this machine"):
        vlkv.load(folder)


def test_a_base_model_that_is_not_there(tmp_path, base, capsys):
    folder = write(tmp_path / "adapter")
    for name in (None, "", 3, str(tmp_path / "nowhere")):
        write(folder, base_model_name_or_path=name)
        with pytest.raises(vlkv.InputError, match="this machine: download it, or copy the adapter"):
            vlkv.load(folder)
    assert main(["convert", str(folder), str(tmp_path / "out"), "--quiet"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    write(base)
    write(folder, base_model_name_or_path=str(base))
    with pytest.raises(vlkv.InputError, match="adapter too: merge it with pe"):
        vlkv.load(folder)


def test_orbax_weights_have_no_adapter(demo, tmp_path):
    made = convert(demo, tmp_path / "orbax", format="orbax", progress=False)
    alone = write(tmp_path / "alone", base_model_name_or_path=str(made))
    for folder in (alone, made):
        write(folder, base_model_name_or_path=str(made))
        with pytest.raises(vlkv.InputError, match="cannot be applied to orbax weights"):
            vlkv.load_params(folder)
        with pytest.raises(vlkv.InputError, match="contains orbax weights"):
            convert(folder, tmp_path / "out", progress=False)


def test_values_beyond_float16(demo, tmp_path):
    folder = write(tmp_path / "adapter", lora_alpha=1e8, base_model_name_or_path=str(demo))
    with pytest.raises(vlkv.InputError, match="has values beyond float16: use bfloat16 or float32"):
        vlkv.load_params(folder, dtype="float16")


HEAD = f"{PREFIX}lm_head.weight"


@pytest.mark.parametrize(("tensors", "fields", "says"), [
    (None, {"r": 4}, r"has shape \[3, \d+\], but the rank in adapter_config.json is 4"),
    (None, {"r": "many"}, "rank_pattern, r or lora_alpha is 'many'"),
    (None, {"rank_pattern": {"down_proj": 2}}, "but the rank in adapter_config.json is 2"),
    (None, {"alpha_pattern": {"(": 2}}, "alpha_pattern is malformed"),
    (None, {"alpha_pattern": [1]}, "alpha_pattern is malformed"),
    (None, {"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
    (None, {"use_dora": True}, r"use_dora=True is not supported: merge it with peft \(merge_and_unload\)"),
    (None, {"something_new": 1}, "something_new=1 is not supported"),
    *((None, {"init_lora_weights": kind}, f"='{kind}' changes the base model") for kind in ("olora", "pissa")),
    *((None, {name: [1]}, rf"{name}=\[1\] is not supported") for name in (
        "trainable_token_indices", "layer_replication", "alora_invocation_tokens", "target_parameters")),
    (factors(rows=ROWS + 1), {}, rf"lora_B.weight does not fit its tensor of shape \[{ROWS}, {COLUMNS}\]"),
    (factors("model.language_model.layers.9.mlp.down_proj"), {}, "layers.9.*changes a tensor that the model does not"),
    (dict(list(factors().items())[:1]), {}, "expected lora_A.weight and lora_B.weight, found lora_A.weight"),
    (factors() | {HEAD: random(3, 3)}, {}, r"base_model.model.lm_head.weight has shape \[3, 3\], config.json says"),
    (factors() | {f"{PREFIX}score.weight": random(2, 4)}, {}, "unknown key base_model.model.score.weight"),
    (factors() | {f"{PREFIX}{MODULE}.lora_magnitude_vector": random(ROWS)}, {}, "unknown key .*lora_magnitude_vector"),
    ({key: x.astype(np.int8) for key, x in factors().items()}, {}, "has dtype I8: quantised weights"),
])  # fmt: skip
def test_what_cannot_be_applied(base, tmp_path, tensors, fields, says):
    write(base, tensors, **fields)
    with pytest.raises(vlkv.InputError, match=says):
        vlkv.load_params(base)
    with pytest.raises(vlkv.InputError, match=says):
        convert(base, tmp_path / "out", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_updates_of_blocks_that_are_not_used(demo, weights, base):
    """An adapter of all linear layers changes the tower's last block too, which LLaVA does not run."""
    name = next(key for key in weights if key.endswith("fc1.weight") and ".layers.0." in key)
    last = max(int(key.split(".layers.")[1].split(".")[0]) for key in weights if "vision_tower" in key and "fc1" in key)
    block = name.replace(".layers.0.", f".layers.{last}.").removesuffix(".weight")
    write(base, factors(block, *weights[name].shape))
    same(vlkv.load_params(base), vlkv.load_params(demo))


def test_a_part_of_an_adapter(base):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        write(base)
        (base / name).unlink()
        with pytest.raises(vlkv.InputError, match=f"{name}: no such file, so its adapter is not complete"):
            vlkv.load_params(base)
    write(base)
    (base / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(vlkv.InputError, match=r"adapter_model[.]safetensors: truncated or corrupt"):
        vlkv.load_params(base)
