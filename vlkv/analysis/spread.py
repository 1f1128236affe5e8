"""How importance is distributed over the tokens of a layer, and budgets over the layers.

Axes: B batch · L layers · K key heads · T tokens. Axes before the last one are batch axes.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.cache.pool import PackedCache

AnyArray = Array | np.ndarray


def layer_budgets(cache: PackedCache) -> Float[Array, "B L"]:
    """Prompt entries of each layer, including text; mean over key heads (PrefixKV, Fig. 4; AirCache, Sec. 3.4)."""
    return jnp.mean(cache.counts.astype(jnp.float32), axis=-1).T


def lorenz(importance: Float[AnyArray, "*L T"], inside: Bool[AnyArray, "*#L T"]) -> Float[Array, "*L T"]:
    """The share of a layer's importance in its best 1, 2, ... T tokens: P_l^o of PrefixKV, Sec. 3.2 and Fig. 2.

    Args:
        importance: not negative. If all values of a layer are 0, its tokens count as equally important.
        inside: which tokens are counted. The curve is 1 from their number on.
    """
    inside = jnp.asarray(inside)
    x = jnp.where(inside, importance, 0.0)
    x = jnp.where(jnp.sum(x, axis=-1, keepdims=True) > 0, x, inside)
    ordered = -jnp.sort(-x, axis=-1)
    share = jnp.cumsum(ordered, axis=-1) / jnp.maximum(jnp.sum(ordered, axis=-1, keepdims=True), 1e-30)
    past = jnp.arange(x.shape[-1]) >= jnp.sum(inside, axis=-1, keepdims=True) - 1
    return jnp.where(past, 1.0, jnp.minimum(share, 1.0))


def gini(importance: Float[AnyArray, "*L T"], inside: Bool[AnyArray, "*#L T"]) -> Float[Array, "*L"]:
    """Gini coefficient: 0 for equal importance, (n - 1) / n if one of n tokens has all of it (PrefixKV, Figs. 2, 4).

    This is the area between the Lorenz curve and the line of equality, divided by the area above that line (Dorfman
    1979, which the paper cites). The paper's text omits the division.
    """
    count = jnp.sum(inside, axis=-1)
    within = jnp.arange(importance.shape[-1]) < count[..., None]
    area = jnp.sum(jnp.where(within, lorenz(importance, inside), 0.0), axis=-1) - 0.5  # trapezoids, in tokens
    return jnp.where(count > 0, 2 * area / jnp.maximum(count, 1) - 1, 0.0)


def retained(curve: Float[AnyArray, "*L T"], budget: Int[AnyArray, "*L"]) -> Float[Array, "*L"]:
    """The share of a layer's importance in its `budget` best tokens, from its `lorenz` curve (PrefixKV, Fig. 2)."""
    kept = jnp.take_along_axis(curve, jnp.maximum(budget - 1, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(budget > 0, kept, 0.0)


def jensen_shannon(p: Float[AnyArray, "*L n"], q: Float[AnyArray, "*L n"]) -> Float[np.ndarray, "*L"]:
    """Jensen-Shannon divergence in bits, between 0 and 1, for example of two budgets over layers (AirCache, Table 13).

    Args:
        p: weights, not negative. They are divided by their sum; if the sum is 0, the result is NaN.
        q: weights of the other distribution.
    """
    from scipy.spatial.distance import jensenshannon  # noqa: PLC0415 (slow to import)

    with np.errstate(invalid="ignore"):
        return jensenshannon(np.asarray(p, np.float64), np.asarray(q, np.float64), base=2, axis=-1) ** 2


def value_histograms(
    a: Float[AnyArray, "*L T"], b: Float[AnyArray, "*L T"], inside: Bool[AnyArray, "*#L T"], *, bins: int = 64
) -> tuple[Float[np.ndarray, "*L bins"], Float[np.ndarray, "*L bins"]]:
    """Histograms of `a` and `b` in the same bins of equal width, from 0 to the largest value of both.

    For the self and cross scores of CSP these are its Fig. 1(a); their `jensen_shannon` is its Figs. 1(b) and 7.
    """
    a, b, inside = np.broadcast_arrays(a, b, inside)
    counts = np.zeros((2, *a.shape[:-1], bins))
    for row in np.ndindex(a.shape[:-1]):
        values = [x[row][inside[row]] for x in (a, b)]
        largest = max(x.max(initial=0) for x in values) or 1.0
        for count, x in zip(counts, values, strict=True):
            count[row] = np.histogram(x, bins, (0, largest))[0]
    return counts[0], counts[1]


def density(values: Float[np.ndarray, " n"], x: Float[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
    """Gaussian kernel density estimate of `values` at the points `x` (CSP, Fig. 6).

    The bandwidth is n^(-1/5) standard deviations (Scott's rule), but at least the smallest distance between points.
    """
    if not len(values):
        return np.zeros(len(x))
    least = np.abs(np.diff(x)).min() if len(x) > 1 else 1.0
    width = max(float(np.std(values)) * len(values) ** -0.2, float(least))
    z = (x[:, None] - values[None]) / width
    return np.exp(-(z**2) / 2).mean(axis=1) / (width * np.sqrt(2 * np.pi))
