"""Functions that the Mosaic TPU kernels share: the target device, the interpreter, matrix products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MASKED = -1e30  # logit of a masked entry; finite, so that differences are not NaN
FLOOR = -1e29  # smallest running maximum of logits, so that exp(MASKED - FLOOR) is 0


def device_kind() -> str:
    """The kind of the device that is compiled for."""
    return _device().device_kind


def cores() -> int:
    """TensorCores that share the grid of a kernel: 2 on v4 and v5p, else 1; 1 in the interpreter."""
    device = _device()
    return int(getattr(device, "num_cores", None) or 1) if device.platform == "tpu" else 1


def _device() -> Any:
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def interpreter(interpret: bool) -> Any:
    """The `interpret` argument of `pallas_call`: a simulated TPU that detects races, or False."""
    return pltpu.InterpretParams(detect_races=True) if interpret else False


def dot(x: Any, y: Any, contract: tuple[int, int]) -> Any:
    """x y, contracted over one axis of each, accumulated in float32. Mixed dtypes are converted to float32 first."""
    if x.dtype != y.dtype:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def dot_exact(x: Any, y: Any, contract: tuple[int, int]) -> Any:
    """Exact product of float32 x and a bfloat16 0/1 matrix y with at most one 1 per sum: it moves elements of x."""
    total = 0.0
    for _ in range(3):  # a float32 is the sum of three bfloat16 numbers
        part = x.astype(jnp.bfloat16)
        total = total + dot(part, y, contract)
        x = x - part.astype(jnp.float32)
    return total
