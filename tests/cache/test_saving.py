"""A saved cache answers as if it had never left memory; what does not belong to the model is refused."""

import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

import vlkv
from tests import programs
from tests.generation.test_extend import turn, words
from tests.mechanisms import IN_BITS
from tests.models import SMALL, same, tiny_llava
from vlkv import policies, saving
from vlkv.cache.pool import take_rows
from vlkv.cache.resizing import resize

fill_cache = programs.fill_cache
read_prompt = programs.read_prompt
QUESTIONS = words(5, 8, 3, seed=9)
ROOM = 20


class Own(policies.H2O):
    """A user's, defined outside the package."""


POLICIES = {
    "full": policies.Full(),
    "aircache": policies.AirCache(keep=0.3),
    "kivi": policies.KIVI(bits=4),
    "turboquant": policies.TurboQuant(bits=3),
    **IN_BITS,
    "h2o": Own(keep=0.5),
    "avl": policies.AVL(keep=0.5, refresh=2, text=0.5),
    "composed": policies.compose(
        policies.CSP(keep=0.3), allocate=policies.PrefixKV(keep=0.3, profile=(0.2, 0.4)), store=policies.KIVI
    ),
    "again": policies.compose(
        policies.ExpectedAttention(budget=12, sinks=1), allocate=policies.AdaKV(budget=12, window=4), every=8
    ),
    "smoothed": policies.compose(policies.H2O(keep=0.3), smooth=policies.Smooth((3, 5), pooling="max")),
}


ASKED = ("aircache", "avl", "composed", "again")  # H2O is asked in another process


@jax.jit
def go_on(params, cache, inputs):
    """A question, and four tokens of answer."""
    cache, logits = vlkv.extend(params, cache, inputs)
    tokens, _ = vlkv.decode(params, cache, logits, sampling=vlkv.Greedy(max_new_tokens=4, stop=()))
    return cache, logits, tokens


def narrow(x):
    return jnp.asarray(np.asarray(x).astype(jnp.bfloat16)) if x.dtype == jnp.float32 else x


@pytest.fixture(scope="module")
def cache(read):
    return fill_cache(read, POLICIES["h2o"], new_tokens=ROOM)


@pytest.fixture
def path(tmp_path, params, cache):
    """The same in a file."""
    vlkv.save_cache(tmp_path / "page.safetensors", params, cache)
    return tmp_path / "page.safetensors"


