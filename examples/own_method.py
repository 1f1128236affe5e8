"""A method of your own: a dataclass with a `score`. It works wherever a published method does.

The base class, which makes the dataclass, has eight members: the options `keep`, `budget`, `scope` and `cap`; `facts`
(paper, kind of budgets); and the functions `score`, `protect` (tokens that are kept in any case) and `check` (raises an
error for a wrong option). Everything else is optional: own_stages.py has methods with a budget per layer, with merging,
and with evictions while decoding.

On the command line its name is FILE.py:CLASS:

    vlkv generate --policy examples/own_method.py:KeyNorm --keep 0.2 --model mini --image page.png --prompt "..."
"""

import jax
import jax.numpy as jnp

import vlkv
from vlkv import mini, policies


class KeyNorm(policies.Policy):
    """Keeps the tokens with the smallest key norms (Devoto et al., 2024: such keys tend to be attended to)."""

    def score(self, obs: policies.Observation) -> jax.Array:
        """The score of each key head and token of one layer, [K, T], from its keys [K, T, H]; higher means keep."""
        return -jnp.linalg.norm(obs.k, axis=-1)


if __name__ == "__main__":
    params, processor = vlkv.load("mini")
    inputs = processor(mini.PAGE, mini.QUESTION)
    for policy in (KeyNorm(keep=0.2, scope="vision"), policies.SnapKV(keep=0.2, scope="vision")):
        output = vlkv.generate(params, inputs, policy=policy, sampling=vlkv.Greedy(max_new_tokens=16))
        print(type(policy).__name__, processor.decode(output.tokens[0]))
