"""Cases of `config.json`: the same weights, config and prompt in transformers and in vlkv."""

import copy
import dataclasses
import inspect
import json
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers

import vlkv
from tests.families import forms, tiny
from vlkv.errors import InputError
from vlkv.families import config_from_hf

Raw = dict[str, Any]
Case = tuple[str, Raw]  # what is changed; the config
ABSENT = "absent"
_LARGEST = 3_000_000  # parameters of a model that is built; of larger ones only sizes are compared
# Not read by the computation of logits, or part of the case's own set-up.
_SKIPPED = {
    "transformers_version", "architectures", "dtype", "torch_dtype", "return_dict", "output_hidden_states", "id2label",
    "label2id", "problem_type", "text_config", "vision_config", "audio_config", "model_type", "use_cache",
    "bos_token_id", "eos_token_id", "chunk_size_feed_forward", "is_encoder_decoder", "name_or_path",
}  # fmt: skip
_DROPOUT = ("dropout", "pdrop", "initializer", "router_aux", "output_router", "layer_scale_init", "projection_dim")
# Fields that older files, or files of other classes, have: of text, vision and whole configs, and of image processors.
CHANGES: dict[str, list[Raw]] = json.loads(Path(__file__).with_name("changes.json").read_text())

TEXT: dict[str, Raw] = {kind: dict(forms.DECODER) for kind in ("llama", "mistral", "qwen2", "qwen3", "phi3")}
TEXT["mistral"]["sliding_window"] = 16
TEXT["qwen3"]["head_dim"] = 8
TEXT["qwen3_moe"] = dict(forms.DECODER, head_dim=8, **forms.EXPERTS)
TEXT |= {f"{kind}_text": dict(tiny.RAW[kind]["text_config"]) for kind in ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe")}
TEXT["gemma3_text"]["tie_word_embeddings"] = TEXT["gemma4_text"]["tie_word_embeddings"] = True
TEXT["gemma4_text"] |= dict(attention_k_eq_v=False, use_bidirectional_attention=None)
_OWN = ("llava_llama", "mobilevlm", "llava_qwen", "internvl_chat", "qwen", "eve")  # not known to transformers
FAMILIES = (*TEXT, *(kind for kind in tiny.RAW if kind not in _OWN))


class Base:
    """A family's config, prompt and logits, which the cases change."""

    def __init__(self, family: str) -> None:
        self.family, self.text = family, family in TEXT
        self.raw: Raw = json.loads(json.dumps({**(TEXT if self.text else tiny.RAW)[family], "model_type": family}))
        for part in (self.raw, self.raw.get("text_config") or {}):
            if "vocab_size" in part:
                part.setdefault("pad_token_id", 0)
        self.config = config_from_hf(self.raw)
        rng = np.random.default_rng(1)
        ids, self.extra = rng.integers(3, 90, 40).tolist(), {}
        if not self.text:
            picture = tiny.TINY[family].picture(self.config, rng, 2, True)
            ids[4:4] = [forms.START, *[self.config.image_token] * picture.tokens, forms.END]
            for name, values in picture.extra.items():
                kind = np.float32 if name.startswith("pixel") else np.int64
                self.extra[name] = np.stack([np.asarray(x, kind) for x in values])
        self.ids = np.array([ids])
        self.theirs, model, self.logits = run_theirs(self.raw, self)
        assert np.abs(run_ours(self.raw, model, self) - self.logits).max() < 2e-3, f"{family}: the base differs"

    def cases(self) -> Iterator[Case]:
        """All cases that differ from the base and from each other."""
        seen = [self.raw]
        for name in ["", *(name for name in ("text_config", "vision_config") if name in self.raw)]:
            part, config = (self.raw[name], getattr(self.theirs, name)) if name else (self.raw, self.theirs)
            older = CHANGES["text" if "vocab_size" in part else "vision" if name else "outer"]
            for change in (*_fields(part, config), *older):
                raw = _changed(self.raw, name, change)
                if raw not in seen:
                    seen.append(raw)
                    yield f"{name}{'.' * bool(name)}{json.dumps(change)}", raw

    def outcome(self, raw: Raw) -> tuple[str, str]:
        """`equal`, `refused`, `unusable` or `differs`, and details."""
        try:
            config, model, theirs = run_theirs(raw, self)
        except Exception as error:  # transformers raises many kinds
            return "unusable", f"{type(error).__name__}: {str(error)[:120]}"
        try:
            ours = config_from_hf(raw)
            if model is None:
                same = _sizes(ours) == _their_sizes(config)
                return ("equal", "sizes") if same else ("differs", f"{_sizes(ours)} and {_their_sizes(config)}")
            moved = theirs.shape != self.logits.shape or np.abs(theirs - self.logits).max() > 1e-6
            if not moved and _computed(ours) == _computed(self.config):
                return "equal", "neither moves"
            error = np.abs(run_ours(raw, model, self) - theirs).max()
        except InputError as refusal:
            return "refused", str(refusal)
        except Exception as crash:  # a fault
            return "differs", f"crash: {type(crash).__name__}: {str(crash)[:120]}"
        return ("equal", "both move") if error < 2e-3 else ("differs", f"by {error:.3g}; transformers moves: {moved}")


def _fields(part: Raw, config: Any) -> Iterator[Raw]:
    for field in dataclasses.fields(config):
        name = field.name
        if name in _SKIPPED or name.startswith("_") or any(part in name for part in _DROPOUT):
            continue
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # of Gemma 4's layers, which differ in it
            value = part.get(name)
        yield {name: None}
        if name in part:
            yield {name: ABSENT}
        if isinstance(value, bool):
            yield {name: not value}
        elif isinstance(value, float):
            yield from ({name: value * 3 or 0.5}, {name: 0.0})
        elif isinstance(value, int):
            yield from ({name: value + 1}, {name: max(1, value // 2)}, {name: 0})
        elif isinstance(value, str):
            yield {name: "relu" if "act" in name else "other"}
        elif isinstance(value, list) and value:
            yield from ({name: value[::-1]}, {name: value[:-1]})


def _changed(raw: Raw, name: str, change: Raw) -> Raw:
    raw = copy.deepcopy(raw)
    part = raw[name] if name else raw
    rope = part.get("rope_parameters") or part.get("rope_scaling") or {}
    kept = {field: rope[field] for field in ("mrope_section", "partial_rotary_factor") if field in rope}
    layers = part.get("num_hidden_layers", 2)
    for field, value in change.items():
        if value == ABSENT:
            part.pop(field, None)
        elif field.startswith("rope_") and isinstance(value, dict) and value:  # in place of the base's
            part.pop({"rope_scaling": "rope_parameters", "rope_parameters": "rope_scaling"}[field], None)
            part[field] = {**value, **kept}
        else:
            kinds = (["sliding_attention", "full_attention"] * layers)[:layers]
            part[field] = kinds if value == "sliding" else value
    return raw


def run_theirs(raw: Raw, base: Base) -> tuple[Any, Any, Any]:
    """transformers' config, model and logits; no model and logits if it is too large."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.AutoModelForCausalLM if base.text else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        if sum(p.numel() for p in kind.from_config(config).parameters()) > _LARGEST:
            return config, None, None
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            if p.ndim <= 1:
                p.copy_(float((p == 1).all()) + 0.2 * noise)
            else:
                p.copy_(noise * p.shape[-1] ** -0.5 * 1.3)
    model.tie_weights()
    known = inspect.signature(model.forward).parameters
    batch = {name: torch.tensor(value) for name, value in base.extra.items() if name in known}
    batch |= {"input_ids": torch.tensor(base.ids), "attention_mask": torch.ones(base.ids.shape, dtype=torch.long)}
    for name in {"mm_token_type_ids", "token_type_ids"} & set(known):
        batch[name] = torch.eq(batch["input_ids"], base.config.image_token or -1).long()
    with torch.no_grad():
        return config, model, model(**batch).logits[0].float().numpy()


def run_ours(raw: Raw, model: Any, base: Base) -> np.ndarray:
    """vlkv's logits with the weights of `model`."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        params = vlkv.load_params(folder, dtype="float32")
        batch = {"input_ids": base.ids, "attention_mask": np.ones_like(base.ids), **base.extra}
        inputs = vlkv.Inputs.from_hf(batch, params.config)
        return np.asarray(jax.jit(vlkv.forward)(params, inputs))[0][: base.ids.shape[1]]


def _computed(config: Any) -> Any:
    """The config without what does not change logits."""
    return dataclasses.replace(config, stop=(), decoder=dataclasses.replace(config.decoder, max_positions=512))


def _sizes(config: Any) -> tuple[Any, ...]:
    d, v = config.decoder, config.vision
    tower = () if v is None else (v.width, v.layers, v.heads, v.patch_size)
    return d.vocab_size, d.width, d.layers, d.heads, d.kv_heads, *tower


def _their_sizes(config: Any) -> tuple[Any, ...]:
    t, v = config.get_text_config(), getattr(config, "vision_config", None)
    try:
        full = t.per_layer_config["full_attention"]  # Gemma 4
    except (AttributeError, KeyError, TypeError, ValueError):
        full = t
    decoder = t.vocab_size, t.hidden_size, t.num_hidden_layers, t.num_attention_heads, full.num_key_value_heads
    if v is None:
        return decoder
    patch = v.patch_size[0] if isinstance(v.patch_size, list | tuple) else v.patch_size
    width = getattr(v, "embed_dim", None) or v.hidden_size
    return *decoder, width, v.num_hidden_layers, v.num_attention_heads, patch
