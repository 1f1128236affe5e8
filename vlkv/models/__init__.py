"""Models by family. `init` makes one with random weights, `abstract` its shapes alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from vlkv import sharding
from vlkv.config import TEXT_FAMILIES, ModelConfig
from vlkv.layers import Initializer, Order
from vlkv.models.eve import Eve
from vlkv.models.internvl import InternVl
from vlkv.models.llava import Llava
from vlkv.models.llava_next import LlavaNext
from vlkv.models.mobilevlm import MobileVlm
from vlkv.models.qwen2_vl import QwenVl
from vlkv.models.qwen_vl import FirstQwenVl
from vlkv.models.text import TextModel

Model = Llava | LlavaNext | InternVl | QwenVl | MobileVlm | FirstQwenVl | Eve | TextModel
_CLASSES: dict[str, type] = {
    **dict.fromkeys(("llava", "llava_llama"), Llava),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "llava_qwen"), LlavaNext),
    **dict.fromkeys(("internvl", "internvl_chat"), InternVl),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), QwenVl),
    "mobilevlm": MobileVlm,
    "qwen": FirstQwenVl,
    "eve": Eve,
    **dict.fromkeys(TEXT_FAMILIES, TextModel),
}


def init(
    config: ModelConfig, key: Key[Array, ""], mesh: Mesh | None = None, *, dtype: DTypeLike = jnp.float32
) -> Model:
    """A model with random weights: for training, and for timing, since speed does not depend on the weights.

    Args:
        config: its sizes, from a folder or from `vlkv.presets`.
        key: of all weights; a mesh does not change them.
        mesh: makes every weight where it belongs on this mesh, as `load` places them; None: the default device.
        dtype: of the weights.
    """

    model = _CLASSES[config.family]
    if mesh is None:
        return model(config, init=Initializer(key, dtype))
    order = jax.tree.leaves(model(config, init=Order(key)))
    leaves = jax.tree_util.tree_flatten_with_path(abstract(config, dtype))[0]
    placed = {int(number): sharding.where(sharding.path_name(keypath), leaf.shape, mesh)
              for number, (keypath, leaf) in zip(order, leaves, strict=True)}  # fmt: skip
    return model(config, init=Initializer(key, dtype, [placed[number] for number in range(len(placed))]))


def abstract(config: ModelConfig, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None) -> Model:
    """The same tree with ShapeDtypeStructs for arrays, placed on a mesh if one is given; allocates nothing."""
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0), dtype=dtype))
    if mesh is None:
        return shapes

    def one(keypath: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        there = sharding.where(sharding.path_name(keypath), x.shape, mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

    return jax.tree_util.tree_map_with_path(one, shapes)
