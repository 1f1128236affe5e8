"""What every method promises: each runs once on every shape, and all promises are asserted of this run.

The equations of the methods have tests of their own.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.families import tiny
from tests.models import embed, same
from tests.policies.numpy_policies import total_budget
from vlkv import policies
from vlkv.cache.stored import StoredTokens
from vlkv.compression.checking import needs_own_prompt
from vlkv.compression.compose import at_keep
from vlkv.compression.sizes import vision_bounds
from vlkv.tools.evaluation.keeps import budget, share_programs

SIDE = 5  # patches of a side of the tiny model's images
# S, V, I: a system, vision or instruction token; a dot is padding.
PROMPTS = (
    "SSSSVVVVVVVVVVVVVVVVIIIIIIII",
    "......SSSVVVVVVVVVVVVIIIIIII",
    "SVVVVVVSSSVVVVVVVIIIIIIIII..",
    "SSSSSSSSSSSSVVVVVVVVVVVVVVVV",
    "SSSSSSSSSSVVIIIIIIIIIIIII...",
    "VVVVVVVVVVV.................",
    "IIIIIIIIIIIIIIIIIIIIIII.....",
    "...........................I",
)
OPTIONS = {
    name: {"window": 3}
    for name in ("snapkv", "pyramidkv", "adakv", "cake", "criticalkv", "damage", "mixkv", "bacon", "rdkv")
} | {"csp": {"fill": True, "window": 3}}
# A larger budget only adds to what these keep: one order per layer, and shares that do not depend on the budget.
RANKINGS = {
    "Random", "ImgRandom", "StreamingLLM", "H2O", "SnapKV-vision", "TOVA", "Knorm", "KeyDiff", "ExpectedAttention",
    "ElasticCache", "LookM", "AVL", "CSP-all",
}  # fmt: skip
TILES = "FasterVLM", "HiRED", "VisionZip", "VisPruner", "PruMerge"  # these use the tower's class token
KEEPS = (1e-6, 0.15, 0.55, 1.0)
# Options that change what is promised, or how: other merging, published codes, caps, and parts of several methods.
VARIANTS = [
    policies.PrefixKV(keep=0.3, merging="cosine"),
    policies.AirCache(keep=0.3, merging=0.5),
    policies.ToMe(keep=0.5, on="cache"),
    policies.Downsample(),
    policies.AVL(keep=0.5, core=0.3, refresh=2),
    *(method(keep=0.3, cap=1.0) for method in (policies.AirCache, policies.PrefixKV, policies.VLCache)),
    policies.compose(policies.SnapKV(keep=0.3), allocate=policies.PrefixKV, store=policies.KIVI(bits=4)),
    policies.compose(policies.CriticalKV(keep=0.4, window=2), allocate=policies.AdaKV),
    policies.compose(policies.H2O(keep=0.4), rank=policies.CriticalKV, store=policies.KIVI(bits=4)),
    policies.compose(policies.SnapKV(keep=0.3), allocate=policies.AdaKV, store=policies.TurboQuant(bits=3)),
    policies.compose(policies.PyramidKV(keep=0.5, window=2), reduce=policies.FastV(keep=0.3, layer=1)),
    policies.compose(policies.AirCache(budget=10, cap=1.0), reduce=policies.FastV(keep=0.1, layer=1)),
    policies.compose(
        policies.SnapKV(keep=0.5, window=2),
        reduce=policies.SparseVLM(keep=0.4, layers=(1,)),
        smooth=policies.Smooth(3),
        store=policies.KIVI(bits=8),
    ),
    policies.compose(policies.H2O(keep=0.5), reduce=policies.EVS(keep=0.4)),
    policies.CSP(keep=0.4, variant="released"),
    policies.LookM(keep=0.2, variant="released", merging="average"),
    policies.LookM(keep=0.2, variant="released", scope="vision", merging="weighted"),
    policies.PyramidKV(keep=0.4, window=3, variant="released"),
    policies.PyramidKV(keep=0.3, scope="vision", variant="released"),
    *(policies.VLCache(keep=0.3, variant=variant) for variant in ("shared_window", "per_layer_window")),
]
DEFAULT = "AirCache-vision", "FastV-vision", "rank=criticalkv, store=kivi(bits=4))"

read, decode, fill, compress = programs.read_prompt, programs.decode, programs.fill_cache_with, programs.compress


def cases():
    """Every method with its own scope on short prompts.

    A method with two scopes has the other one on a published family's shapes, as have methods that need such a tower.
    """
    for name, cls in policies.registry.items():
        other = "all" if cls.scope == "vision" else "vision"
        for scope, shape in ((cls.scope, "prompts"), (other, "family")):
            try:
                policy = tiny.make_policy(name, scope=scope, **OPTIONS.get(name, {}))
            except vlkv.InputError:
                assert scope == other
                if cls.__name__ not in TILES:
                    continue
                policy = tiny.make_policy(name, scope=cls.scope, **OPTIONS.get(name, {}))
            marks = pytest.mark.matrix if shape == "family" and cls.__name__ not in TILES else ()
            yield pytest.param(policy, shape, id=f"{cls.__name__}-{policy.scope}-{shape}", marks=marks)
    for number, policy in enumerate(VARIANTS):  # every second one runs on request only
        marks = pytest.mark.matrix if number % 2 else ()
        yield pytest.param(policy, "prompts", id=f"{policies.text_of(policy)}-prompts", marks=marks)


def prompts(texts) -> vlkv.Inputs:
    """A batch of prompts for the tiny model; consecutive vision tokens are the first patches of an image."""
    text = np.array([list(row) for row in texts])
    vision, valid, rng = text == "V", text != ".", np.random.default_rng(0)
    image, patch = np.full((2, *text.shape), -1)
    for row, content in enumerate(texts):
        for number, run in enumerate(re.finditer("V+", content)):
            image[row, slice(*run.span())], patch[row, slice(*run.span())] = number, np.arange(len(run[0]))
    return vlkv.Inputs(
        tokens=rng.integers(6, 50, text.shape), positions=np.maximum(valid.cumsum(axis=1) - 1, 0)[..., None],
        valid=valid, vision_index=np.where(vision, image * SIDE**2 + patch, -1),
        grid=np.stack([image, patch // SIDE, np.where(vision, patch % SIDE, -1)], axis=-1),
        pixels=rng.normal(size=(2, 3, 20, 20)).astype(np.float32),
        max_vision=16, max_text=23, max_instruction=23, max_images=2,
    )  # fmt: skip


def drawn(seed: int) -> list[str]:
    """Prompts with random numbers of tokens of each kind, at least one in all."""
    rng = np.random.default_rng(seed)
    parts = [zip(".SVSVI", rng.integers(0, (4, 4, 9, 3, 4, 5)), strict=True) for _ in PROMPTS]
    return [("".join(kind * count for kind, count in row) + "I").ljust(len(PROMPTS[0]), ".") for row in parts]


def moved(inputs: vlkv.Inputs) -> tuple[vlkv.Inputs, np.ndarray]:
    """The same prompts in reverse order, with the padding of the end at the beginning; and each token's new index."""
    ends = [np.flatnonzero(row)[-1] + 1 for row in inputs.valid]
    index = np.stack([np.roll(np.arange(inputs.valid.shape[1]), -end) for end in ends])[::-1]
    rows = np.arange(len(index))[::-1, None]
    names = ("tokens", "positions", "valid", "vision_index", "grid", "tiles")
    arrays = {name: x[rows, index] for name in names if (x := getattr(inputs, name)) is not None}
    return dataclasses.replace(inputs, **arrays), index


