"""Changes of slots in place. write_slots: one new entry per row and key head, written into a pool or a tail.
swap_slots: exchanges pairs of slots of pools, the same slots in all heads.

Axes: B batch · K key heads · P slots · H head dim · M bound on the pairs of a row. `#K` is K or 1: a pool may have one
column for all heads.
"""

from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.dispatch import run
from pallas_kernels.slots.reference import SwapArguments, WriteArguments

TILE = 16  # slots that `first` and `second` of `swap_slots` must not share: a tile of bfloat16


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
    return run("write_slots", WriteArguments(x, new.astype(x.dtype), slot), implementation)


def swap_slots(
    pools: tuple[Float[Array, "B K P *H"] | Int[Array, "B K P *H"], ...],
    first: Int[Array, "B M"],
    second: Int[Array, "B M"],
    count: Int[Array, " B"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K P *H"] | Int[Array, "B K P *H"], ...]:
    """Returns the pools with slots first[b, i] and second[b, i] of every head exchanged for i < count[b].

    Jitted with the pools donated, or in a loop, it copies nothing else, and without pairs nothing at all.

    Args:
        pools: keys and values, or other arrays of slots.
        first: slots, ascending.
        second: slots, ascending; none in a tile (slots 0 to 15, 16 to 31, ...) that has one of `first`.
        count: how many pairs are exchanged; the others may hold anything.
        implementation: see `write_slots`.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    batch = first.shape[0]
    if any(x.shape[0] != batch for x in pools) or second.shape != first.shape or count.shape != (batch,):
        shapes = f"pools {[x.shape for x in pools]}, first {first.shape}, second {second.shape} and count {count.shape}"
        raise ValueError(f"swap_slots: {shapes} do not fit: expected [B, K, P, ...], twice [B, M], [B]")
    return run("swap_slots", SwapArguments(pools, first, second, count), implementation)
