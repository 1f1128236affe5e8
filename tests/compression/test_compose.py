"""Compositions: who owns each stage, what is refused, and options that are replaced."""

import dataclasses

import pytest

import vlkv
from tests.mechanisms import IN_BITS
from vlkv import policies
from vlkv.policies import Policy, compose, make, slots_of

EQUAL, QUERIES = "gives equal budgets", "depend on no queries, so observing the answer would change nothing: leave"
REFUSED = [
    # Parts without effect.
    ("h2o(keep=0.3), allocate=snapkv", f"SnapKV .* {EQUAL}"),
    ("snapkv(keep=0.3), allocate=lookm", f"LookM .* {EQUAL}"),
    ("snapkv(keep=0.3), allocate=aircache(keep=0.3, scope='all', allocation='uniform')", "equal budgets"),
    ("snapkv(keep=0.3), allocate=adakv(keep=0.3, safeguard=1.0)", "equal budgets"),
    ("snapkv(keep=0.3), rank=elasticcache", "does not rank"),
    ("snapkv(keep=0.3), rank=csp", "does not rank"),
    ("snapkv(keep=0.3), rank=roco(keep=0.3, spread=0.0)", "does not rank"),
    ("snapkv(keep=0.3), rank=criticalkv(keep=0.3, first_share=1.0)", "does not rank"),
    ("snapkv(keep=0.3, scope='vision'), rank=meda", "does not rank"),
    ("snapkv(keep=0.3, scope='vision'), rank=vlcache", "does not rank"),
    ("h2o(keep=0.5), rank=snapkv", "compose: SnapKV does not rank"),
    ("lookm(keep=0.3), merge=lookm", "already its own"),
    ("h2o(keep=0.3), step=h2o", "already its own"),
    ("full(), merge=lookm", "keeps every token"),
    ("full(), smooth=smooth(3)", "nothing to smooth"),
    ("snapkv(keep=0.3), smooth=smooth(1)", "changes nothing"),
    ("streamingllm(keep=0.3), smooth=smooth(3)", "does not change the order"),
    *(
        (f"{name}(keep=0.5, on='cache'), {part}", "merges in its own order")
        for name in ("tome", "pitome", "tofu")
        for part in ("rank=roco", "smooth=smooth(3)")
    ),
    # Parts that do not fit.
    ("snapkv(keep=0.2), allocate=prefixkv(keep=0.3)", "another budget"),
    ("snapkv(keep=0.2), reduce=h2o(keep=0.2)", "does not reduce"),
    ("fastv(keep=0.2), reduce=fastv(keep=0.2)", "both reduce"),
    ("fastv(keep=0.2), allocate=prefixkv", "evicts nothing"),
    ("compose(fastv(keep=0.2)), reduce=fastv(keep=0.2)", "both reduce"),
    ("compose(fastv(keep=0.2)), allocate=prefixkv", "evicts nothing"),
    ("fastv(keep=0.5), smooth=smooth(3)", "allocate, merge or smooth"),
    ("snapkv(keep=0.2), merge=h2o", "does not merge"),
    ("snapkv(keep=0.2), merge=prefixkv", "does not merge"),
    ("aircache(keep=0.2, cap=2.0), allocate=prefixkv", r"give it the cap=2\.0"),
    ("lookm(keep=0.3), allocate=prefixkv(keep=0.3, cap=1.0)", r"cap=1\.0"),
    ("snapkv(keep=0.3, scope='vision'), step=avl(keep=0.3, prefill=0.5)", "give it as reduce="),
    ("lookm(keep=0.3, variant='released'), reduce=fastv(keep=0.3)", "do not support reduced prompts"),
    ("snapkv(keep=0.5, scope='vision'), merge=tome", "give it as reduce="),
    ("snapkv(keep=0.2), step=snapkv", "does nothing while decoding"),
    ("snapkv(keep=0.2), store=h2o(keep=0.5)", "does not quantise"),
    ("kvzip(keep=0.5), reduce=fastv(keep=0.5)", "compose: FastV reduces the prompt, so it cannot be repeated"),
    *(
        (f"{name}(keep=0.1), {part}", "divides the bits")
        for name in IN_BITS
        for part in ("store=kivi", "allocate=prefixkv", "merge=lookm")
    ),
    *(
        (f"snapkv(keep=0.1), {part}={name}(keep=0.1)", "divides the bits")
        for name in IN_BITS
        for part in ("rank", "allocate")
    ),
    *((f"h2o(keep=0.1), store={name}", "divides the bits") for name in IN_BITS),
    *((f"snapkv(keep=0.1), store={name}(keep=0.2)", "another budget") for name in IN_BITS),
    *((f"full(), store={name}", "keeps every token") for name in IN_BITS),
    # An answer that cannot observe.
    ("fastv(keep=0.5), answer=4", "answer=4: FastV reduces the prompt before there is an answer: leave"),
    ("snapkv(keep=0.5), reduce=lightkv, answer=4", "answer=4: LightKV reduces the prompt"),
    ("kvzip(keep=0.5), answer=4", "KVzip repeats the prompt before there is an answer: leave out"),
    ("h2o(keep=0.5), answer=4", "H2O updates the cache while decoding, from the first token on: leave"),
    ("snapkv(keep=0.5), step=roco, answer=4", "RoCo updates the cache while decoding"),
    *((f"{name}(keep=0.5), answer=4", QUERIES) for name in ("random", "knorm", "streamingllm")),
    ("full(), answer=4", QUERIES),
    ("kivi(), answer=4", QUERIES),
    ("compose(keydiff(keep=0.5), allocate=prefixkv), answer=4", QUERIES),
    ("snapkv(keep=0.5), answer=-1", "answer=-1"),
    ("snapkv(keep=0.5), answer=1.5", r"answer=1\.5"),
    ("snapkv(keep=0.5), answer=True", "answer=True"),
    ("snapkv(keep=0.5), answer=later", "options must be literals"),
    ("snapkv(keep=0.5), answers=4", "answer=, every= and first="),
    # Smoothing.
    ("snapkv(keep=0.5), smooth=smooth(4)", "must be odd, or give one_sided=True"),
    ("snapkv(keep=0.5), smooth=smooth((3, 4))", "must be odd"),
    ("snapkv(keep=0.5), smooth=smooth(0)", "at least 1"),
    ("snapkv(keep=0.5), smooth=smooth(3.0)", "whole number"),
    ("snapkv(keep=0.5), smooth=smooth((3, 3, 3))", "or two of them"),
    ("snapkv(keep=0.5), smooth=smooth((9,))", "or two of them"),
    ("snapkv(keep=0.5), smooth=smooth(3, one_sided=1)", "True or False"),
    ("snapkv(keep=0.5), smooth=smooth(3, pooling='sum')", '"avg" or "max"'),
]