@pytest.fixture(scope="module")
def shapes(params):
    """By name of a shape and of a method: the model, and batches with the same bounds."""
    own = [prompts(PROMPTS), *(prompts(drawn(seed)) for seed in range(3))]
    families = {family: (tiny.make_model(family), [tiny.make_batch(family)]) for family in ("qwen2_vl", "llava_next")}
    return {
        "prompts": lambda _: (params, own),
        # M-RoPE, without class token; and tiles.
        "family": lambda name: families["llava_next" if name in TILES else "qwen2_vl"],
    }


def check_kept(policy, batch, kept) -> None:
    """Budgets are exact, padding does not compete, and text out of scope stays."""
    layers, _, heads, _ = kept.shape
    assert not (kept & ~batch.valid[:, None]).any()
    inside = batch.is_vision if policy.scope == "vision" else batch.valid
    assert (kept | ~(batch.valid & ~inside)[:, None]).all()
    for row, mask in enumerate(inside):
        spent, count = kept[:, row, :, mask].sum(axis=0), int(mask.sum())  # [L, K]
        if policy.reducer is not None:
            vision, images = batch.is_vision[row], len(set(batch.grid[row, batch.is_vision[row], 0]))
            bounds = vision_bounds(policy, layers=layers, vision=int(vision.sum()), images=images)
            most = np.array(bounds) * vision.any() + int((mask & ~vision).sum())
            assert (spent <= most[:, None]).all() and (spent >= (count > 0)).all()
        elif policy.facts.budgets == "bits":
            total = total_budget(layers, count, policy.keep, policy.budget) if count else 0
            assert (spent >= min(count, 1)).all() and (spent <= 16 * (total // layers)).all()
        elif policy.follows_paper:
            total = total_budget(layers, count, policy.keep, policy.budget) if count else 0
            assert spent.sum() == heads * total
            assert policy.facts.budgets == "heads" or (spent.sum(axis=0) == total).all()
            assert policy.cap is None or (spent <= np.ceil(policy.cap * total / layers)).all()


def check_text(policy) -> None:
    """The text of a policy makes the policy, with the scope that tables show, and with options that are None."""
    text = policies.text_of(policy, scope=True)
    assert policies.make(text) == policy and (f"scope='{policy.scope}'" in text) != isinstance(policy, policies.Full)
    for field in dataclasses.fields(policy):
        if field.name != "keep" and field.default is not None and "None" in str(field.type):
            other = dataclasses.replace(policy, **{field.name: None})
            assert policies.make(policies.text_of(other)) == other, field.name


def check_entries(policy, batch, prompt, cache, kept, row) -> None:
    """`compress` of numpy arrays chooses what the cache stores, with the same keys and values."""
    vision, valid = batch.is_vision[row], batch.valid[row]
    q, k, v = (np.stack([np.asarray(getattr(x, name))[row] for x in prompt.layers]).swapaxes(1, 2) for name in "qkv")
    q, k, v = (np.where(valid[:, None], x, 9.0) for x in (q, k, v))
    context = jax.tree.map(lambda *x: jnp.stack([a[row] for a in x]), *(x.context for x in prompt.layers))
    k, v, selection = compress(policy, q, k, v, vision, valid, context=context)
    np.testing.assert_array_equal(selection.kept, kept[:, row])
    inside, scores = vision if policy.scope == "vision" else valid, np.asarray(selection.scores)
    assert (scores[..., ~valid] == -np.inf).all() and (scores[..., valid & ~inside] == np.inf).all()
    assert policy.cap is not None or np.isfinite(scores[..., inside]).all()
    if policy.storage is not None:
        return
    token, start, counts = (np.asarray(x) for x in (cache.token, cache.start, cache.counts))
    for layer, head in np.ndindex(kept.shape[0], kept.shape[2]):
        begin, column = start[layer, row, head], head % token.shape[1]
        slots = slice(begin, begin + counts[layer, row, head])
        tokens = token[row, column, slots]
        assert not (np.diff(vision[tokens].astype(int)) > 0).any(), "vision entries come first"
        for pool, entries in ((cache.k, k), (cache.v, v)):
            held = np.asarray(pool)[row, column, slots]
            np.testing.assert_allclose(held, np.asarray(entries)[layer, head, tokens], atol=1e-5)


def check_answer(params, batch, x, cache, kept, tokens, row) -> None:
    """Each token is the most likely one in float64 after decoding from just the entries that are kept."""
    valid, positions = batch.valid[row], batch.positions[row, batch.valid[row]]
    positions = positions[:, 0] if positions.shape[1] == 1 else positions
    logits, layers = reference.prefill(params.decoder, x[row, valid], positions)
    later = reference.decode(
        params.decoder, layers, kept[:, row][..., valid], tokens[row, :-1], cache.softmax_n,
        first=int(cache.next_position[row, 0]),
    )  # fmt: skip
    logits = np.concatenate([logits[None], later])
    assert (logits[np.arange(len(logits)), tokens[row]] >= logits.max(axis=1) - 1e-4).all()


def check_batches(params, batches, policy) -> vlkv.Output:
    """One program answers all batches; neither padding nor other rows matter. Returns the first answers."""
    traces, outputs = tiny.generate._cache_size(), []
    for batch in batches:
        outputs.append(tiny.answer(params, batch, policy))
        check_kept(policy, batch, outputs[-1].kept)
        if policy.facts.needs_key:
            continue  # a draw is the row's own
        other, index = moved(batch)
        again = tiny.answer(params, other, policy)
        np.testing.assert_array_equal(again.tokens[::-1], outputs[-1].tokens)
        kept = np.take_along_axis(outputs[-1].kept[:, ::-1], index[None, :, None], axis=-1)
        np.testing.assert_array_equal(again.kept, kept)
    broken = tiny.answer(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params), batches[0], policy)
    assert (broken.tokens == -1).all() and (broken.lengths == 1).all()
    assert tiny.generate._cache_size() == traces + 1
    return outputs[0]


@pytest.mark.default(*(f"{method}-prompts" for method in DEFAULT))
@pytest.mark.parametrize(("policy", "shape"), cases())
def test_every_method(shapes, tmp_path, policy, shape):
    name = type(policy).__name__
    params, batches = shapes[shape](name)
    batch, length = batches[0], batches[0].valid.shape[1]
    check_text(policy)
    output = check_batches(params, batches, policy)
    assert output.slots == vlkv.pool_slots(params, batch, policy, new_tokens=tiny.NEW)

    # The two halves of prefill and `decode` do the same as `generate`, in the program of a larger keep too.
    whole = policy if policy.facts.own_keep or policy.keep is None else at_keep(policy, 1.0)
    program = share_programs([policy, whole])[0]
    prompt = read(params, batch, policy) if needs_own_prompt(policy) else read(params, batch)
    fill_at = partial(fill, prompt, program, new_tokens=tiny.NEW, key=jax.random.split(jax.random.key(0))[0])
    cache = fill_at(budget(policy, program, prompt))
    assert cache.extent.max() <= cache.longest
    kept = StoredTokens.of(cache, length).mask()
    np.testing.assert_array_equal(kept, output.kept)
    tokens, _ = decode(params, cache, prompt.logits, sampling=vlkv.Greedy(max_new_tokens=tiny.NEW, stop=()))
    np.testing.assert_array_equal(tokens, output.tokens)
    assert program is not policy or output.cache_bytes == cache.bytes
    vlkv.save_cache(tmp_path / "cache", params, cache)
    same(vlkv.load_cache(tmp_path / "cache", params), cache)

    # What is stored and answered, against `compress` and float64.
    rows = range(len(batch.valid))
    if policy.reducer is None and not policy.facts.needs_key:
        for row in rows[1:2] if shape == "family" else rows[1:3]:
            check_entries(policy, batch, prompt, cache, kept, row)
    if policy.updater is None and policy.storage is None:
        x, tokens = np.asarray(embed(params, batch)), np.asarray(tokens)
        text = [row for row in rows if policy.scope == "vision" and not batch.is_vision[row].any()]
        for row in text if policy.reducer or policy.merges or name == "ToMe" else rows:  # which merges, by an option
            check_answer(params, batch, x, cache, kept, tokens, row)

    # A larger budget only adds to a ranking, and keep=1 keeps everything.
    if program is not policy:
        before = np.zeros_like(kept)
        for keep in KEEPS:
            at = at_keep(policy, keep)
            kept = StoredTokens.of(fill_at(budget(at, program, prompt)), length).mask()
            check_kept(at, batch, kept)
            assert (kept >= before).all() or not {name, f"{name}-{policy.scope}"} & RANKINGS
            before = kept
        assert (kept == batch.valid[:, None]).all()
    elif policy.reducer is policy and name not in ("LightKV", "Downsample"):  # these reduce with keep=1 too
        for layer in read(params, batch, whole).layers:
            np.testing.assert_array_equal(np.sum(layer.valid, axis=1), batch.valid.sum(axis=1))
