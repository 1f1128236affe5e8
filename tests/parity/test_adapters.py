"""LoRA adapters, applied when a checkpoint is loaded or converted, against peft on the same files."""

import copy
import json
import shutil

import jax
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests import programs
from tests.families.common_qwen import make as make_qwen
from tests.models import same
from tests.parity.conftest import Later, make_llava, make_text, torch, transformers

peft, files = Later("peft"), Later("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of peft
forward = programs.forward
IDS = np.arange(3, 40)[None]
ATTENTION = ["q_proj", "v_proj"]
ALL = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
REPLACED = ["lm_head", "embed_tokens", "norm"]


def write(model, folder, dtype=None, **options):
    """Writes an adapter of random numbers into `folder`; returns peft's model."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, **options}
    torch.manual_seed(0)
    made = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "modules_to_save" in name or (name.endswith("bias") and parameter.requires_grad):
                parameter.add_(0.3 * torch.randn(parameter.shape))
    made.save_pretrained(folder)
    if dtype is not None:
        file = folder / "adapter_model.safetensors"
        files.save_file({key: x.to(dtype) for key, x in files.load_file(file).items()}, file)
    return made.eval()


def check_logits(made, params) -> None:
    """The adapter applied by peft in the forward pass, not merged."""
    with torch.no_grad():
        theirs = made(input_ids=torch.from_numpy(IDS)).logits.numpy()
    inputs = vlkv.Inputs.from_hf({"input_ids": IDS, "attention_mask": np.ones_like(IDS)}, params.config)
    ours = np.asarray(forward(params, inputs))[:, : IDS.shape[1]]
    assert theirs.std() >= 1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2")
    model = make_text("qwen2")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def joined(qwen2, tmp_path):
    return shutil.copytree(qwen2[1], tmp_path / "joined")


OPTIONS = {
    "attention": {},
    "patterns": dict(target_modules=ALL, rank_pattern={"layers.0.self_attn.q_proj": 2, "down_proj": 8},
                     alpha_pattern={r"layers\.\d+\.mlp\.up_proj": 3, "v_proj": 1}),
    "rslora": dict(use_rslora=True, rank_pattern={"q_proj": 2}),
    "all biases": dict(bias="all"),
    "biases of targets": dict(bias="lora_only"),
    "own biases": dict(lora_bias=True),
    "fan_in_fan_out": dict(fan_in_fan_out=True),
    "replaced": dict(modules_to_save=REPLACED),
    "embedding": dict(target_modules=["embed_tokens", "lm_head", "q_proj"]),
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_text(qwen2, joined, options):
    made = write(qwen2[0], joined, **options)
    check_logits(made, vlkv.load_params(joined))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_logits(made, vlkv.load_params(qwen2[1]))


@pytest.mark.parametrize("options", [
    dict(target_modules=["embed_tokens"]), dict(target_modules=["lm_head"]),
    dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    dict(target_modules=["q_proj"]),
], ids=["embedding", "head", "saved embedding", "saved head", "saved together", "neither"])  # fmt: skip
def test_an_adapter_of_a_tied_model_may_untie_it(tmp_path, options):
    model = make_text("qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    made = write(model, tmp_path / "base", **options)
    check_logits(made, vlkv.load_params(tmp_path / "base"))
    convert(tmp_path / "base", tmp_path / "out", progress=False)
    same(vlkv.load_params(tmp_path / "out"), vlkv.load_params(tmp_path / "base"))
    check_logits(made, vlkv.load_params(tmp_path / "out"))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    check_logits(read, vlkv.load_params(tmp_path / "out"))


MODELS = {
    "fused": (lambda: make_text("phi3"), ["qkv_proj", "gate_up_proj"]),
    "llava": (make_llava, [*ALL, "out_proj", "fc1", "linear_1", "patch_embedding"]),
    "qwen2_vl": (lambda: make_qwen("qwen2_vl"), [*ALL, "qkv", "proj", "mlp.0"]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_towers_convolutions_and_fused_tensors(tmp_path, kind):
    """Against the folder that peft merges, also when the adapter is alone, and converted in both formats."""
    make, targets = MODELS[kind]
    model, base, alone = make(), tmp_path / "base", tmp_path / "alone"
    model.save_pretrained(base)
    model.name_or_path = str(base)
    write(model, alone, target_modules=targets).merge_and_unload().save_pretrained(tmp_path / "merged")
    config = json.loads((alone / "adapter_config.json").read_text())
    (alone / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    merged = vlkv.load_params(tmp_path / "merged")
    same(vlkv.load_params(alone), merged, atol=1e-6)
    plain = jax.tree.leaves(vlkv.load_params(base))
    assert sum(not np.allclose(x, y) for x, y in zip(plain, jax.tree.leaves(merged), strict=True)) > 4
    for form in ("safetensors", "orbax"):
        convert(alone, tmp_path / form, format=form, progress=False)
        same(vlkv.load_params(tmp_path / form), vlkv.load_params(alone))
        manifest = json.loads((tmp_path / form / "vlkv_manifest.json").read_text())
        assert (manifest["source"], manifest["adapter"]) == ("base", "alone")
        assert not (tmp_path / form / "adapter_config.json").exists()


def test_names_of_transformers_4(qwen2, tmp_path):
    model = make_llava()
    model.save_pretrained(tmp_path / "base")
    write(model, tmp_path / "base", rank_pattern={"model.language_model.layers.0.self_attn.q_proj": 2})
    new = vlkv.load_params(tmp_path / "base")
    file, config = (tmp_path / "base" / f"adapter_{name}" for name in ("model.safetensors", "config.json"))
    old = "language_model.model."
    files.save_file({key.replace("model.language_model.", old): x for key, x in files.load_file(file).items()}, file)
    config.write_text(config.read_text().replace("model.language_model.", old))
    same(vlkv.load_params(tmp_path / "base"), new)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_updates_are_computed_in_float32_and_cast_once(qwen2, tmp_path, kind):
    """A bfloat16 model keeps its dtype, whatever that of the adapter is."""
    model = copy.deepcopy(qwen2[0]).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    targets = dict(target_modules=[*ALL, "embed_tokens"], modules_to_save=["norm", "lm_head"])
    write(model, tmp_path, dtype=getattr(torch, kind), **targets)
    params = vlkv.load_params(tmp_path)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    adapter = files.load_file(tmp_path / "adapter_model.safetensors")
    part = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{part}.lora_{side}.weight"].double() for side in "AB")
    exact = model.state_dict()[f"{part}.weight"].double() + 1.5 * (b @ a)
    np.testing.assert_array_equal(
        np.asarray(params.decoder.layers[1].down.weight, np.float32), exact.float().to(torch.bfloat16).float().numpy()
    )
    saved = adapter["base_model.model.lm_head.weight"].to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(np.asarray(params.decoder.head.weight, np.float32), saved)


def test_pickled_adapters_are_read_by_convert(qwen2, joined, tmp_path):
    made = write(qwen2[0], joined, target_modules=ALL)
    expected = vlkv.load_params(joined)
    file = joined / "adapter_model.safetensors"
    torch.save(files.load_file(file), file.with_suffix(".bin"))
    file.unlink()
    with pytest.raises(vlkv.InputError, match=r"adapter_model[.]bin: pickle weights .* `vlkv convert` reads them"):
        vlkv.load_params(joined)
    convert(joined, tmp_path / "out", progress=False)
    same(vlkv.load_params(tmp_path / "out"), expected)
    check_logits(made, expected)