@pytest.mark.usefixtures("shapes_for_arrays")  # which switches the types of arguments off
def test_what_is_refused_is_said_in_a_line():
    for text, said in REFUSED:
        with pytest.raises(vlkv.InputError, match=said) as error:
            make(f"compose({text})")
        assert "\n" not in str(error.value) and len(str(error.value)) <= 200
    with pytest.raises(vlkv.InputError, match="must be a Smooth"):
        compose(SNAP, smooth=3)


def test_parts_with_an_effect_stay():
    make("compose(pyramidkv(keep=0.3), allocate=snapkv)")  # equal budgets instead
    make("compose(tome(keep=0.5, on='cache'), allocate=adakv)")
    make("compose(tome(keep=0.5, on='cache'), merge=lookm, rank=roco)")


SNAP, PREFIX, KIVI = policies.SnapKV(keep=0.4), policies.PrefixKV(keep=0.4), policies.KIVI(bits=4)


def test_a_composition_knows_the_owner_of_each_stage():
    """Methods whose options switch a stage off own nothing."""
    h2o, fastv = policies.H2O(keep=0.4), policies.FastV(keep=0.5, layer=1)
    whole = compose(compose(compose(SNAP, allocate=PREFIX), step=h2o), reduce=fastv, store=KIVI)
    slots = slots_of(whole)
    assert (slots.score, slots.rank, slots.allocate, slots.merge) == (SNAP, SNAP, PREFIX, None)
    assert (slots.step, slots.reduce, slots.store, slots.storage) == (h2o, fastv, KIVI, KIVI.storage)
    assert slots.owners == (SNAP, PREFIX, h2o, fastv, KIVI)
    assert slots_of(compose(PREFIX, store=KIVI)).step == PREFIX
    assert slots_of(policies.AVL(keep=0.3)).reduce is slots_of(policies.AVL(keep=0.3, core=None)).step is None
    assert slots_of(SNAP).step is slots_of(policies.H2O(keep=0.4, evict=False)).step is None
    on_cache = slots_of(policies.ToMe(keep=0.5, on="cache"))
    assert on_cache.reduce is slots_of(policies.ToMe(keep=0.5)).merge is None and on_cache.merge == on_cache.score


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ("compose(snapkv, allocate=prefixkv), store=kivi", "snapkv, allocate=prefixkv, store=kivi"),
        ("compose(compose(snapkv, allocate=prefixkv), step=h2o), store=kivi",
         "snapkv, allocate=prefixkv, step=h2o, store=kivi"),
        ("snapkv, allocate=compose(h2o, allocate=prefixkv)", "snapkv, allocate=prefixkv"),
        ("compose(snapkv, allocate=pyramidkv), allocate=compose(prefixkv, store=kivi)", "snapkv, allocate=prefixkv"),
        ("snapkv, merge=compose(lookm, store=kivi)", "snapkv, merge=lookm"),
        ("compose(snapkv, reduce=compose(fastv, store=kivi)), store=kivi", "snapkv, reduce=fastv, store=kivi"),
        ("compose(compose(fastv)), store=kivi", "fastv, store=kivi"),
        ("compose(snapkv, smooth=smooth(9)), store=kivi", "snapkv, smooth=smooth(9), store=kivi"),
        ("compose(snapkv, smooth=smooth(9)), smooth=smooth(3)", "snapkv, smooth=smooth(3)"),
        ("compose(snapkv, store=rdkv), smooth=smooth(3)", "snapkv, smooth=smooth(3), store=rdkv(keep=0.4)"),
    ],
)  # fmt: skip
def test_each_stage_stays_with_its_owner_however_deep_it_was_given(nested, flat):
    one, other = (make(f"compose({text})", keep=0.4) for text in (nested, flat))
    assert one == other and not any(isinstance(part, policies.Composed) for part in slots_of(one).owners)


