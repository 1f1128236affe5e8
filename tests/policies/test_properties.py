"""What every method promises, over random prompts, masks and budgets (hypothesis)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlkv import policies
from vlkv.compression.policy import Policy
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.selection import make_observation
from vlkv.compression.tokens import Tokens, shorten

ROWS, LAYERS, HEADS, KV_HEADS, LENGTH, HEAD_DIM, WIDTH, SHIFT = 3, 3, 4, 2, 26, 8, 6, 4
KEEPS = (0.15, 0.55)
EVICTING = [name for name, cls in policies.registry.items() if not issubclass(cls, policies.Full)
            and not issubclass(cls, ReducingPolicy)]  # fmt: skip
REDUCING = [name for name, cls in policies.registry.items() if issubclass(cls, ReducingPolicy)]
# A larger budget only adds to what these keep: one order per layer, shares that do not depend on it.
RANKINGS = {"random", "imgrandom", "streamingllm", "h2o", "snapkv", "tova", "knorm", "keydiff", "elasticcache", "lookm",
            "avl", "csp"}  # fmt: skip
CHANGING = {("csp", "vision"), ("snapkv", "all")}  # except here: CSP's lists and SnapKV's window follow the budget
OPTIONS = {
    "csp": {"fill": True, "window": 3},
    "avl": {"core": None},
    "snapkv": {"window": 4},
    "pyramidkv": {"window": 3},
    "adakv": {"window": 3},
}
few = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def make(name, keep, scope):
    return policies.make(name, keep=keep, scope=scope, **OPTIONS.get(name, {}))


def scopes(name):
    return ("vision",) if name == "avl" else ("vision", "all")


@st.composite
def prompts(draw):
    """Rows of text, perhaps images, and padding on either side; at least SHIFT places of padding at the end."""
    seed = draw(st.integers(0, 2**31))
    rows = []
    for _ in range(ROWS):
        before, system, image, between, second, instruction = (
            draw(st.integers(0, most)) for most in (3, 3, 9, 2, 3, 4)
        )
        text = "." * before + "S" * system + "V" * image + "S" * between + "V" * second + "I" * instruction
        rows.append((text if "S" in text or "V" in text or "I" in text else text + "I").ljust(LENGTH, "."))
    return seed, rows


def arrays(drawn):
    """q, k, is_vision, valid of all rows, the same content for the same seed wherever it stands."""
    seed, rows = drawn
    rng = np.random.default_rng(seed)
    q, k = (2 * rng.normal(size=(ROWS, LAYERS, n, LENGTH, HEAD_DIM)).astype(np.float32) for n in (HEADS, KV_HEADS))
    vision = np.array([[c == "V" for c in row] for row in rows])
    return q, k, vision, np.array([[c != "." for c in row] for row in rows])


@jax.jit
def select(policy, q, k, vision, valid):
    key = jax.random.key(0)
    return jax.vmap(lambda q, k, *masks: policies.select(policy, q, k, k, *masks, key))(q, k, vision, valid)


CASES = [(name, scope) for name in EVICTING for scope in scopes(name)]


@pytest.mark.default("csp-all")
@pytest.mark.parametrize(("name", "scope"), CASES)
@few
@given(drawn=prompts(), order=st.permutations(range(ROWS)))
def test_evicting(name, scope, drawn, order):
    """Exact totals; nothing invalid; text stays; rows and padding do not matter; a larger budget only adds."""
    q, k, vision, valid = arrays(drawn)
    before = None
    for keep in KEEPS:
        policy = make(name, keep, scope)
        got = select(policy, q, k, vision, valid)
        kept, budgets = np.asarray(got.kept), np.asarray(got.budgets)
        inside = vision if scope == "vision" else valid
        assert not (kept & ~valid[:, None, None]).any()
        assert (kept | ~(valid & ~inside)[:, None, None]).all()
        for row in range(ROWS):
            count = int(inside[row].sum())
            asked = int(np.floor(keep * LAYERS * count + 0.5))
            total = min(LAYERS * count, max(LAYERS, asked)) if count else 0
            spent = kept[row][..., inside[row]].sum(axis=(0, 2))
            assert spent.sum() == KV_HEADS * total and (policy.facts.budgets == "heads" or (spent == total).all())
            assert (kept[row][..., inside[row]].sum(axis=-1) == budgets[row]).all()
        if not policy.facts.needs_key:  # a draw is the row's own
            permuted = select(policy, *(x[np.array(order)] for x in (q, k, vision, valid)))
            np.testing.assert_array_equal(permuted.kept, kept[np.array(order)])
        # A row that ends with padding moves to the right.
        if not valid[:, -SHIFT:].any():
            moved = select(
                policy, *(np.roll(x, SHIFT, axis) for x, axis in ((q, -2), (k, -2), (vision, 1), (valid, 1)))
            )
            np.testing.assert_array_equal(np.roll(kept, SHIFT, axis=-1), moved.kept)
        if before is not None and name in RANKINGS and (name, scope) not in CHANGING:
            assert (kept >= before).all()
        before = kept


MERGING = {
    "elasticcache": {}, "lookm": {}, "prefixkv": {"merging": "cosine"}, "aircache": {"merging": 0.5},
    "tome": {"on": "cache"},
}  # fmt: skip


@pytest.mark.parametrize("name", MERGING)
def test_compress_takes_numpy_arrays(name):
    """As annotated: the same result as with jax's arrays, also where dropped entries are merged."""
    q, k, vision, valid = (x[0] for x in arrays((0, ["SSVVVVVVVVVIII".ljust(LENGTH, ".")] * ROWS)))
    policy = policies.make(name, keep=0.5, **MERGING[name])
    want = policies.compress(policy, *map(jnp.asarray, (q, k, k, vision, valid)))
    got = policies.compress(policy, q, k, k, vision, valid)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(got[0], k)


