"""Qwen-VL and Qwen-VL-Chat (Bai et al. 2023) in their authors' form: a ViT, a resampler, and a Qwen 1 decoder.

Every image is resized to one square and becomes a square of vision tokens: the resampler's queries, which have
positions on a square. The decoder has Qwen2's shape. Prompts are limited to the length it was trained on
(`seq_length`), up to which its dynamic NTK scaling has no effect. Its log-length scaling affects tokens that are
generated beyond that length.

The tower is OpenCLIP's ViT without a class token. Two details of the authors' code are kept: position embeddings are
stored for 16 x 16 patches and resized to the grid by bicubic interpolation (torch's, with a = -0.75 and corners not
aligned); the resampler adds position embeddings to queries and keys, not to values.

Axes: I images · V patches · v tokens · N heads · H head dim · D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import (
    DecoderConfig,
    ModelConfig,
    Raw,
    RopeConfig,
    filled,
    number,
    positives,
    require,
    require_all,
    token_id,
)
from vlkv.decoder.layers import Initializer, JoinHeads, LayerNorm, Linear, SplitHeads
from vlkv.errors import InputError
from vlkv.families.family import Family, VisionLanguageModel
from vlkv.families.names import stored_names
from vlkv.files import class_defaults, read_json
from vlkv.processing.host import SquareConfig
from vlkv.processing.pictures import Pictures
from vlkv.processing.pixels import Layout, RawSettings
from vlkv.processing.templates import ChatTemplate, stored
from vlkv.towers.native import cubic_weights
from vlkv.towers.vit import Vit, VitConfig

_FORMATS = ("raw", "chatml")  # in generation_config.json
# Special tokens of the authors' tokenizer (tokenization_qwen.py); their ids follow those of the ordinary tokens.
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)),
    "<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<img>", "</img>", "<imgpad>",
)  # fmt: skip
_DEFAULTS, _TOWER_DEFAULTS = class_defaults("qwen_vl").values()


class QwenVlConfig(SquareConfig):
    """The form of `config.json` that the authors' code reads."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        if not isinstance(raw.get("visual"), Mapping):
            raise InputError("config.json: visual is missing: Qwen-VL is supported, the text model Qwen is not")
        c = filled(raw, _DEFAULTS)
        require_all(c, {"rotary_pct": 1.0, "scale_attn_weights": True, "no_bias": True})
        positives(c, ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                      "kv_channels", "max_position_embeddings", "seq_length"))  # fmt: skip
        if c["kv_channels"] % 2 or c["intermediate_size"] % 2:
            raise InputError("config.json: kv_channels and intermediate_size must be even")
        visual = {**_TOWER_DEFAULTS, **c["visual"]}
        length, eos = c["seq_length"], token_id(c, "eos_token_id", default=_DEFAULTS["eos_token_id"])
        start = token_id(visual, "image_start_id", default=_TOWER_DEFAULTS["image_start_id"])
        theta = number("rotary_emb_base", c["rotary_emb_base"], above=1)
        decoder = DecoderConfig(
            vocab_size=c["vocab_size"], width=c["hidden_size"], layers=c["num_hidden_layers"],
            mlp_width=c["intermediate_size"] // 2,  # the field is the sum for gate and up
            heads=c["num_attention_heads"], kv_heads=c["num_attention_heads"], head_dim=c["kv_channels"],
            norm_eps=c["layer_norm_epsilon"], rope=RopeConfig(theta=theta), qkv_bias=True,
            max_positions=length if c["use_dynamic_ntk"] else c["max_position_embeddings"],
            log_from=length if c["use_logn_attn"] else None, tied=bool(c["tie_word_embeddings"]),
        )  # fmt: skip
        return {
            "decoder": decoder,
            "vision": _read_tower(visual, c["hidden_size"]),
            "image_token": start + 2,  # the ids are those of <img>, </img>, <imgpad>
            "stop": (eos, eos + 2),  # <|endoftext|> and <|im_end|>
        }

    @property
    @override
    def side(self) -> int:
        return self.vision.side

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        self.check_layout(layout)
        size = self.vision.image_size
        raw = {"size": {"height": size, "width": size}, "do_center_crop": False}
        return self.squares(RawSettings(raw, str(folder)).pixels())

    def template(self, folder: Path) -> ChatTemplate:
        """The folder's template, or the one that `generation_config.json` names: plain text, or ChatML."""
        template = ChatTemplate.from_folder(folder)
        if template is not None:
            return template
        path = folder / "generation_config.json"
        name = (read_json(path) or {}).get("chat_format", "raw")
        if name not in _FORMATS:
            raise InputError(f"{path}: chat_format={name!r} is not supported (only {', '.join(_FORMATS)})")
        return ChatTemplate.from_text(stored(f"qwen_vl_{name}"), f"{path}: chat_format={name!r}")