def test_a_composition_follows_what_is_replaced():
    part = policies.PrefixKV(keep=0.2, cap=2.0)
    whole = compose(policies.SnapKV(keep=0.2), allocate=part, store=policies.KIVI)
    half = dataclasses.replace(whole, keep=0.5)
    slots = slots_of(half)
    assert half.keep == slots.score.keep == slots.allocate.keep == 0.5 and slots.store == slots_of(whole).store
    few = dataclasses.replace(whole, keep=None, budget=9, scope="vision", cap=None)
    for made in (few, slots_of(few).score, slots_of(few).allocate):
        assert (made.keep, made.budget, made.scope, made.cap) == (None, 9, "vision", None)
    assert dataclasses.replace(whole) == whole
    in_bits = slots_of(dataclasses.replace(compose(SNAP, store=policies.RDKV(keep=0.4, window=4)), keep=0.5))
    assert in_bits.rank == in_bits.allocate == in_bits.store == policies.RDKV(keep=0.5, window=4)
    reducing = compose(policies.FastV(keep=0.5, layer=1), store=policies.KIVI)
    assert slots_of(dataclasses.replace(reducing, keep=0.25)).reduce.keep == 0.25


class Own(Policy):
    """An option of a user that means a count or a share."""

    some: int | float = 1


@pytest.mark.parametrize(("cls", "option"), [(policies.H2O, "recent"), (Own, "some")])
def test_a_count_is_no_share(cls, option):
    count, share = (cls(keep=0.3, **{option: value}) for value in (1, 1.0))
    assert count != share and hash(count) != hash(share)
    assert compose(count, store=policies.KIVI) != compose(share, store=policies.KIVI)
    for policy in (count, share) if cls is not Own else ():
        assert make(policies.text_of(policy)) == policy
    whole, real = (cls(keep=value) for value in (1, 1.0))  # here both mean a share
    assert whole == real and hash(whole) == hash(real)
