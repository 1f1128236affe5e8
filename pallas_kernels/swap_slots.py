"""swap_slots: exchanges pairs of slots of pools in place; the same slots in all heads.

Axes: B batch · K key heads · P slots · H head dim · M bound on the pairs of a row.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import choose, implementations
from pallas_kernels.slots.reference import SwapArguments

TILE = 16  # slots that `first` and `second` must not share: a tile of bfloat16
_IMPLEMENTATIONS = implementations("swap_slots", "mosaic_tpu", folder="slots")


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
        implementation: a name from `dispatch.available`; None chooses one for the platform.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    batch = first.shape[0]
    if any(x.shape[0] != batch for x in pools) or second.shape != first.shape or count.shape != (batch,):
        shapes = f"pools {[x.shape for x in pools]}, first {first.shape}, second {second.shape} and count {count.shape}"
        raise ValueError(f"swap_slots: {shapes} do not fit: expected [B, K, P, ...], twice [B, M], [B]")
    return choose("swap_slots", _IMPLEMENTATIONS, implementation, "xla")(SwapArguments(pools, first, second, count))
