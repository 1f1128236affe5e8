"""Writes the demo model as a Hugging Face folder: config, tokenizer, processor settings and weights.

Transformers can load the folder. Everything except the weights is defined below, so training can write it at any step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from checkpoints_convert.entry import make_entries
from vlkv import sharding
from vlkv.config import ModelConfig
from vlkv.families import Model, config_from_hf
from vlkv.families.folders import table_of
from vlkv.files import replacing_folder
from vlkv.mini import pages

_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
PAD, BOS, EOS, _, IMAGE = range(len(_SPECIAL))
_WORDS = ("user", "assistant", ":", "?", ".", "what", "does", "row", "say", "read", "the", "page",
          *pages.ORDINALS, pages.SEPARATOR, *"0123456789")  # fmt: skip
VOCABULARY = (*_SPECIAL, *_WORDS)
MAX_POSITIONS = 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "dtype": "float32",
    "image_token_index": IMAGE,
    "image_seq_length": pages.GRID**2,
    "pad_token_id": PAD,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "text_config": {
        "model_type": "llama",
        "vocab_size": len(VOCABULARY),
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 128,
        "intermediate_size": 384,
        "projection_dim": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": pages.SIZE,
        "patch_size": pages.CELL,
        "num_channels": 3,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
}

_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "processor_class": "LlavaProcessor",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "padding_side": "left",
    "model_max_length": MAX_POSITIONS,
    "clean_up_tokenization_spaces": False,
    "extra_special_tokens": {"image_token": "<image>"},
}


def processor_files(size: int, patch: int) -> dict[str, dict[str, Any]]:
    """The files about pictures of a LLaVA for square pages of `size` pixels and patches of `patch`."""
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": patch,
        "num_additional_image_tokens": 1,  # the class token, which the feature strategy `default` removes
        "vision_feature_select_strategy": "default",
        "image_processor": images,
    }
    return {"preprocessor_config.json": images, "processor_config.json": processor}


def config() -> ModelConfig:
    """The config of the demo model, equal to the one that `load_params` reads from the folder."""
    return config_from_hf(CONFIG, {"eos_token_id": EOS})


def tokenizer() -> Tokenizer:
    """The tokenizer: one token per word, digit or punctuation mark, ignoring case. Texts begin with <s>."""
    result = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    result.normalizer = normalizers.Lowercase()
    words, digits = pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)
    result.pre_tokenizer = pre_tokenizers.Sequence([words, digits])
    result.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in _SPECIAL])
    result.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return result


def write(folder: Path, params: Model, log: dict[str, Any]) -> None:
    """Writes the folder under a temporary name and renames it, so that nobody reads an incomplete folder.

    Args:
        folder: the folder to write; an earlier one is replaced.
        params: the weights.
        log: content of `training_log.json`.
    """
    with replacing_folder(folder) as fresh:
        for name, value in {
            "config.json": CONFIG,
            "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
            **processor_files(pages.SIZE, pages.CELL),
            "tokenizer_config.json": _TOKENIZER,
            "training_log.json": log,
        }.items():
            (fresh / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        (fresh / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        tokenizer().save(str(fresh / "tokenizer.json"))
        save_weights(fresh, params, CONFIG)


def save_weights(folder: Path, params: Model, raw: dict[str, Any]) -> None:
    """Writes `model.safetensors` of a LLaVA in transformers' form, whose `config.json` is `raw`."""
    save_file(tensors(params, raw), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes the file readable only for its owner


def tensors(params: Model, raw: dict[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """The weights, with the names and shapes of the Hugging Face checkpoint."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    ours = {sharding.path_name(path): np.asarray(leaf, np.float32) for path, leaf in leaves}
    table = table_of(params.config, raw)
    entries = make_entries(table.names, table.shapes())
    used = {entry.key: ours[entry.path].reshape(entry.shape) for entry in entries if entry.path in ours}
    return used | _unused(raw["vision_config"])


def _unused(c: dict[str, Any]) -> dict[str, np.ndarray]:
    """Zeros for the tower's last layer and last norm, which are not used but which transformers requires."""
    d, f = c["hidden_size"], c["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    layer = f"encoder.layers.{c['num_hidden_layers'] - 1}."
    shapes |= {f"{layer}self_attn.{name}_proj": (d, d) for name in ("q", "k", "v", "out")}
    shapes |= {f"{layer}mlp.fc1": (f, d), f"{layer}mlp.fc2": (d, f)}
    shapes |= {name: (d,) for name in ("post_layernorm", f"{layer}layer_norm1", f"{layer}layer_norm2")}
    zeros = {}
    for name, shape in shapes.items():
        zeros[f"model.vision_tower.{name}.weight"] = np.zeros(shape, np.float32)
        zeros[f"model.vision_tower.{name}.bias"] = np.zeros(shape[:1], np.float32)
    return zeros
