"""What an author of a method sees: few members, facts that follow from a class, and stages that may ask for `keep`."""

import ast
import copy
import dataclasses
import importlib
import inspect
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.cache.test_decode_state import one_layer, places
from vlkv import policies
from vlkv.policies import DecodingStages, Policy, ReducingStages, Slots, compose

OWN = '''
import jax.numpy as jnp
from vlkv import policies


class Halves(policies.Policy):
    """Keeps the first or the last tokens, in the lower or in the upper layers: both depend on `keep`."""

    def score(self, obs):
        place = jnp.broadcast_to(jnp.arange(obs.k.shape[1], dtype=jnp.float32), obs.k.shape[:2])
        return place if self.keep < 0.5 else -place

    def allocate(self, statistics, *, total, most, layers):
        budgets = jnp.zeros(layers, jnp.int32)
        return budgets.at[0 if self.keep < 0.5 else layers - 1].set(jnp.minimum(total, most[0]))
'''


def members(cls):
    """Public names that a class defines itself and does not inherit."""
    own = {name for name in {*vars(cls), *vars(cls).get("__annotations__", {})} if not name.startswith("_")}
    return own - {name for base in cls.__mro__[1:] for name in dir(base)}


def test_an_author_learns_few_members():
    names = {"keep", "budget", "scope", "cap", "facts", "score", "protect", "check"}
    assert members(Policy) == names == {name for name in dir(Policy) if not name.startswith("_")}
    for optional in (ReducingStages, DecodingStages):
        assert len(members(optional)) <= 5, sorted(members(optional))
    assert len(dataclasses.fields(policies.Observation)) <= 12


@pytest.mark.parametrize("name", ["Peaked", "Averaged", "Forgetting"])
def test_an_own_method_that_fills_more_slots_is_short(name, root):
    """Budgets per layer, merging and evictions while decoding: at most 60 lines each with what they derive from."""
    module = own_stages(root)
    cls = getattr(module, name)
    sources = [inspect.getsource(each) for each in (module.LastRow, cls)]
    assert sum(len(source.splitlines()) for source in sources) <= 60
    defined = [node for source in sources for node in ast.parse(source).body[0].body[1:]]  # without the docstring
    assert len(defined) <= 5 and DecodingStages not in cls.__mro__


def own_stages(root):
    return importlib.import_module(policies.named(f"{root}/examples/own_stages.py:Peaked").__module__)


def attention(rng, length):
    return {name: rng.normal(size=(n, length, 8)).astype(np.float32) for name, n in zip("qkv", (4, 2, 2), strict=True)}


def test_budgets_of_an_own_method_follow_its_statistics(root):
    """Layer 1 has keys without contrast, so its entropy is largest."""
    rng, length = np.random.default_rng(0), 24
    q, k, v = (np.stack([attention(rng, length)[name] for _ in range(3)]) for name in "qkv")
    k[0] *= 4
    k[1] = 0
    chosen = programs.select(own_stages(root).Peaked(keep=0.25), q, k, v, np.zeros(length, bool))
    budgets = np.asarray(chosen.budgets)[:, 0]
    assert budgets.sum() == 18 and budgets[1] == budgets.max() > budgets[0]
    entropy = np.asarray(chosen.extra["entropy"])
    np.testing.assert_allclose(entropy[1], np.log(2 * length), rtol=1e-5)
    assert np.abs(budgets - 18 * entropy / entropy.sum()).max() < 1


def test_an_own_method_merges(root):
    """Each dropped value is part of the mean of one kept entry: unit vectors show which."""
    rng, length = np.random.default_rng(1), 12
    arrays = attention(rng, length)
    q, k = arrays["q"][None], rng.normal(size=(1, 2, length, length)).astype(np.float32)
    q = rng.normal(size=(1, 4, length, length)).astype(np.float32)
    v = np.broadcast_to(np.eye(length, dtype=np.float32), (1, 2, length, length))
    _, merged, chosen = policies.compress(own_stages(root).Averaged(keep=0.5), q, k, v, np.zeros(length, bool))
    for head in range(2):
        kept = np.flatnonzero(np.asarray(chosen.kept)[0, head])
        parts = np.asarray(merged)[0, head][kept] > 0
        assert (parts.sum(axis=0) == 1).all() and parts[np.arange(len(kept)), kept].all()


