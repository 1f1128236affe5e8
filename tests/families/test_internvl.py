"""What is special about InternVL: tiles, and the original checkpoints of InternVL2 to 3.5.

transformers has no class for the latter: their reference is its InternVL, whose weights are renamed and fused here as
the authors' code unpacks them. `test_every_family.py` has the rest.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from tests.families.common import Refused, check_refused, fields
from tests.families.common_internvl import IMAGE, SMALL_VIT, STOP, make_internvl
from vlkv.errors import InputError
from vlkv.families import config_from_hf


def test_an_inner_feature_layer_leaves_the_blocks_behind_it_out(saved):
    assert len(saved("internvl-6b").params.vision.blocks) == 2


ADDED = {"<IMG_CONTEXT>": IMAGE, "<|im_end|>": STOP, "<|end|>": STOP}
LONG_ROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.8], "long_factor": [1.1, 2.0, 4.0, 7.5],
    "rope_theta": 10000.0, "original_max_position_embeddings": 40,
}  # fmt: skip


TOWER = (
    ("vision_tower.", "vision_model."), ("cls_token", "class_embedding"), ("encoder.layer.", "encoder.layers."),
    ("patch_embeddings.projection", "patch_embedding"), ("position_embeddings", "position_embedding"),
    ("lambda_", "ls"), ("layernorm_before", "norm1"), ("layernorm_after", "norm2"),
    ("attention.projection_layer", "attn.proj"), ("attention.q_proj", "attn.qkv"), ("attention.", "attn."),
    ("multi_modal_projector.layer_norm", "mlp1.0"), ("multi_modal_projector.linear_1", "mlp1.1"),
    ("multi_modal_projector.linear_2", "mlp1.3"),
)  # fmt: skip
INTERNLM2 = (
    ("embed_tokens", "tok_embeddings"), ("input_layernorm", "attention_norm"), ("lm_head", "output"),
    ("post_attention_layernorm", "ffn_norm"), ("self_attn.o_proj", "attention.wo"),
    ("self_attn.q_proj", "attention.wqkv"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
)  # fmt: skip


def renamed(tensors, names, start, join):
    """Under the original names; `join` makes one tensor of queries, keys and values."""
    made = {}
    for key, value in tensors.items():
        if key.startswith(start) and "k_proj" not in key and "v_proj" not in key:
            parts = [tensors[key.replace("q_proj", f"{one}_proj")] for one in "qkv"] if "q_proj" in key else None
            name = key
            for pattern, other in names:
                name = name.replace(pattern, other)
            made[name] = value if parts is None else join(parts)
    return made


def by_key_head(parts):
    """Each key head's queries, then its key, then its value."""
    return np.concatenate([x.reshape(2, -1, x.shape[-1]) for x in parts], axis=1).reshape(-1, parts[0].shape[-1])


def write(model, folder, template, large, **changes):
    model.save_pretrained(folder / "hf")
    old = load_file(folder / "hf" / "model.safetensors")
    text = json.loads((folder / "hf" / "config.json").read_text())["text_config"]
    rope, kind = text.pop("rope_parameters"), text["model_type"]
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads", "max_position_embeddings", "hidden_act", "rms_norm_eps", "model_type")  # fmt: skip
    llm = {key: text[key] for key in fields} | {"rope_theta": rope["rope_theta"], "eos_token_id": 2}
    decoder = {key: value for key, value in old.items() if key.startswith("language_model.")}
    if kind == "llama":
        decoder = renamed(old, INTERNLM2, "language_model.", by_key_head)
        llm |= {"model_type": "internlm2", "bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    elif kind == "phi3":
        scaling = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
        llm |= {"rope_scaling": scaling, "original_max_position_embeddings": 40, "sliding_window": 262144}
    elif kind.startswith("qwen3"):
        own = ("head_dim", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        llm |= {key: text[key] for key in own if key in text} | {"sliding_window": None, "max_window_layers": 2}
        if "num_local_experts" in text:
            llm |= {"num_experts": text["num_local_experts"], "decoder_sparse_step": 1, "mlp_only_layers": []}
    else:
        llm |= {"use_sliding_window": False, "sliding_window": 32}
    vision = {
        "model_type": "intern_vit_6b", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 7, "qkv_bias": not large,
        "qk_normalization": large, "norm_type": "rms_norm" if large else "layer_norm",
    }  # fmt: skip
    raw = {
        "model_type": "internvl_chat", "llm_config": llm, "vision_config": vision, "template": template,
        "downsample_ratio": 0.5, "ps_version": "v2", "select_layer": -1, "force_image_size": 56,
        "dynamic_image_size": True, "use_thumbnail": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "added_tokens.json").write_text(json.dumps(ADDED))
    tower = renamed(old, TOWER, ("vision_tower.", "multi_modal_projector."), np.concatenate)
    save_file(tower | decoder, folder / "model.safetensors")
    return raw


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi3")
    model = make_internvl("phi3", SMALL_VIT, rope_parameters=LONG_ROPE, original_max_position_embeddings=40)
    return folder, write(model, folder, "phi3-chat", large=False)


def test_phi3_alone_and_internlm2_alone(phi3):
    _, raw = phi3
    config = config_from_hf(raw["llm_config"])
    assert config.decoder == config_from_hf(raw, added=ADDED).decoder
    assert config.decoder.rope.scale == pytest.approx((1 + np.log(256 / 40) / np.log(40)) ** 0.5)
    made = config_from_hf({**raw["llm_config"], "model_type": "internlm2", "rope_scaling": None, "bias": True})
    assert made.decoder.qkv_bias and made.decoder.out_bias and made.decoder.names == "internlm2"


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json"])
def test_the_ids_that_the_config_lacks(phi3, tmp_path, file):
    folder, raw = phi3
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(InputError, match="<IMG_CONTEXT>"):
        vlkv.load_params(tmp_path)
    content = {
        "tokenizer_config.json": {"added_tokens_decoder": {str(i): {"content": text} for text, i in ADDED.items()}},
        "tokenizer.json": {"added_tokens": [{"id": i, "content": text} for text, i in ADDED.items()]},
    }
    (tmp_path / file).write_text(json.dumps(content[file]))
    config = vlkv.load_params(tmp_path).config
    assert (config.image_token, config.stop) == (IMAGE, (STOP,))


REFUSED = (
    *fields(None, ("ps_version", "v1"), ("template", "vicuna_v1.1"), ("pad2square", True), ("force_image_size", 28),
            ("use_llm_lora", 16), ("max_dynamic_patch", 0)),
    *fields("vision_config", ("norm_type", "batch_norm")),
    *fields("llm_config", ("sliding_window", 0), ("model_type", "gemma2"), ("partial_rotary_factor", 0.5)),
    Refused("llm_config", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "ntk"),
    # InternVL3_5-GPT-OSS-20B-A4B-Preview: its decoder is named before its prompt format.
    Refused(None, {"template": "internvl2_5_gpt_oss", "llm_config": {"model_type": "gpt_oss"}},
            r"model_type='gpt_oss' is not supported \(supported: .*qwen3_moe"),
)  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED, ids=str)
def test_what_is_not_honoured_is_refused_by_name(phi3, refused):
    check_refused(phi3[1], refused, added=ADDED)
