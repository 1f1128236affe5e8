"""Methods of your own with more stages than `score`: budgets per layer, merging, evictions while decoding.

A class has a stage by defining its function; `vlkv.compression.stages.Stages` and the two base classes that it names
list them all. On the command line:

    vlkv policies examples/own_stages.py:Peaked --check
    vlkv generate --policy examples/own_stages.py:Peaked --keep 0.2 --model mini --image page.png --prompt "..."
"""

import dataclasses

import jax
import jax.numpy as jnp

import vlkv
from vlkv import mini, policies
from vlkv.cache.decode_state import DecodeState, evict, evictable
from vlkv.compression import budgets, merging


class LastRow(policies.Policy):
    """The attention of the last token of the prompt, mean over the query heads that share a key head."""

    def score(self, obs: policies.Observation) -> jax.Array:
        """One number per key head and token, [K, T]."""
        last = jnp.cumsum(obs.valid[::-1])[::-1] == 1
        return policies.group_mean(policies.rows_mass(obs, obs.valid & last, most=1), obs.k.shape[0])


class Peaked(LastRow):
    """Layers whose attention is spread over many tokens get more of the budget.

    `allocate` needs something of every layer, but the layers run one after another. So `statistics` returns it for one
    layer, and `allocate` gets it for all of them.
    """

    def statistics(self, obs: policies.Observation, scores: jax.Array) -> dict[str, jax.Array]:
        """The entropy of the attention of one layer. Names are yours; `allocate` gets arrays with one more axis, L."""
        share = jnp.where(obs.in_scope, scores, 0.0)
        share = share / jnp.maximum(jnp.sum(share), 1e-30)
        return {"entropy": -jnp.sum(share * jnp.log(share + 1e-30))}

    def allocate(
        self, statistics: dict[str, jax.Array], *, total: jax.Array, most: jax.Array, layers: int
    ) -> jax.Array:
        """The budgets of all layers, [L], in proportion to the entropies: whole numbers with the sum `total`.

        No budget is above `most` [L], the number of tokens in each layer.
        """
        share = statistics["entropy"] / jnp.maximum(jnp.sum(statistics["entropy"]), 1e-30)
        return budgets.apportion(total * share, total, floor=1, ceiling=most)


class Averaged(LastRow):
    """Every dropped entry is averaged into the kept entry that is nearest in the prompt."""

    def merge(self, k: jax.Array, v: jax.Array, kept: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of all tokens of one layer after merging, [K, T, H]. Those of `kept` [K, T] are cached.

        `scores` are -inf for padding, so that `merging.dropped` does not merge it.
        """
        target, gone = merging.nearest_place(kept), merging.dropped(kept, scores)
        return merging.fold(k, k, target, gone), merging.fold(v, v, target, gone)


class Forgetting(LastRow):
    """Every new token takes the place of the entry with the least attention, in a sum in which old steps count less.

    Attributes:
        decay: weight of the sum so far in each step.
    """

    decay: float = 0.9  # the annotation makes it an option
    # Stages that options switch off. With scope="vision" all text is kept, and new tokens are text: nothing to evict.
    idle = property(lambda self: ("step",) if self.scope == "vision" else ())

    def decode_values(self, obs: policies.Observation, scores: jax.Array) -> dict[str, jax.Array]:
        """Numbers for each prompt token, which `step` finds in `state.values`; new tokens begin with 0."""
        return {"mass": scores}

    def step(self, state: DecodeState, mass: jax.Array) -> DecodeState:
        """Called after each step with the attention that every entry has received, [N, E].

        `evictable` is a mask of all entries but the newest one, in heads that have more entries than their budget.
        """
        total = self.decay * state.values["mass"] + policies.group_mean(mass, state.stored.shape[0])
        state = dataclasses.replace(state, values={"mass": total})
        return evict(state, evictable(state, jnp.ones_like(state.budget)), total)


if __name__ == "__main__":
    params, processor = vlkv.load("mini")
    inputs = processor(mini.PAGE, mini.QUESTION)
    for policy in (Peaked(keep=0.2), Averaged(keep=0.2), Forgetting(keep=0.2)):
        output = vlkv.generate(params, inputs, policy=policy, sampling=vlkv.Greedy(max_new_tokens=16))
        print(type(policy).__name__, processor.decode(output.tokens[0]))
