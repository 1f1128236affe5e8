"""What the Mosaic TPU kernels share: the device compiled for, the interpreter, matrix products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MASKED = -1e30  # a logit that takes no part; finite, so that differences of two are numbers
FLOOR = -1e29  # of the largest logit so far: exp(MASKED - FLOOR) is 0


def device_kind() -> str:
    """Of the device compiled for."""
    return _device().device_kind


def cores() -> int:
    """TensorCores that share a kernel's grid: two where v4 and v5p join them, else one; one in the interpreter."""
    device = _device()
    return int(getattr(device, "num_cores", None) or 1) if device.platform == "tpu" else 1


def _device() -> Any:
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def interpreter(interpret: bool) -> Any:
    """For `pallas_call`: a simulated TPU that notes races, or False."""
    return pltpu.InterpretParams(detect_races=True) if interpret else False


def dot(x: Any, y: Any, contract: tuple[int, int]) -> Any:
    """x y over one axis of each, accumulated in float32, in the dtype of both if that is one, else in float32."""
    if x.dtype != y.dtype:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def dot_exact(x: Any, y: Any, contract: tuple[int, int]) -> Any:
    """The same of float32 x and a bfloat16 y of zeros and ones with one 1 per sum: x moved about, to the last bit."""
    total = 0.0
    for _ in range(3):  # three bfloat16 hold a float32
        part = x.astype(jnp.bfloat16)
        total = total + dot(part, y, contract)
        x = x - part.astype(jnp.float32)
    return total