def test_an_own_method_evicts_while_decoding(root):
    """The policy has only `step` and `decode_values`; float64 numpy does the same with a list of tokens per head."""
    rng, length, new = np.random.default_rng(2), 16, 6
    arrays = attention(rng, length)
    policy = own_stages(root).Forgetting(budget=8)
    cache, step = one_layer(policy, arrays | {"is_vision": np.zeros(length, bool)}, new_tokens=new)
    q, k = (arrays[name].astype(np.float64) for name in "qk")

    def weights(query, keys):
        logits = keys @ query / np.sqrt(8)
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()

    def row(query, head, tokens):
        return np.mean([weights(query[n], k[head][tokens]) for n in (2 * head, 2 * head + 1)], axis=0)

    held, mass = [], []
    for head in range(2):
        scores = row(q[:, -1], head, list(range(length)))
        held.append(sorted(np.argsort(-scores)[:8].tolist()))
        mass.append({token: scores[token] for token in held[head]})
    for i in range(new):
        query, key, value = (rng.normal(size=(n, 8)).astype(np.float32) for n in (4, 2, 2))
        cache, _, _ = step(cache, query, key, value)
        k = np.concatenate([k, key[:, None].astype(np.float64)], axis=1)
        found = places(cache, cache.decode_states.stored[0, 0], length + new)
        for head in range(2):
            tokens = [*held[head], length + i]
            shares = dict(zip(tokens, row(query, head, tokens), strict=True))
            mass[head] = {t: policy.decay * mass[head].get(t, 0.0) + shares[t] for t in tokens}
            held[head] = [t for t in tokens if t != min(tokens[:-1], key=mass[head].get)]
            assert np.flatnonzero(found[head]).tolist() == held[head]


def test_a_class_that_defines_a_stage_fills_its_slot():
    slots = policies.slots_of
    assert slots(policies.SnapKV(keep=0.2)) == Slots(**dict.fromkeys(("score", "rank", "allocate"), SNAP))

    class Reducing(Policy):
        """Keeps every second vision token."""

        def reduce(self, tokens, obs, *, stage):
            return tokens, tokens.valid & (~tokens.is_vision | (jnp.arange(len(tokens.valid)) % 2 == 0))

        def reductions(self, layers):
            return (1,)

    policy = Reducing(keep=0.5)
    assert slots(policy).reduce == policy and policy.remaining(stage=0, vision=8, images=1) == 8
    with pytest.raises(vlkv.InputError, match=r"Clash: an option cannot be called 'uses'"):
        type("Clash", (Policy,), {"__annotations__": {"uses": int}, "uses": 1})
    with pytest.raises(vlkv.InputError, match="Old: merges is not used any more: define idle"):
        type("Old", (Policy,), {"merges": property(lambda self: False)})


SNAP = policies.SnapKV(keep=0.2)


@pytest.mark.parametrize("name", [*policies.registry, *policies.without_keep])
def test_an_option_that_does_not_exist_is_named_with_the_one_that_was_meant(name):
    cls = policies.named(name)
    names = [field.name for field in dataclasses.fields(cls)]
    for option in names:
        wrong = option[:-1] if option[1:] and option[:-1] not in names else f"{option}_"
        with pytest.raises(vlkv.InputError, match=rf"^{cls.__name__} has no option '{wrong}': did you mean \w+\?$"):
            cls(**{wrong: 0.2})
    with pytest.raises(vlkv.InputError, match="has no option 'zzz': it has keep, budget") as error:
        cls(zzz=1)
    assert len(str(error.value)) <= 200
    with pytest.raises(vlkv.InputError, match="give options by name"):
        cls(0.2)


