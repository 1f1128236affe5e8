"""attention_mass_rows: the weighted sum of attention that every query row gives, without a T x T matrix.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · G = N/K · H head dim.
"""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_mass import row_arguments
from pallas_kernels.attention_mass.reference import MassRowsArguments
from pallas_kernels.dispatch import choose, implementations, require_shapes

_IMPLEMENTATIONS = implementations("attention_mass_rows", "mosaic_tpu", "triton", folder="attention_mass")


def attention_mass_rows(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    *,
    key_weight: Float[Array, "R S"],
    key_mask: Bool[Array, " S"],
    row_place: Int[Array, " T"] | None = None,
    causal: bool = True,
    softmax_n: float = 0.0,
    implementation: str | None = None,
) -> Float[Array, "R N T"]:
    """Computes softmax_n(q k^T / sqrt(H)) @ key_weight^T over the allowed keys, in float32 and O(T) memory.

    A row without any allowed key gives 0. The arguments are those of `attention_mass`, with `key_weight`, the weight of
    each key, one line per weighting, in place of `row_weight`.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    rows = row_arguments("attention_mass_rows", q, k, key_mask, row_place, causal, softmax_n)
    weights = key_weight, "R, S", (key_weight.shape[0], k.shape[1])
    require_shapes("attention_mass_rows", key_weight=weights)
    args = MassRowsArguments(**rows, key_weight=key_weight)
    return choose("attention_mass_rows", _IMPLEMENTATIONS, implementation, "xla")(args)
