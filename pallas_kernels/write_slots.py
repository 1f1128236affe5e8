"""write_slots: one new entry per row and key head, written into a pool or a tail in place.

Axes: B batch · K key heads · P slots · H head dim. `#K` is K or 1: a pool may have one column for all heads.
"""

from jaxtyping import Array, Int, Shaped

from pallas_kernels.dispatch import choose, implementations
from pallas_kernels.slots.reference import WriteArguments

_IMPLEMENTATIONS = implementations("write_slots", "mosaic_tpu", folder="slots")


def write_slots(
    x: Shaped[Array, "B #K P H"],
    new: Shaped[Array, "B K H"],
    slot: Int[Array, "B K"],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "B #K P H"]:
    """Returns `x` with `new[b, k]` at slot `slot[b, k]`. Jitted with `x` donated, or in a loop, it copies nothing.

    Args:
        x: keys or values.
        new: the entries, which are cast to the dtype of x.
        slot: slots, which must differ for heads that share a column. Entries with a negative slot, or one of P or more,
            are not written.
        implementation: a name from `dispatch.available`; None chooses one for the platform.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    batch, kv_heads, head_dim = new.shape
    if x.shape[0] != batch or x.shape[1] not in (1, kv_heads) or x.shape[3] != head_dim or slot.shape != new.shape[:2]:
        expected = "expected [B, K, P, H] or [B, 1, P, H], [B, K, H] and [B, K]"
        raise ValueError(f"write_slots: x {x.shape}, new {new.shape} and slot {slot.shape} do not fit: {expected}")
    return choose("write_slots", _IMPLEMENTATIONS, implementation, "xla")(WriteArguments(x, new.astype(x.dtype), slot))
