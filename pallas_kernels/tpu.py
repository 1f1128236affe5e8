"""Functions that the Mosaic TPU kernels share: the target device, the interpreter, matrix products."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MASKED = -1e30  # logit of a masked entry; finite, so that differences are not NaN
FLOOR = -1e29  # smallest running maximum of logits, so that exp(MASKED - FLOOR) is 0


def cores() -> int:
    """TensorCores that share the grid of a kernel: 2 on v4 and v5p, else 1; 1 on a CPU."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return int(getattr(device, "num_cores", None) or 1) if device.platform == "tpu" else 1


def interpreter(interpret: bool) -> Any:
    """The `interpret` argument of `pallas_call`: a simulated TPU, or False.

    It detects races. Reads past the end of an array give NaN, like the padding of its last tile.
    """
    return pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="uninitialized") if interpret else False


def last_axis_is_slots(slots: int, head_dim: int) -> bool:
    """Whether XLA stores an array [.., P, H] with the slots P in the lanes, which it does if this needs less padding.

    A tile has 8 x 128 numbers. This is the rule for arguments of a program; within it, XLA follows the kernels.
    """

    def padded(rows: int, lanes: int) -> int:
        return -(-rows // 8) * 8 * -(-lanes // LANES) * LANES

    return padded(head_dim, slots) < padded(slots, head_dim)


def dot(x: Any, y: Any, contract: tuple[int, int], batch: bool = False) -> Any:
    """x y, contracted over one axis of each, accumulated in float32. Mixed dtypes are converted to float32 first.

    If `batch`, the first axis of both is a batch axis.
    """
    if x.dtype != y.dtype:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    shared = ((0,), (0,)) if batch else ((), ())
    dimensions = (((contract[0],), (contract[1],)), shared)
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)