def test_the_text_for_tables_shows_the_scope():
    """Also the default one, of every method that has a budget; in a composition, that of the scores."""
    for name, cls in (policies.registry | policies.without_keep).items():
        policy = policies.make(name, **({} if cls.facts.own_keep or name in policies.without_keep else {"keep": 0.5}))
        text = policies.text_of(policy, scope=True)
        assert policies.make(text) == policy
        assert (f"scope='{policy.scope}'" in text) == (name not in ("full", "kivi")), text
    both = policies.compose(policies.SnapKV(keep=0.5), reduce=policies.LightKV(keep=0.5))
    assert policies.text_of(both, scope=True) == "compose(snapkv(keep=0.5, scope='all'), reduce=lightkv(keep=0.5))"


def test_the_text_of_a_policy_has_options_that_are_none():
    """A default other than None is written down if it is replaced by None, such as A-VL's `core`."""
    found = []
    for name, cls in policies.registry.items():
        plain = cls() if issubclass(cls, policies.Full) else policies.make(name, keep=0.5)
        for field in dataclasses.fields(cls):
            if field.name == "keep" or field.default is None or "None" not in str(field.type):
                continue
            policy = dataclasses.replace(plain, **{field.name: None})
            assert policies.make(policies.text_of(policy)) == policy, (name, field.name)
            found.append((name, field.name))
    assert ("avl", "core") in found and ("prefixkv", "distance") in found


@pytest.mark.default("lookm-all")
@pytest.mark.parametrize(("name", "scope"), CASES)
def test_keep_1_selects_everything(name, scope):
    drawn = 5, ["SSVVVVVVIII".ljust(LENGTH, "."), "..SVVSVVVIIII".ljust(LENGTH, "."), "I".ljust(LENGTH, ".")]
    q, k, vision, valid = arrays(drawn)
    got = select(make(name, 1.0, scope), q, k, vision, valid)
    np.testing.assert_array_equal(got.kept, np.broadcast_to(valid[:, None, None], got.kept.shape))


# --- methods that shorten the prompt ----------------------------------------------------------------------------------


def grids(vision):
    """Patches in lines of four; every run of vision tokens is an image."""
    grid = np.full((*vision.shape, 3), -1, np.int32)
    for row, mask in enumerate(vision):
        image, place = -1, 0
        for i, inside in enumerate(mask):
            if inside and (i == 0 or not mask[i - 1]):
                image, place = image + 1, 0
            if inside:
                grid[row, i] = image, place // 4, place % 4
                place += 1
    return grid