def test_an_option_without_a_default_is_asked_for_and_copies_are_equal():
    class Needs(Policy):
        some: int

    with pytest.raises(vlkv.InputError, match=r"^Needs needs the option some=$"):
        Needs(keep=0.2)
    policy = compose(Needs(keep=0.2, some=1), store=policies.KIVI)
    assert copy.deepcopy(policy) == policy == dataclasses.replace(policy)
    assert pickle.loads(pickle.dumps(compose(SNAP, store=policies.KIVI))) == compose(SNAP, store=policies.KIVI)


class PerLayer(policies.SnapKV):
    """A subclass needs no decorator; it has options of its own, and facts follow from what it overrides."""

    share: float = 0.5

    def allocate(self, statistics, *, total, most, layers):
        return jnp.minimum(most, total // layers)


def test_a_subclass_is_a_frozen_dataclass_and_its_facts_follow_from_its_stages():
    policy = PerLayer(keep=0.2, share=0.25)
    assert policy == PerLayer(keep=0.2, share=0.25) and hash(policy) != hash(PerLayer(keep=0.2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.share = 1.0
    assert policy.facts.budgets == "layers" and "allocate" in policy.facts.stages
    assert policy.facts.paper == policies.SnapKV.facts.paper and policies.SnapKV.facts.budgets == "equal"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "halves.py"
    file.write_text(OWN)
    return f"{file}:Halves"


def test_stages_may_ask_for_keep(own):
    q = np.zeros((3, 1, 20, 2), np.float32)
    for keep, tokens in ((0.25, [[*range(5, 20)], [], []]), (0.75, [[], [], [*range(20)]])):
        chosen = programs.select(policies.named(own)(keep=keep, scope="all"), q, q, q, np.zeros(20, bool))
        assert [np.flatnonzero(layer[0]).tolist() for layer in np.asarray(chosen.kept)] == tokens


def test_an_option_that_is_none_is_kept():
    assert policies.make("prefixkv", keep=0.3, distance=None).distance is None
    assert policies.make("avl", keep=0.3, core=None).core is None
    assert policies.make("snapkv", keep=None, budget=5).budget == 5


def test_a_policy_in_a_file_may_have_annotations_as_text(tmp_path):
    """`from __future__ import annotations` makes them text, which dataclasses look up in the module of that name."""
    file = tmp_path / "own.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from vlkv.policies import Policy\n"
        "class Own(Policy):\n"
        "    window: int = 4\n"
        "    def score(self, obs):\n"
        "        return obs.k[..., 0]\n"
    )
    assert policies.make(f"{file}:Own(window=2)", keep=0.5).window == 2


@pytest.mark.parametrize(
    "name", ["a b", "é 文", "a(1)", "a,b", "a#b", "a+b", "a@b", "a\\b", "a=b", "a'b", "store=x", "[x]"]
)
def test_a_file_of_ones_own_may_have_any_path(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "own.py").write_text("from vlkv import policies\nclass Own(policies.PyramidKV):\n    pass\n")
    text = f"{folder}/own.py:Own"
    policy = policies.make(text, keep=0.5)
    assert type(policy).__name__ == "Own"
    assert policies.make(f"{text}(keep=0.5)") == policy == policies.make(policies.text_of(policy))
    for composed in (f"compose({text}, store=kivi(bits=4))", f"compose( {text}(keep=0.5), answer=2)",
                     f"compose(snapkv(keep=0.5), allocate={text}, store=kivi(bits=4))"):  # fmt: skip
        whole = policies.make(composed, keep=0.5)
        assert policy in policies.slots_of(whole).owners and policies.make(policies.text_of(whole)) == whole


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(vlkv.InputError, match=r"C:\\Users\\me\\own\.py: no such file"):
        policies.make(r"C:\Users\me\own.py:Own", keep=0.5)
