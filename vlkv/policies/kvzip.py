from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.option_types import Count
from vlkv.compression.policy import Budgets, Entries, Facts, Mask, Observation, PerLayer, Policy, Scores, Statistics
from vlkv.masks import first

_BLOCK_ELEMENTS = 2**22  # logits held at a time, of one row of the batch


class KVzip(Policy):
    """The largest attention of any query of a repetition of the prompt (Kim et al. 2025, Sec. 3).

    The model reads the prompt, then an instruction and the same prompt again, in one pass. So the score of a token
    tells whether the model needs it to reconstruct the prompt. The tokens of all layers and heads are ranked together,
    and the number of tokens among the best is the budget of a head.

        ids = processor.tokenizer.encode("Repeat the previous context exactly.", add_special=False)
        KVzip(keep=0.3, instruction=tuple(ids.tolist()))

    Attributes:
        sinks: number of first tokens that are kept.
        instruction: ids of the text between prompt and repetition, including the template's text before an answer.
    """

    sinks: Count = 4
    instruction: tuple[Count, ...] = ()
    facts = Facts(budgets="heads")
    repeats = property(lambda self: self.instruction)

    def score(self, obs: Observation) -> Scores:
        repeated = None if obs.context is None else obs.context.repeated
        assert repeated is not None and repeated.lse is not None
        return largest(repeated.q, obs.k, repeated.lse)

    def protect(self, obs: Observation) -> Mask:
        return first(obs.valid, self.sinks)

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        candidates = obs.in_scope & ~self.protect(obs) if self.scope == "all" else obs.in_scope
        return {"ranked": budgets.ranked(scores, candidates)}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        return budgets.by_order_of_all_layers(statistics["ranked"], total, most)


def largest(q: Float[Array, "N R H"], k: Entries, lse: Float[Array, "N R"]) -> Float[Array, "K T"]:
    """The largest probability of each key over all rows and the query heads of its head, in blocks of rows."""
    (kv_heads, length, head_dim), rows = k.shape, q.shape[1]
    group = len(q) // kv_heads
    block = max(1, min(rows, 512, _BLOCK_ELEMENTS // (len(q) * length)))
    spare = -rows % block
    q = jnp.pad(q.reshape(kv_heads, group, rows, head_dim), [(0, 0), (0, 0), (0, spare), (0, 0)])
    # +inf: the probabilities of added rows are 0.
    lse = jnp.pad(lse.reshape(kv_heads, group, rows), [(0, 0), (0, 0), (0, spare)], constant_values=jnp.inf)

    def take(first: Int[Array, ""], best: Float[Array, "K T"]) -> Float[Array, "K T"]:
        rows, row_lse = (jax.lax.dynamic_slice_in_dim(x, first * block, block, axis=2) for x in (q, lse))
        logits = jnp.einsum("kgrh,kth->kgrt", rows, k, preferred_element_type=jnp.float32) * head_dim**-0.5
        return jnp.maximum(best, jnp.max(logits - row_lse[..., None], axis=(1, 2)))

    best = jax.lax.fori_loop(0, (rows + spare) // block, take, jnp.full((kv_heads, length), -jnp.inf))
    return jnp.exp(best)