@pytest.mark.default("kivi", "smoothed", "again")
@pytest.mark.ci("kivi", "smoothed", "again", "avl", "composed", *IN_BITS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_loaded_cache_answers_as_the_one_that_was_saved(params, read, tmp_path, name):
    policy, path, questions = POLICIES[name], tmp_path / "page.safetensors", turn(QUESTIONS, seed=0)
    made = fill_cache(read, policy, new_tokens=ROOM)
    said = vlkv.save_cache(path, params, made, policy=policy, note={"page": 3})
    loaded = vlkv.load_cache(path, params)
    same(loaded, made)
    if name in ASKED:
        same(go_on(params, loaded, questions), go_on(params, made, questions))
    assert said["policy"]["class"] == {"h2o": "tests.cache.test_saving:Own"}.get(name, type(policy).__name__)
    assert saving.read_note(path) == (policy, {"page": 3})
    assert path.stat().st_size < made.bytes + sum(x.nbytes for x in jax.tree.leaves(made)) + 20_000
    assert [p.name for p in tmp_path.iterdir()] == ["page.safetensors"]


@pytest.mark.parametrize("name", ["aircache", "turboquant"])
def test_a_file_with_a_tail_for_each_layer_can_be_read(params, read, tmp_path, name):
    """Files from before December 2026."""
    cache = fill_cache(read, POLICIES[name], new_tokens=ROOM)
    layers = range(len(cache.start))
    k, v = (
        tuple(jax.tree.map(lambda x, i=i: x[:, :, i], tail) for i in layers) for tail in (cache.tail_k, cache.tail_v)
    )
    vlkv.save_cache(tmp_path / "old", params, dataclasses.replace(cache, tail_k=k, tail_v=v))
    same(vlkv.load_cache(tmp_path / "old", params), cache)


@pytest.mark.full
@pytest.mark.ci("avl")
@pytest.mark.parametrize("name", ASKED)
def test_one_image_serves_three_questions(params, batch, read, tmp_path, name):
    """Read once and repeated, against the image read once for each question."""
    policy, questions = POLICIES[name], turn(QUESTIONS, seed=0)
    vlkv.save_cache(tmp_path / "page.safetensors", params, fill_cache(read, policy, new_tokens=ROOM))
    once = vlkv.load_cache(tmp_path / "page.safetensors", params, rows=[1, 1, 1])
    rows = ("tokens", "positions", "valid", "vision_index", "grid")
    thrice = dataclasses.replace(batch, **{name: getattr(batch, name)[[1, 1, 1]] for name in rows})
    thrice = fill_cache(read_prompt(params, thrice), policy, new_tokens=ROOM)
    (_, ours, tokens), (_, theirs, expected) = (go_on(params, x, questions) for x in (once, thrice))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_array_equal(tokens, expected)
    assert len({tuple(row) for row in np.asarray(ours).tolist()}) == 3


@pytest.mark.full
def test_a_tail_that_grew_is_one_that_was_long_from_the_start(params, read, cache, path):
    questions = turn(QUESTIONS, seed=0)
    long = fill_cache(read, POLICIES["h2o"], new_tokens=30)
    grown = vlkv.load_cache(path, params, new_tokens=30)
    same(grown, long)
    same(resize(long, ROOM), cache)
    later = go_on(params, cache, questions)[0]
    vlkv.save_cache(path, params, later)
    same(vlkv.load_cache(path, params, new_tokens=30), go_on(params, long, questions)[0])
    same(vlkv.load_cache(path, params, new_tokens=8).used, later.used)
    with pytest.raises(vlkv.InputError, match="new_tokens=7 is too small: the cache already has 8 new tokens"):
        vlkv.load_cache(path, params, new_tokens=7)
    with pytest.raises(vlkv.InputError, match="new_tokens=29: under jit, a cache cannot get less"):
        jax.jit(partial(resize, new_tokens=29))(long)


def test_another_model_is_refused(params, path):
    with pytest.raises(vlkv.InputError, match="another model: the same sizes, but another config or other weights"):
        vlkv.load_cache(path, tiny_llava(1, SMALL))
    with pytest.raises(vlkv.InputError, match=r"another model: dtype 'float32', here 'bfloat16'; make the cache again"):
        vlkv.load_cache(path, jax.tree.map(narrow, params))
    smaller = tiny_llava(config=SMALL)
    smaller.config = dataclasses.replace(smaller.config, generation=(("repetition_penalty", 1.1),))
    saved = saving.fingerprint(smaller)
    assert saved == saving.fingerprint(params) == saving.fingerprint(params), "settings of generation do not matter"
    down = smaller.decoder.layers[1].down.weight
    for change in (0.0, 1e-3):  # one number in the middle of one matrix
        down[...] = down[...].at[15, 20].add(change)
        assert (saving.fingerprint(smaller) == saved) == (change == 0)
    smaller = tiny_llava(config=SMALL)
    smaller.config = dataclasses.replace(smaller.config, stop=(3,))
    with pytest.raises(vlkv.InputError, match="another config"):
        vlkv.load_cache(path, smaller)
    smaller.config = dataclasses.replace(smaller.config, decoder=dataclasses.replace(smaller.config.decoder, layers=1))
    with pytest.raises(vlkv.InputError, match="layers 2, here 1"):
        vlkv.load_cache(path, smaller)


def test_a_damaged_file_is_refused(params, cache, path):
    whole = path.read_bytes()
    for cut in (0, 5, 400, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(vlkv.InputError, match=r"page.safetensors: truncated or corrupt"):
            vlkv.load_cache(path, params)
    path.write_bytes(whole)
    with safe_open(path, framework="numpy") as file:
        header = file.metadata()
    for version in ("1", "2", "3", "4"):
        save_file(load_file(path), path, header | {"version": version})
        for read in (partial(vlkv.load_cache, params=params), saving.read_note):
            said = f"a cache of version {version}, but this vlkv reads 5: make the cache again"
            with pytest.raises(vlkv.InputError, match=said):
                read(path)
    save_file(load_file(path), path)
    with pytest.raises(vlkv.InputError, match="not a cache"):
        vlkv.load_cache(path, params)
    with pytest.raises(vlkv.InputError, match="no such file"):
        vlkv.load_cache(path.with_name("other.safetensors"), params)
    with pytest.raises(vlkv.InputError, match="no such folder"):
        vlkv.save_cache(path.parent / "none" / "page.safetensors", params, cache)


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_write_that_fails_leaves_the_old_file(params, cache, path, monkeypatch, error):
    def fail(*args):
        args[1].write_bytes(b"half")
        raise error("no space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(saving, "save_file", fail)
    with pytest.raises((OSError, vlkv.InputError), match="no space"):
        vlkv.save_cache(path, params, cache)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["page.safetensors"]


def test_ones_own_policy_must_be_found_by_its_name(params, read, path, monkeypatch):
    vlkv.save_cache(path, params, fill_cache(read, POLICIES["h2o"], new_tokens=ROOM))
    monkeypatch.delitem(sys.modules, "tests.cache.test_saving")
    with pytest.raises(
        vlkv.InputError, match=r"its policy is Own of the module tests.cache.test_saving: import this module"
    ):
        vlkv.load_cache(path, params)

    class Local(policies.H2O):
        """Nobody finds this one."""

    with pytest.raises(vlkv.InputError, match="define it at the top of a module"):
        vlkv.save_cache(path, params, fill_cache(read, Local(keep=0.4), new_tokens=ROOM))


@pytest.mark.parametrize(("rows", "said"), [([], "at least one"), ([3], "has 3 rows")])
def test_rows_that_there_are_not(cache, rows, said):
    with pytest.raises(vlkv.InputError, match=said):
        take_rows(cache, rows)
