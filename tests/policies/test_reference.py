"""Hand-computed examples of methods, options, and policies of one's own."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from tests import programs
from vlkv import InputError, policies

# --- Random ---------------------------------------------------------------------------------------------------------


def test_random_keeps_every_token_equally_often_whatever_the_length_of_the_padded_row():
    """Draws differ between keys, layers and heads, and repeat with their key."""
    draws = 400
    draw = jax.jit(
        jax.vmap(lambda key, q, valid: policies.select(
            policies.Random(budget=5), q, q, q, jnp.zeros(len(valid), bool), valid, key).kept, (0, None, None))
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), draws)
    kept, longer = (
        np.asarray(draw(keys, jnp.zeros((2, 2, length, 4)), jnp.arange(length) < 20))[..., :20] for length in (20, 23)
    )
    np.testing.assert_array_equal(kept, longer)
    assert abs(kept.mean(axis=(0, 1, 2)) - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / (4 * draws))
    assert len({head.tobytes() for head in kept[:2].reshape(-1, 20)}) == 8


def test_random_without_a_key_says_so():
    q = jnp.zeros((1, 2, 6, 4))
    with pytest.raises(InputError, match="pass key="):
        policies.select(policies.Random(keep=0.5), q, q, q, jnp.zeros(6, bool))


# --- options --------------------------------------------------------------------------------------------------------


BAD_OPTIONS = [
    ("vlcache", {"threshold": 0.0}, "threshold=0.0 must lie in"),
    ("vlcache", {"window": 1.5}, "window=1.5 must lie in"),
    ("vlcache", {"variant": "shared_window", "scope": "vision"}, "variant="),
    ("elasticcache", {"sinks": -1}, "sinks=-1 must be a whole number of at least 0"),
    ("elasticcache", {"distance": 0}, "distance=0 must be a whole number of at least 1"),
    ("roco", {"spread": -0.1}, "spread=-0.1 must lie in"),
    ("csp", {"c": 1.1}, "c=1.1 must lie in"),
    ("csp", {"window": 0}, "window=0 must be a whole number"),
    ("csp", {"window": True}, "window=True must be a whole number"),
    ("csp", {"score_n": float("inf")}, "score_n=inf must be a number of at least 0"),
    ("csp", {"decode_n": -1.0}, "decode_n="),
    ("csp", {"variant": "released", "fill": True}, "fill="),
    ("adakv", {"window": 0}, "window=0 must be a whole number"),
    ("pyramidkv", {"kernel": -1}, "kernel=-1 must be a whole number"),
    ("pyramidkv", {"variant": "released", "cap": 1.5}, "cap="),
    ("prefixkv", {"profile": (0.5, 0.0)}, "profile=.* must be a tuple of numbers in"),
    ("prefixkv", {"merging": "cosine", "cap": 2.0}, "cap=2.0 cannot be combined with merging"),
    ("aircache", {"merging": 1.2}, r"merging=1\.2 must lie in \[0, 1\]"),
    ("fastv", {"layer": True}, "layer=True must be a whole number"),
    ("hired", {"alpha": 1.0}, "alpha="),
    ("hired", {"scope": "all"}, "scope="),
    ("ivtp", {"layers": ()}, "layers="),
    ("ivtp", {"layers": (0,)}, "layers="),
    ("ivtp", {"groups": 0.2}, "groups="),
    ("kivi", {"window": 48}, "window=48 must be a multiple of group=32"),
    ("downsample", {"side": 0, "keep": None}, "side=0"),
    ("downsample", {}, "keep=0.5 does not apply: downsample has its own keep"),
    ("downsample", {"most": 0, "keep": None}, "most=0"),
    ("tome", {"keep": 0.1}, r"more stages \(layers="),
    ("tome", {"keep": 0.4, "layers": (3,)}, r"more stages \(layers="),
    ("tome", {"layers": (3, 1)}, "layers"),
    ("tome", {"layers": ()}, "layers"),
    ("tome", {"scope": "all"}, "scope"),
    ("tome", {"keep": None}, "keep"),
    ("tome", {"layers": (1,), "on": "cache"}, "layers"),
    ("pitome", {"margin": (0.5, 0.4)}, "margin"),
    ("pitome", {"margin": 1.5}, "margin"),
    ("tofu", {"pruning": -1}, "pruning"),
    ("lightkv", {"windows": (True, 2, 1)}, "must be a tuple of whole numbers"),
    ("lightkv", {"rho": 0.6, "keep": None}, "rho"),
    ("lightkv", {"rho": 0.0, "keep": None}, "rho"),
    ("lightkv", {"rho": (0.5, 0.5), "keep": None}, "rho"),
    ("lightkv", {"keep": 0.05}, "more stages"),
    ("lightkv", {"rho": 0.5}, "give one of the two"),
    ("lightkv", {"windows": (4, 2), "keep": None}, "layers=None means three"),
    ("lightkv", {"windows": (4, 0, 1), "keep": None}, "windows"),
    ("lightkv", {"layers": (3, 2, 5), "keep": None}, "layers"),
    ("lightkv", {"layers": (0, 2, 5), "keep": None}, "layers"),
    ("lightkv", {"layers": (2, 5), "keep": None}, "windows"),
    ("lightkv", {"budget": 5, "keep": None}, "budget"),
    ("lightkv", {"scope": "all", "keep": None}, "scope"),
]


def test_a_bad_option_is_named():
    for name, bad, said in BAD_OPTIONS:
        with pytest.raises(InputError, match=said):
            policies.make(name, **{"keep": 0.5, **bad})


class Annotated(policies.Policy):
    pair: tuple[int, str] = (1, "x")
    many: tuple[float, ...] = ()
    own: list[int] | None = None


@pytest.mark.parametrize("bad", [{"pair": (1, 2)}, {"pair": (1,)}, {"many": ("x",)}, {"many": 1.0}, {"keep": "x"}])
def test_options_of_ones_own_are_checked(bad):
    assert Annotated(keep=0.5, pair=(2, "y"), many=(1, 0.5)).own is None
    with pytest.raises(InputError, match=f"Annotated: {next(iter(bad))}=.* must be"):
        Annotated(**{"keep": 0.5, **bad})


def test_the_annotation_of_every_option_is_known():
    """An annotation that names nothing would switch the check off without a word."""
    for policy in policies.registry.values():
        assert {field.name for field in dataclasses.fields(policy)} <= set(typing.get_type_hints(policy))


# --- policies of one's own, and what any policy may count on ---------------------------------------------------------


class Given(policies.Policy):
    """Scores handed in as the first component of the keys."""

    last: int = 0

    def score(self, obs) -> Float[Array, "K T"]:
        return obs.k[:, :, 0]

    def protect(self, obs):
        place = jnp.arange(obs.valid.shape[0])
        return obs.valid & (place >= obs.valid.shape[0] - self.last)


def kept_places(policy, scores):
    k = np.array(scores, np.float32)[None, None, :, None]
    return np.flatnonzero(programs.select(policy, k, k, k, np.zeros(len(scores), bool)).kept[0, 0]).tolist()


def test_protected_tokens_stay_whatever_their_score_and_count():
    assert kept_places(Given(budget=3, last=2), [9, 5, 7, 1, 0, 0]) == [0, 4, 5]
    assert kept_places(Given(budget=3, last=2), [1e9, 2e9, 3e9, 0, 0, 0]) == [2, 4, 5]
    assert kept_places(Given(budget=3, last=2), [np.inf, 0, np.inf, 0, 0, 0]) == [0, 4, 5]
    assert kept_places(Given(budget=1, last=2), [9, 5, 7, 1, 0, 0]) == [5]


class Thrifty(Given):
    """Ranks what is not protected backwards and takes half of what is left."""

    def rank(self, scores, statistics, candidates, count):
        return -scores, count // 2


def test_a_rank_of_ones_own_orders_what_is_not_protected_and_may_leave_budget_unspent():
    assert kept_places(Thrifty(budget=4, last=2), [9, 5, 7, 1, 0, 0]) == [3, 4, 5]
    assert kept_places(Thrifty(budget=2, last=2), [9, 5, 7, 1, 0, 0]) == [4, 5]
