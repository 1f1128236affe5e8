"""Models by family. `init` makes one with random weights, `abstract` its shapes alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from vlkv.config import TEXT_FAMILIES, ModelConfig
from vlkv.layers import Initializer
from vlkv.models.eve import Eve
from vlkv.models.llava import Llava
from vlkv.models.mobilevlm import MobileVlm
from vlkv.models.qwen_vl import QwenVl
from vlkv.models.text import TextModel

Model = Eve | Llava | MobileVlm | QwenVl | TextModel
_CLASSES: dict[str, type] = {
    **dict.fromkeys(("llava", "llava_llama"), Llava),
    "mobilevlm": MobileVlm,
    "qwen": QwenVl,
    "eve": Eve,
    **dict.fromkeys(TEXT_FAMILIES, TextModel),
}


def init(config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike = jnp.float32) -> Model:
    """A model with random weights: for training, and for timing, since speed does not depend on the weights."""
    return _CLASSES[config.family](config, init=Initializer(key, dtype))


def abstract(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Model:
    """The same tree with ShapeDtypeStructs for arrays; allocates nothing."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0), dtype))
