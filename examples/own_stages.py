"""Methods of your own that fill more slots than `score`: budgets per layer, merging, evictions while decoding.

A class fills a slot by defining its function; `vlkv.compression.stages.Stages` lists them all. On the command line:

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
    """Layers whose attention is spread over many tokens get more of the budget."""

    def statistics(self, obs: policies.Observation, scores: jax.Array) -> dict[str, jax.Array]:
        """What `allocate` needs of one layer: the entropy of its attention."""
        share = jnp.where(obs.in_scope, scores, 0.0)
        share = share / jnp.maximum(jnp.sum(share), 1e-30)
        return {"entropy": -jnp.sum(share * jnp.log(share + 1e-30))}

    def allocate(
        self, statistics: dict[str, jax.Array], *, total: jax.Array, most: jax.Array, layers: int
    ) -> jax.Array:
        """Whole numbers for all layers, [L], in proportion to the entropies; their sum is `total`."""
        share = statistics["entropy"] / jnp.maximum(jnp.sum(statistics["entropy"]), 1e-30)
        return budgets.apportion(total * share, total, floor=1, ceiling=most)


class Averaged(LastRow):
    """Every dropped entry is averaged into the kept entry that is nearest in the prompt."""

    def merge(self, k: jax.Array, v: jax.Array, kept: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer, [K, T, H]; the entries of `kept` [K, T] are stored."""
        target, gone = merging.nearest_place(kept), merging.dropped(kept, scores)
        return merging.fold(k, k, target, gone), merging.fold(v, v, target, gone)


class Forgetting(LastRow):
    """Every new token takes the place of the entry with the least attention, of which old steps count less.

    Attributes:
        decay: weight of the sum so far in each step.
    """

    decay: float = 0.9
    idle = property(lambda self: ("step",) if self.scope == "vision" else ())  # new tokens are text

    def decode_values(self, obs: policies.Observation, scores: jax.Array) -> dict[str, jax.Array]:
        """Numbers per prompt token with which decoding begins."""
        return {"mass": scores}

    def step(self, state: DecodeState, mass: jax.Array) -> DecodeState:
        """Called after each step with the attention that every entry received, [N, E]."""
        total = self.decay * state.values["mass"] + policies.group_mean(mass, state.stored.shape[0])
        state = dataclasses.replace(state, values={"mass": total})
        return evict(state, evictable(state, jnp.ones_like(state.budget)), total)


if __name__ == "__main__":
    params, processor = vlkv.load("mini")
    inputs = processor(mini.PAGE, mini.QUESTION)
    for policy in (Peaked(keep=0.2), Averaged(keep=0.2), Forgetting(keep=0.2)):
        output = vlkv.generate(params, inputs, policy=policy, sampling=vlkv.Greedy(max_new_tokens=16))
        print(type(policy).__name__, processor.decode(output.tokens[0]))