@jax.jit
def reduce(policy, x, q, k, vision, valid, grid, tower):
    """The first stage on every row: what is kept, the hidden states that go on, in their own places."""
    after = policy.reductions(12)[0]

    def one(x, q, k, vision, valid, grid, tower):
        tokens = Tokens(
            x=x, positions=jnp.cumsum(valid)[:, None] - 1, is_vision=vision, valid=valid, source=jnp.arange(LENGTH),
            size=jnp.ones(LENGTH), grid=grid, tower=tower if policy.class_attention_layers else None,
        )  # fmt: skip
        obs = None
        if after:
            obs = make_observation(
                policy, q, k, k, vision, valid, None, layer=after - 1, layers=12, max_instruction=LENGTH
            )
        changed, kept = policy.reduce(tokens, obs, stage=0)
        return kept, changed.x, shorten(changed, kept, LENGTH).source

    return jax.vmap(one)(x, q, k, vision, valid, grid, tower)


@pytest.mark.parametrize("name", REDUCING)
@few
@given(drawn=prompts(), order=st.permutations(range(ROWS)))
def test_shortening(name, drawn, order):
    """Text stays, nothing invalid, no more than the static bound; rows and padding do not matter."""
    q, k, vision, valid = arrays(drawn)
    rng = np.random.default_rng(drawn[0])
    x = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    policy = policies.make(name, keep=0.55)
    tower = rng.random((ROWS, max(1, len(policy.class_attention_layers)), 2, LENGTH)).astype(np.float32)
    everything = (x, q[:, 0], k[:, 0], vision, valid, grids(vision), tower)
    kept, hidden, source = (np.asarray(y) for y in reduce(policy, *everything))
    assert not (kept & ~valid).any()
    assert (kept | ~(valid & ~vision)).all()
    for row in range(ROWS):
        images = len(set(grids(vision)[row, vision[row], 0]))
        count = int(vision[row].sum())
        bound = policy.remaining(stage=0, vision=count, images=images) if count else 0
        assert (count > 0) <= (kept[row] & vision[row]).sum() <= bound
        np.testing.assert_array_equal(source[row, : kept[row].sum()], np.flatnonzero(kept[row]))
        np.testing.assert_array_equal(hidden[row, valid[row] & ~vision[row]], x[row, valid[row] & ~vision[row]])
    permuted = reduce(policy, *(y[np.array(order)] for y in everything))
    np.testing.assert_array_equal(permuted[0], kept[np.array(order)])
    if not valid[:, -SHIFT:].any():
        axes = (1, -2, -2, 1, 1, 1, -1)
        moved = reduce(policy, *(np.roll(y, SHIFT, axis) for y, axis in zip(everything, axes, strict=True)))
        np.testing.assert_array_equal(np.roll(kept, SHIFT, axis=1), moved[0])
        np.testing.assert_allclose(np.roll(hidden, SHIFT, axis=1)[moved[0]], np.asarray(moved[1])[moved[0]], atol=1e-5)


@pytest.mark.parametrize("name", [name for name in REDUCING if name != "lightkv"])  # whose rho is above 0
def test_keep_1_shortens_nothing(name):
    drawn = 5, ["SSVVVVVVIII".ljust(LENGTH, "."), "..SVVSVVVIIII".ljust(LENGTH, "."), "I".ljust(LENGTH, ".")]
    q, k, vision, valid = arrays(drawn)
    policy = policies.make(name, keep=1.0)
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    tower = np.ones((ROWS, max(1, len(policy.class_attention_layers)), 2, LENGTH), np.float32)
    kept, hidden, _ = reduce(policy, x, q[:, 0], k[:, 0], vision, valid, grids(vision), tower)
    np.testing.assert_array_equal(kept, valid)
    np.testing.assert_array_equal(hidden, x)


def test_every_method_is_one_of_the_two_or_the_full_cache():
    assert {*EVICTING, *REDUCING, "full", "kivi"} == set(policies.registry)
    assert len(policies.registry) >= 22
    assert all(issubclass(cls, Policy) for cls in policies.registry.values())
