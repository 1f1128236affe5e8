"""Every policy against float64 numpy written from the equations, on a batch of awkward prompts."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from tests.policies import numpy_policies as reference
from vlkv import InputError, policies
from vlkv.policies.aircache import skewness

LAYERS, HEADS, KV_HEADS, LENGTH, HEAD_DIM = 2, 4, 2, 28, 8
# S, V, I: a system, vision or instruction token; a dot is padding.
PROMPTS = {
    "full": "SSSSVVVVVVVVVVVVVVVVIIIIIIII",
    "left padded": "......SSSVVVVVVVVVVVVIIIIIII",
    "right padded": "SSSVVVVVVVVVVVVIIIIIII......",
    "two images": "SVVVVVVSSSVVVVVVVIIIIIIIII..",
    "image last": "SSSSSSSSSSSSVVVVVVVVVVVVVVVV",
    "two vision tokens": "SSSSSSSSSSVVIIIIIIIIIIIII...",
    "no image": "IIIIIIIIIIIIIIIIIIIIIII.....",
    "one token": "...........................I",
}
METHODS = {
    policies.StreamingLLM: reference.streaming,
    policies.H2O: reference.h2o,
    policies.SnapKV: reference.snapkv,
    policies.PyramidKV: reference.pyramidkv,
    policies.AdaKV: reference.adakv,
    policies.CAKE: reference.cake,
    policies.Damage: reference.damage,
    policies.MixKV: reference.mixkv,
    policies.BACON: reference.bacon,
    policies.TGVKV: reference.tgvkv,
    policies.TOVA: reference.tova,
    policies.Knorm: reference.knorm,
    policies.KeyDiff: reference.keydiff,
    policies.FlashCache: reference.flashcache,
    policies.AirCache: reference.aircache,
    policies.PrefixKV: reference.prefixkv,
    policies.VLCache: reference.vlcache,
    policies.ElasticCache: reference.elasticcache,
    policies.LookM: reference.lookm,
    policies.MEDA: reference.meda,
    policies.RoCo: reference.roco,
    policies.CSP: reference.csp,
}
CASES = [
    policies.StreamingLLM(budget=7, sinks=2, scope="all"),
    policies.StreamingLLM(keep=0.3, scope="vision"),
    policies.H2O(keep=0.45, scope="all"),
    policies.H2O(keep=0.37, scope="vision"),
    policies.SnapKV(keep=0.61, window=4, scope="all"),
    policies.SnapKV(budget=5, window=6, kernel=3, scope="vision"),
    policies.PyramidKV(keep=0.5, window=3, kernel=3, pooling="avg", scope="all"),
    policies.PyramidKV(keep=0.6, window=5, kernel=5, pooling="avg", scope="vision"),
    policies.AdaKV(keep=0.5, window=3, scope="all"),
    policies.AdaKV(keep=0.35, kernel=3, safeguard=0.0, scope="vision"),
    policies.CAKE(keep=0.5, window=4, gamma=5.0),
    policies.Damage(keep=0.4, window=4),
    policies.MixKV(keep=0.4, window=4),
    policies.BACON(keep=0.4, window=4),
    policies.TGVKV(keep=0.4),
    policies.TOVA(keep=0.4),
    policies.Knorm(budget=7),
    policies.KeyDiff(keep=0.4),
    policies.FlashCache(keep=0.4),
    policies.AirCache(keep=0.4),
    policies.AirCache(budget=5, alpha=1.0),
    policies.AirCache(keep=0.4, alpha=0.5, scope="all"),
    policies.AirCache(keep=0.4, window="text", allocation="strength"),
    policies.PrefixKV(keep=0.4, scope="all"),
    policies.PrefixKV(keep=0.15, sinks=4, recent=2, scope="all"),
    policies.PrefixKV(keep=0.35, scope="vision"),
    policies.VLCache(keep=0.4),
    policies.VLCache(budget=8, threshold=0.2, window=0.5),
    policies.ElasticCache(keep=0.4),
    policies.ElasticCache(budget=6, sinks=2, recent=3, scope="vision"),
    policies.LookM(keep=0.4),
    policies.LookM(keep=0.5, scope="vision", merging="weighted"),
    policies.MEDA(keep=0.4),
    policies.RoCo(keep=0.4, recent=2),
    policies.RoCo(budget=6, spread=0.2, scope="vision"),
    policies.CSP(keep=0.6, window=4, heads="each", fill=True),
    policies.CSP(budget=9, c="auto", score_n=0.0, heads="each"),
    policies.CSP(keep=0.4, window=9, scope="vision", fill=True),
    policies.StreamingLLM(keep=0.4, scope="all"),
    policies.H2O(budget=6, recent=2, scope="all"),
    policies.SnapKV(keep=0.3, scope="all"),  # the window is longer than the prompt
    policies.PyramidKV(budget=12, window=3, kernel=3, pooling="avg", scope="all"),
    policies.AdaKV(budget=6, window=9, pooling="avg", safeguard=0.5, scope="all"),
    policies.CAKE(keep=0.35, kernel=3, pooling="max", tau1=1.6, tau2=0.4, scope="vision"),
    policies.Damage(budget=9, kernel=3, safeguard=0.3),
    policies.Damage(keep=0.3, window=1, relative=False, scope="vision"),
    policies.MixKV(budget=6, window=3, scope="vision"),
    policies.BACON(budget=6, window=3, neighbours=3, strength=2.0, scope="vision"),
    policies.BACON(budget=8, window=2, earlier=0, kernel=1),
    policies.TGVKV(budget=9, sinks=2, scope="all"),
    policies.TOVA(budget=6, recent=2),
    policies.KeyDiff(keep=0.3, scope="vision"),
    policies.FlashCache(budget=5, cutoff=0.1, scope="vision"),
    policies.AirCache(keep=0.9, alpha=0.0),
    policies.AirCache(keep=0.4, window="recent", rows=3),
    policies.AirCache(keep=0.4, window="vision", rows=5, allocation="uniform"),
    policies.AirCache(keep=0.4, allocation="skewness"),
    policies.AirCache(keep=0.6, allocation="pyramid"),
    policies.PrefixKV(budget=9, sinks=0, recent=0, scope="all"),
    policies.VLCache(keep=0.3, scope="vision"),
    policies.LookM(budget=9, recent=3, text_prior=False, merging="average"),
    policies.MEDA(budget=6, entropy="all"),
    policies.MEDA(keep=0.5, scope="vision"),
    policies.RoCo(keep=0.6),
    policies.CSP(keep=0.5),
    policies.CSP(keep=0.6, window=12, recent_bias=0, c=0.3, heads="each"),
    policies.CSP(keep=0.4, regions=False, scope="vision"),
]


def cases():
    """All; the first one of each method is in the default suite too."""
    seen = set()
    for policy in CASES:
        yield pytest.param(policy, marks=[pytest.mark.full] if type(policy) in seen else [], id=repr(policy))
        seen.add(type(policy))


@jax.jit
def select(policy, q, k, vision, valid, key=None):
    """A whole batch of prompts, as `generate` does it."""
    keys = None if key is None else jnp.stack([key] * len(vision))
    return jax.vmap(lambda *x: policies.select(policy, *x[:2], x[1][..., ::-1], *x[2:]))(q, k, vision, valid, keys)


@pytest.fixture(scope="module")
def batch():
    """Peaked random attention; the same prompt has the same queries and keys wherever it is padded."""
    vision = np.array([[c == "V" for c in text] for text in PROMPTS.values()])
    valid = np.array([[c != "." for c in text] for text in PROMPTS.values()])
    random = np.random.default_rng(0)
    q, k = (
        2.0 * random.standard_normal((len(PROMPTS), LAYERS, heads, LENGTH, HEAD_DIM)).astype(np.float32)
        for heads in (HEADS, KV_HEADS)
    )
    left, right = (list(PROMPTS).index(f"{side} padded") for side in ("left", "right"))
    for x in (q, k):
        x[right] = np.roll(x[left], -6, axis=-2)
    return q, k, vision, valid


def options(policy):
    names = dataclasses.asdict(policy)
    common = {name: names.pop(name) for name in ("scope", "keep", "budget")}
    # Not of the choice that is tested, or at its default.
    for other in ("beta", "evict", "distance", "decode_n", "merging", "profile", "variant", "cap"):
        names.pop(other, None)
    return common, {name: value for name, value in names.items() if value is not None}


@pytest.mark.parametrize("policy", cases())
def test_policy_agrees_with_the_equations(policy, batch):
    got = select(policy, *batch)
    common, own = options(policy)
    for row, name in enumerate(PROMPTS):
        q, k, vision, valid = (x[row] for x in batch)
        prompt = reference.Prompt(q[:, :, valid], k[:, :, valid], vision[valid], **common)
        kept, budgets, scores = METHODS[type(policy)](prompt, **own)
        budgets = budgets if budgets.ndim == 2 else budgets[:, None]
        np.testing.assert_array_equal(got.budgets[row], np.broadcast_to(budgets, (LAYERS, KV_HEADS)), err_msg=name)
        inside = np.flatnonzero(valid)[prompt.scope]
        np.testing.assert_allclose(
            got.scores[row][..., inside], scores[..., prompt.scope], rtol=1e-4, atol=1e-7, err_msg=name
        )
        np.testing.assert_array_equal(got.kept[row][..., valid], kept, err_msg=name)


@pytest.mark.default("LookM(keep=0.3", "ElasticCache")
@pytest.mark.parametrize(
    "policy",
    [
        policies.ElasticCache(keep=0.4),
        *(policies.LookM(keep=0.4, merging=way) for way in ("average", "weighted", "pivot")),
        policies.LookM(keep=0.3, merging="pivot", scope="vision"),
        policies.MEDA(keep=0.4),
    ],
    ids=repr,
)
def test_merging_agrees_with_the_equations(policy, batch):
    q, k, vision, valid = batch
    v = np.random.default_rng(1).standard_normal(k.shape).astype(np.float32)
    got_k, got_v, got = jax.jit(jax.vmap(policies.compress, (None, 0, 0, 0, 0, 0)), static_argnums=0)(
        policy, q, k, v, vision, valid
    )
    for row, name in enumerate(PROMPTS):
        for layer in range(LAYERS):
            k_row, v_row, kept = (np.asarray(x)[row, layer][:, valid[row]] for x in (k, v, got.kept))
            expected = reference.merged(k_row, v_row, kept, getattr(policy, "merging", "average"))
            for ours, theirs in zip((got_k, got_v), expected, strict=True):
                entries = np.asarray(ours)[row, layer][:, valid[row]]
                np.testing.assert_allclose(entries[kept], theirs[kept], atol=1e-5, err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("scope", ["vision", "all"])
def test_csp_without_filling_keeps_at_most_its_budget_and_no_more_than_with_it(scope, batch):
    union, filled = (
        select(policies.CSP(keep=0.5, window=9, recent_bias=0, scope=scope, fill=fill), *batch)
        for fill in (False, True)
    )
    assert (np.asarray(union.budgets) <= filled.budgets).all() and (np.asarray(union.budgets) < filled.budgets).any()
    assert (np.asarray(filled.kept) >= union.kept).all()
    for row, vision, valid in zip(range(len(PROMPTS)), *batch[2:], strict=True):
        inside = vision if scope == "vision" else valid
        np.testing.assert_array_equal(np.asarray(union.kept)[row][..., inside].sum(axis=-1), union.budgets[row])


@pytest.mark.default("both")
@pytest.mark.parametrize("allocation", ["both", "skewness"])
def test_aircache_without_contrast_has_skewness_0_and_uniform_budgets(allocation, batch):
    q, k, vision, valid = batch
    got = select(policies.AirCache(keep=0.5, allocation=allocation), q, 0 * k, vision, valid)
    assert (np.asarray(got.extra["skewness"]) == 0).all()
    assert not any(np.isnan(x).any() for x in jax.tree.leaves(got.extra))
    budgets = np.asarray(got.budgets)[..., 0]
    assert (budgets.max(axis=1) - budgets.min(axis=1) <= 1).all()


def test_a_window_as_long_as_the_budget_shrinks_to_half_of_it():
    """30 of 150 tokens, window 32: the last 15 stay, and the 15 that these look at most; the first is one of them."""
    rng = np.random.default_rng(0)
    k = rng.normal(size=(1, 1, 150, 8)).astype(np.float32)
    q = np.broadcast_to(3 * k[:, :, :1], k.shape)
    selection = jax.jit(policies.select)(policies.SnapKV(keep=0.2, kernel=1), q, k, k, np.zeros(150, bool))
    kept = np.asarray(selection.kept)[0, 0]
    weights = np.where(np.tri(150)[135:], np.exp(q[0, 0, 135:] @ k[0, 0].T / np.sqrt(8)), 0)
    mass = (weights / weights.sum(1, keepdims=True)).sum(0)[:135]
    assert np.flatnonzero(kept).tolist() == [*sorted(np.argsort(-mass)[:15]), *range(135, 150)] and kept[0]


def test_aircache_gives_what_is_left_to_the_largest_remainders_of_eq_11():
    """47.45 entries for six layers of 73 tokens: 47. Rounded down 45; the remainders .91 and .49 get one each."""
    real = np.array([8.17, 5.47, 10.49, 7.00, 7.91, 8.41], np.float32)
    policy, most = policies.AirCache(keep=float(real.sum()) / 6 / 73, allocation="strength"), jnp.full(6, 73)
    statistics = {"strength": jnp.array(real), "skewness": jnp.zeros(6), "asked": jnp.full(6, real.sum() / 6)}
    granted = policy.allocate(statistics, total=jnp.int32(47), most=most, layers=6)
    np.testing.assert_array_equal(granted, [8, 5, 11, 7, 8, 8])


def test_skewness_of_hand_computed_examples():
    everything = jnp.ones(4, bool)

    def of(*values):
        x = jnp.array([*values, *[7.0] * (4 - len(values))])
        return float(skewness(x, everything & (jnp.arange(4) < len(values)), jnp.int32(len(values))))

    assert of(0.0, 0.0, 0.0, 4.0) == pytest.approx(2.0)  # 4/(3*2) * ((3/2)^3 - 3 (1/2)^3)
    assert of(0.0, 0.0, 3.0) == pytest.approx(np.sqrt(3))
    assert of(0.0, 1e-6, 1e-6, 0.0) == pytest.approx(0.0, abs=1e-6)
    assert of(0.0, 1.0) == of(5.0) == of() == 0.0
    assert of(0.1, 0.1, 0.1, 0.1) == 0.0


# --- Random ---------------------------------------------------------------------------------------------------------


def test_random_repeats_with_its_key_and_differs_between_keys_layers_and_heads(batch):
    policy = policies.Random(keep=0.5)
    first, again, other = (np.asarray(select(policy, *batch, jax.random.key(i)).kept)[0] for i in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert len({head.tobytes() for layer in first for head in layer}) == LAYERS * KV_HEADS


def test_random_keeps_every_token_equally_often():
    length, draws = 20, 400
    q = jnp.zeros((1, 2, length, 4))
    vision = jnp.zeros(length, bool)
    draw = jax.jit(jax.vmap(lambda key: policies.select(policies.Random(keep=0.25), q, q, q, vision, key=key).kept))
    often = np.asarray(draw(jax.random.split(jax.random.key(0), draws))).mean(axis=(0, 1, 2))
    assert abs(often - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / (2 * draws))


@pytest.mark.full
def test_random_draws_do_not_depend_on_how_long_the_padded_row_is():
    def kept(length):
        q = jnp.zeros((1, 2, length, 4))
        valid = jnp.arange(length) < 10
        policy = policies.Random(budget=4)
        return policies.select(policy, q, q, q, jnp.zeros(length, bool), valid, jax.random.key(0)).kept[..., :10]

    np.testing.assert_array_equal(kept(12), kept(17))


def test_random_without_a_key_says_so():
    q = jnp.zeros((1, 2, 6, 4))
    with pytest.raises(InputError, match="pass key="):
        policies.select(policies.Random(keep=0.5), q, q, q, jnp.zeros(6, bool))


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    [
        ("vlcache", {"threshold": 0.0}, "threshold=0.0 must lie in"),
        ("vlcache", {"window": 1.5}, "window=1.5 must lie in"),
        ("elasticcache", {"sinks": -1}, "sinks=-1 must be a whole number of at least 0"),
        ("roco", {"spread": -0.1}, "spread=-0.1 must lie in"),
        ("csp", {"c": 1.1}, "c=1.1 must lie in"),
        ("csp", {"window": 0}, "window=0 must be a whole number"),
        ("adakv", {"window": 0}, "window=0 must be a whole number"),
        ("pyramidkv", {"kernel": -1}, "kernel=-1 must be a whole number"),
        ("csp", {"score_n": float("inf")}, "score_n=inf must be a number of at least 0"),
        ("csp", {"window": True}, "window=True must be a whole number"),
        ("fastv", {"layer": True}, "layer=True must be a whole number"),
        ("lightkv", {"windows": (True, 2, 1)}, "must be a tuple of whole numbers"),
    ],
)
def test_a_bad_option_is_named(name, bad, said):
    with pytest.raises(InputError, match=said):
        policies.make(name, keep=0.5, **bad)


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


def kept_places(policy, scores, valid=None):
    k = jnp.array(scores, jnp.float32)[None, None, :, None]
    selection = policies.select(
        policy, k, k, k, jnp.zeros(len(scores), bool), None if valid is None else jnp.array(valid)
    )
    return np.flatnonzero(selection.kept[0, 0]).tolist()


@pytest.mark.full
def test_ties_go_to_the_earlier_token():
    assert kept_places(Given(budget=3), [1, 2, 1, 2, 1, 2]) == [1, 3, 5]
    assert kept_places(Given(budget=4), [1, 2, 1, 2, 1, 2]) == [0, 1, 3, 5]
    assert kept_places(Given(budget=2), [0, 0, 0, 0]) == [0, 1]


def test_protected_tokens_stay_whatever_their_score_and_count():
    assert kept_places(Given(budget=3, last=2), [9, 5, 7, 1, 0, 0]) == [0, 4, 5]
    assert kept_places(Given(budget=1, last=2), [9, 5, 7, 1, 0, 0]) == [5]


class Thrifty(Given):
    """Ranks what is not protected backwards and takes half of what is left."""

    def rank(self, scores, statistics, candidates, count):
        return -scores, count // 2


def test_a_rank_of_ones_own_orders_what_is_not_protected_and_may_leave_budget_unspent():
    assert kept_places(Thrifty(budget=4, last=2), [9, 5, 7, 1, 0, 0]) == [3, 4, 5]
    assert kept_places(Thrifty(budget=2, last=2), [9, 5, 7, 1, 0, 0]) == [4, 5]
    assert kept_places(Thrifty(budget=1, last=2), [9, 5, 7, 1, 0, 0]) == [5]


def test_protection_holds_for_scores_beyond_float32_integers_and_for_infinite_ones():
    assert kept_places(Given(budget=3, last=2), [1e9, 2e9, 3e9, 0, 0, 0]) == [2, 4, 5]
    assert kept_places(Given(budget=3, last=2), [np.inf, 0, np.inf, 0, 0, 0]) == [0, 4, 5]


@pytest.mark.full
def test_a_score_of_minus_infinity_still_ranks_above_padding():
    low = -np.inf
    assert kept_places(Given(budget=2), [0, 0, low, low, low], [False, False, True, True, True]) == [2, 3]
