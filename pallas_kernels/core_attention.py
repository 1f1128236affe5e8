"""core_attention: one query per row against a list of slots of its segment and the text after them (A-VL's operator).

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · C bound on the listed slots ·
M bound on a segment · H head dim.
"""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention import _IMPLEMENTATIONS, check_shapes
from pallas_kernels.decode_attention.reference import DecodeArguments, Listed
from pallas_kernels.denominator import finish
from pallas_kernels.dispatch import choose, platforms, require_shapes
from pallas_kernels.quantized import Quantized


def core_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"] | Quantized,
    v: Float[Array, "B #K P H"] | Quantized,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    offsets: Int[Array, "B C"],
    count: Int[Array, " B"],
    text: Int[Array, "B K"],
    *,
    valid: Bool[Array, "B K M"] | None = None,
    max_length: int | None = None,
    softmax_n: float = 0.0,
    return_mass: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N ..."], ...]:
    """`decode_attention` over slots start + offsets[i] for i < count, and over start + j for text <= j < length.

    Other slots of the segment have no influence, as long as they hold finite numbers. Whether they are read depends on
    the implementation.

    Args:
        q, k, v, start, length: see `decode_attention`.
        offsets: listed slots as offsets from `start`: ascending, below `text`, the same for all heads.
        count: how many entries of `offsets` are used; the others may hold anything.
        text: offset from `start` of the first text slot; all slots from there on take part.
        valid: which slots of the segment may take part, by offset from `start`; None: all used slots.
        max_length, softmax_n, return_mass, implementation: see `decode_attention`.

    Returns:
        The same as `decode_attention`.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    check_shapes("core_attention", q, k, v, start, length)
    batch, most = q.shape[0], k.shape[2] if max_length is None else max_length
    if offsets.ndim != 2 or offsets.shape[0] != batch or count.shape != (batch,):
        fit = f"must be [B, C] and [B] with B = {batch}"
        raise ValueError(f"core_attention: offsets {offsets.shape} and count {count.shape} {fit}")
    require_shapes("core_attention", text=(text, "B, K", start.shape), valid=(valid, "B, K, M", (*start.shape, most)))
    args = DecodeArguments(q, k, v, start, length, valid, most, return_mass, Listed(offsets, count, text))
    out, lse, mass = choose("core_attention", _IMPLEMENTATIONS, implementation, "xla")(args)
    return finish(out, lse, mass, softmax_n)


def reads_tiles(k: Float[Array, "B #K P H"] | Quantized, implementation: str | None) -> bool:
    """Whether `core_attention` reads whole tiles of slots, so that it reads less if the listed slots share tiles.

    It does so on a TPU. `swap_slots` brings the slots of a pool together there if the head dim fills the lanes.
    """
    on_tpu = "tpu" in platforms() if implementation is None else implementation.startswith("mosaic_tpu")
    return on_tpu and not isinstance(k, Quantized) and k.shape[3] % 128 == 0
