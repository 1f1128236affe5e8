"""How attention and importance are distributed over tokens and their types, and budgets over the layers.

Axes: B batch · S steps · L layers · N query heads · K key heads · H head dim · T prompt · E prompt and new tokens ·
R observers · V vision tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.cache.pool import PackedCache
from vlkv.compression import budgets
from vlkv.sharding.ops import attention_mass

AnyArray = Array | np.ndarray
TYPES = ("system", "vision", "instruction", "new")


def token_types(
    is_vision: Bool[Array | np.ndarray, "*B T"], valid: Bool[Array | np.ndarray, "*B T"]
) -> Int[Array, "*B T"]:
    """Index into `TYPES` of every prompt token; -1 for padding (A-VL, Fig. 2).

    Text before the first vision token is "system". All other text is "instruction", including all text of a prompt
    without images.
    """
    seen = jnp.cumsum(is_vision & valid, axis=-1)
    before = (seen == 0) & (seen[..., -1:] > 0)
    return jnp.where(~valid, -1, jnp.where(is_vision, 1, jnp.where(before, 0, 2)))


def shares_by_type(mass: Float[AnyArray, "S L B E"], types: Int[AnyArray, "B T"]) -> Float[Array, "S L B 4"]:
    """The share of a trace's attention that each type of token receives (A-VL, Eq. 1 and Fig. 1).

    The types of the prompt are from `token_types`; entries after the prompt have the type "new".
    """
    types = jnp.pad(types, [(0, 0), (0, mass.shape[-1] - types.shape[-1])], constant_values=3)
    return jnp.einsum("slbe,bek->slbk", mass, jax.nn.one_hot(types, len(TYPES)))


def concordance(
    a: Float[Array | np.ndarray, "*X T"],
    b: Float[Array | np.ndarray, "*X T"],
    inside: Bool[Array | np.ndarray, "*#X T"],
    fraction: float,
) -> Float[Array, "*X"]:
    """PPCI: the share of the best `fraction` of the tokens that two rankings have in common (A-VL, Eq. 2).

    Fig. 4 compares the layers of one step, Fig. 5 the steps of one layer. `a` and `b` are scores, higher is better. The
    best floor(fraction N) of the N tokens `inside` are compared, at least one. Of tokens with equal scores the earlier
    one ranks higher. NaN if N is 0.
    """
    inside = jnp.asarray(inside)
    tokens = jnp.sum(inside, axis=-1)
    count = jnp.minimum(jnp.maximum(budgets.share(fraction, tokens, a.shape[-1]), 1), tokens)

    def best(x: Array | np.ndarray) -> Array:
        order = jnp.argsort(jnp.where(inside, -x, jnp.inf), axis=-1, stable=True)
        return inside & (jnp.argsort(order, axis=-1) < count[..., None])

    return jnp.sum(best(a) & best(b), axis=-1) / count


def observer_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    valid: Bool[Array, " T"],
    observers: Int[Array | np.ndarray, " R"],
    vision: Int[Array | np.ndarray, " V"],
    until: Int[Array, " T"] | None = None,
) -> Float[Array, "R V"]:
    """Attention of single prompt tokens, the observers, to the image, in one layer of one row (AirCache, Fig. 1).

    It is the mean over heads of a softmax over the whole prompt. `observers` and `vision` are indices of tokens, and
    `until` is the index of the last token that each token attends to; None: itself.
    """
    rows = jnp.zeros((len(observers), q.shape[0])).at[jnp.arange(len(observers)), jnp.asarray(observers)].set(1.0)
    q, k = jnp.swapaxes(q, 0, 1), jnp.swapaxes(k, 0, 1)
    mass = attention_mass(q, k, row_weight=rows, key_mask=valid, row_place=until)
    return jnp.mean(mass, axis=1)[:, jnp.asarray(vision)]


def consistency(rows: Float[np.ndarray, "R V"]) -> float:
    """Mean cosine similarity of all pairs of rows: 1 if all observers attend to the same; NaN for one observer."""
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.maximum(length, 1e-30)
    count = len(rows)
    return float("nan") if count < 2 else float((unit @ unit.T).sum() - (unit**2).sum()) / (count * (count - 1))


def layer_budgets(cache: PackedCache) -> Float[Array, "B L"]:
    """Prompt entries of each layer, including text; mean over key heads (PrefixKV, Fig. 4; AirCache, Sec. 3.4)."""
    return jnp.mean(cache.counts.astype(jnp.float32), axis=-1).T


def lorenz(importance: Float[AnyArray, "*L T"], inside: Bool[AnyArray, "*#L T"]) -> Float[Array, "*L T"]:
    """The share of a layer's importance in its best 1, 2, ... T tokens: P_l^o of PrefixKV, Sec. 3.2 and Fig. 2.

    Tokens that are not `inside` do not count, and the curve is 1 from the number of the others on. If the importance of
    a layer is 0 everywhere, its tokens count as equally important.
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

    Weights are divided by their sum; if the sum is 0, the result is NaN.
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