def _read_tower(c: Raw, width: int) -> QwenVlTowerConfig:
    positives(c, ("image_size", "patch_size", "width", "layers", "heads", "n_queries", "output_dim"), "visual.")
    require("visual.output_dim", c["output_dim"], width)
    side = round(c["n_queries"] ** 0.5)
    if side**2 != c["n_queries"] or c["output_dim"] % RESAMPLER_HEAD_DIM or c["width"] % c["heads"]:
        raise InputError(
            f"config.json: visual: n_queries must be a square, output_dim a multiple of {RESAMPLER_HEAD_DIM}, "
            "and width a multiple of heads"
        )
    if c["image_size"] % c["patch_size"]:
        raise InputError("config.json: visual: patch_size must divide image_size")
    return QwenVlTowerConfig(
        width=c["width"], mlp_width=int(c["width"] * c["mlp_ratio"]), layers=c["layers"], heads=c["heads"],
        image_size=c["image_size"], patch_size=c["patch_size"], side=side,
        resampler_heads=width // RESAMPLER_HEAD_DIM,
    )  # fmt: skip


RESAMPLER_HEAD_DIM = 128
_STORED = 16  # position embeddings per side in the checkpoint, whatever the size of the grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVlTowerConfig(VitConfig):
    """OpenCLIP's ViT and a resampler to a square of tokens."""

    side: int  # tokens per side of an image
    resampler_heads: int
    norm_eps: float = 1e-6
    feature_layer: int = -1

    patch_bias = False
    first_norm = True

    @property
    @override
    def positions(self) -> int:
        return _STORED**2

    @property
    @override
    def tokens(self) -> int:
        return self.side**2

    @property
    def out_width(self) -> int:
        """The decoder's width."""
        return self.resampler_heads * RESAMPLER_HEAD_DIM


class Resampler(nnx.Module):
    """Cross-attention from learnt queries, which have positions on a square, to all patches."""

    def __init__(self, c: QwenVlTowerConfig, *, init: Initializer) -> None:
        width, head_dim = c.out_width, RESAMPLER_HEAD_DIM
        self.tokens = init.normal(c.tokens, width, scale=0.02)
        self.position = init.normal(c.tokens, width, scale=0.02)
        self.inner = None if c.width == width else Linear(c.width, width, bias=False, init=init)
        self.query_norm = LayerNorm(width, c.norm_eps, init=init)
        self.key_norm = LayerNorm(width, c.norm_eps, init=init)
        self.query = SplitHeads(width, c.resampler_heads, head_dim, bias=True, init=init)
        self.key = SplitHeads(width, c.resampler_heads, head_dim, bias=True, init=init)
        self.value = SplitHeads(width, c.resampler_heads, head_dim, bias=True, init=init)
        self.out = JoinHeads(width, c.resampler_heads, head_dim, bias=True, init=init)
        self.grid = c.grid

    def __call__(self, x: Float[Array, "I V C"]) -> tuple[Float[Array, "I v D"], Float[Array, "I N v V"]]:
        """Tokens in raster order of the queries' square, and the attention weights from tokens to patches."""
        x = self.key_norm(x if self.inner is None else self.inner(x))
        position = self.position[...]
        q = self.query(self.query_norm(self.tokens[...]) + position)  # [v, N, H]
        k, value = self.key(x + resized(position, self.grid)), self.value(x)
        logits = jnp.einsum("tnh,ivnh->intv", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
        return self.out(jnp.einsum("intv,ivnh->itnh", weights, value)), weights


class QwenVlTower(Vit):
    """ViT, resampler, a last norm and a last linear map."""

    config: QwenVlTowerConfig

    def __init__(self, c: QwenVlTowerConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.resampler = Resampler(c, init=init)
        self.last_norm = LayerNorm(c.out_width, c.norm_eps, init=init)
        self.last = init.normal(c.out_width, c.out_width, scale=c.out_width**-0.5)  # [in, out]

    def with_attention(
        self, pixels: Float[Array, "I 3 h w"], blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "I v D"], list[Float[Array, "I N v"]]]:
        """Tokens of every image, in the decoder's width, and the attention that they receive in the given blocks.

        The attention of a token is the weighted sum over patches of the attention that the patches receive; the weights
        are the resampler's attention from the token to the patches, averaged over heads.
        """
        x, received = super().with_attention(pixels, blocks)
        x, weights = self.resampler(x)
        tokens = jnp.einsum("ivd,de->ive", self.last_norm(x), self.last[...])
        return tokens, [jnp.einsum("itv,inv->int", jnp.mean(weights, axis=1), attention) for attention in received]

    @override
    def make_position_embedding(self, c: VitConfig, *, init: Initializer) -> nnx.Param:
        return init.normal(c.positions, c.width, scale=c.width**-0.5)

    @override
    def position_embedding(self) -> Float[Array, "V D"]:
        return resized(self.position[...], self.config.grid)


def resized(table: Float[Array, "V D"], side: int) -> Float[Array, "V2 D"]:
    """A square of vectors, resized to `side` x `side` by bicubic interpolation in float32."""
    stored = round(table.shape[0] ** 0.5)
    if stored == side:
        return table
    weights = cubic_weights(jnp.arange(side)[None], stored)[0]
    square = table.astype(jnp.float32).reshape(stored, stored, -1)
    result = jnp.einsum("ya,xb,abd->yxd", weights, weights, square, precision="highest")
    return result.reshape(side**2, -1).astype(table.dtype)


class QwenVl(VisionLanguageModel):
    """A tower with a resampler, and a decoder; no projector."""

    tower = QwenVlTower

    def make_projector(self, config: ModelConfig, *, init: Initializer) -> None:
        """No projector."""


FAMILIES = {"qwen": Family(config=QwenVlConfig, model=QwenVl, names=stored_names("qwen"), special=SPECIAL)}
