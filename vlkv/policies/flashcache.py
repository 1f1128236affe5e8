from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.option_types import Range
from vlkv.compression.policy import Budgets, Entries, Facts, Mask, Observation, PerLayer, Policy, Scores, Statistics
from vlkv.masks import ordinal

_BLOCK = 256  # frequencies


class FlashCache(Policy):
    """Outliers from a low-pass filter along the tokens (Yang et al. 2025, "Outlier KVs").

    A cosine transform along the prompt divides keys and values into frequencies, of which the lowest are the base. A
    token's score is its squared deviation from the base, and budgets are proportional to the energy that is not in the
    base.

    Attributes:
        cutoff: share of the frequencies that form the base; the paper finds 0.1 to 0.2 best.
    """

    cutoff: Annotated[float, Range(0, 1, below=True)] = 0.2  # with 1 nothing would deviate
    facts = Facts(observes=False, capped=True)

    def deviations(self, obs: Observation, x: Entries) -> Float[Array, "K T"]:
        """Squared deviation of each valid token from the base, summed over the channels."""
        highest = budgets.unbounded_share(self.cutoff, jnp.sum(obs.valid))
        base = low_pass(x, obs.valid, highest, frequencies=1 + int(self.cutoff * x.shape[1] + 1e-6))
        return jnp.where(obs.valid, jnp.sum((x.astype(jnp.float32) - base) ** 2, axis=-1), 0.0)

    def score(self, obs: Observation) -> Scores:
        return (self.deviations(obs, obs.k) + self.deviations(obs, obs.v)) / obs.k.shape[-1]

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        def share(x: Entries) -> Float[Array, ""]:
            energy = jnp.sum(jnp.where(obs.valid[:, None], x.astype(jnp.float32), 0.0) ** 2)
            return jnp.sum(self.deviations(obs, x)) / jnp.maximum(energy, 1e-30)

        return {"outliers": share(obs.k) + share(obs.v)}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        share = statistics["outliers"]
        real = total * share / jnp.maximum(jnp.sum(share), 1e-30)
        return budgets.apportion(real, total, floor=jnp.minimum(1, most), ceiling=most)


def low_pass(x: Entries, mask: Mask, highest: Int[Array, ""], *, frequencies: int) -> Entries:
    """The part of a sequence whose DCT-II has the frequencies 0..`highest`.

    No library transform fits, because rows have different numbers of tokens under one static bound. Two matrix products
    for each block of frequencies need no complex numbers, and are faster than FFTs with 1,024 tokens on a CPU. Axes: F
    frequencies of a block.

    Args:
        x: any values; each channel is filtered.
        mask: the tokens of the sequence. The result is 0 for the others.
        highest: the last frequency that remains.
        frequencies: bound on `highest` + 1, which determines the time.
    """
    x, place, count = x.astype(jnp.float32), ordinal(mask), jnp.maximum(jnp.sum(mask), 1)

    def add(low: Entries, start: Int[Array, ""]) -> tuple[Entries, None]:
        frequency = start + jnp.arange(min(_BLOCK, frequencies))
        # cos(pi (2 t + 1) f / 2 n): its period is 4 n, so (2 t + 1) f is taken modulo 4 n.
        phase = _product_modulo(2 * place[:, None] + 1, frequency, 4 * count)
        used = mask[:, None] & (frequency <= jnp.minimum(highest, count - 1))
        scale = jnp.sqrt(jnp.where(frequency > 0, 2.0, 1.0) / count)
        basis = jnp.where(used, scale * jnp.cos(phase * (jnp.pi / (2 * count))), 0.0)  # [T, F]
        spectrum = jnp.einsum("tf,kth->kfh", basis, x, precision=jax.lax.Precision.HIGHEST)
        return low + jnp.einsum("tf,kfh->kth", basis, spectrum, precision=jax.lax.Precision.HIGHEST), None

    return jax.lax.scan(add, jnp.zeros(x.shape), jnp.arange(0, frequencies, _BLOCK))[0]


def _product_modulo(x: Int[Array, "T 1"], y: Int[Array, " F"], modulus: Int[Array, ""]) -> Int[Array, "T F"]:
    """x y modulo a number, in 32 bits: the phase of a float32 would be wrong after a few thousand tokens."""
    low, high = x * (y & 255) % modulus, x * (y >> 8) % modulus
    return (low + high * 256) % modulus
