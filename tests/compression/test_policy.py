"""What an author of a method sees: few members, facts that follow from a class, and stages that may ask for `keep`."""

import copy
import dataclasses
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from vlkv import policies
from vlkv.policies import Policy, Slots, compose

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


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(vlkv.InputError, match=r"C:\\Users\\me\\own\.py: no such file"):
        policies.make(r"C:\Users\me\own.py:Own", keep=0.5)
