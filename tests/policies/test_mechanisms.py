"""Whole models, once for each mechanism, against float64 and against the methods on arrays."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.families import tiny
from tests.models import embed
from tests.policies import arrays, numpy_policies
from tests.policies.test_every_method import check_kept
from vlkv import policies
from vlkv.analysis import profiles
from vlkv.policies.kvzip import largest
from vlkv.tools.commands.options import add_policy_arguments, policy_from

MECHANISMS = {
    "equal budgets": policies.SnapKV(keep=0.4, window=4),
    "per layer": policies.AirCache(keep=0.3),
    "per head": policies.compose(policies.SnapKV(keep=0.3, window=4), allocate=policies.AdaKV),
    "merging": policies.LookM(keep=0.4, merging="weighted"),
    "reduction": policies.compose(policies.PyramidKV(keep=0.5, window=2), reduce=policies.FastV(keep=0.3, layer=1)),
    "eviction": policies.H2O(keep=0.4),
    "quantised store": policies.KIVI(bits=4),
    "repetition": policies.KVzip(keep=0.4, sinks=2),
    "answer time": policies.compose(policies.SnapKV(keep=0.4, window=4), answer=1),
}  # a method whose budgets are bits has a test of its own


@pytest.fixture(scope="module")
def inputs():
    """The prompts of `arrays` for the tiny model, and the same in reverse order with their padding moved."""
    batch = arrays.batch()
    rows, rng = len(arrays.PROMPTS), np.random.default_rng(0)
    tokens, pixels = rng.integers(6, 50, (rows, arrays.LENGTH)), rng.normal(size=(2, 3, 20, 20)).astype(np.float32)

    def of(rows, tokens):
        vision, valid, grid = batch.vision[rows], batch.valid[rows], batch.grid[rows]
        index = grid[..., 0] * arrays.SIDE**2 + grid[..., 1] * arrays.SIDE + grid[..., 2]
        return vlkv.Inputs(
            tokens=tokens, positions=batch.positions[rows][..., None], valid=valid, grid=grid, pixels=pixels,
            vision_index=np.where(vision, index, -1), max_vision=16, max_text=23, max_instruction=23, max_images=2,
        )  # fmt: skip

    index = arrays.shifts(batch.valid[:rows])
    return of(slice(rows), tokens), of(slice(-rows, None), np.take_along_axis(tokens[::-1], index, axis=1)), index


def check_answer(params, batch, kept, answers) -> None:
    """Each token is the most likely one in float64 after decoding from just the entries that are kept."""
    x = np.asarray(embed(params, batch))
    for row, tokens in enumerate(answers):
        valid = batch.valid[row]
        logits, layers = reference.prefill(params.decoder, x[row, valid], batch.positions[row, valid][:, 0])
        later = reference.decode(params.decoder, layers, kept[row][..., valid], tokens[:-1], first=int(valid.sum()))
        logits = np.concatenate([logits[None], later])
        assert (logits[np.arange(len(logits)), tokens] >= logits.max(axis=1) - 1e-4).all()


@pytest.mark.default("equal budgets", "per head", "merging", "reduction", "eviction", "quantised store", "repetition")
@pytest.mark.parametrize("name", MECHANISMS)
def test_generate_of_every_mechanism(params, inputs, name):
    policy, (batch, moved, index) = MECHANISMS[name], inputs
    output, again = (tiny.answer(params, x, policy) for x in (batch, moved))
    kept, tokens = output.kept.swapaxes(0, 1), np.asarray(output.tokens)
    if name != "answer time":
        images = (batch.grid[..., 0].max(axis=1) + 1).tolist()
        check_kept(policy, batch.is_vision, batch.valid, kept, images)
        assert output.slots == vlkv.pool_slots(params, batch, policy, new_tokens=tiny.NEW)
    np.testing.assert_array_equal(np.asarray(again.tokens)[::-1], tokens)
    np.testing.assert_array_equal(again.kept, np.take_along_axis(output.kept[:, ::-1], index[None, :, None], axis=-1))
    if policies.slots_of(policy).reduce is policies.slots_of(policy).repeats is None and name != "answer time":
        prompt, rows = programs.read_prompt(params, batch), len(arrays.batch().q) // len(batch.valid)
        q, k, v = (np.stack([getattr(x, name) for x in prompt.layers], 1) for name in "qkv")
        q, k, v = (np.where(batch.valid[:, None, None, :, None], x, 9.0) for x in (q, k, v))  # whatever padding holds
        whole = arrays.batch()
        of_layers = {name: getattr(whole, name)[:, : q.shape[1]] for name in ("norms", "later", "lse")}
        several = dict(q=q, k=k, v=v, vision=batch.is_vision, valid=batch.valid)  # as many rows as the programs are for
        repeated = {name: np.concatenate([x] * rows) for name, x in several.items()}
        found = arrays.compress_batch(policy, whole._replace(**of_layers, **repeated))
        np.testing.assert_array_equal(found.kept[: len(kept)], kept)
    if name in ("equal budgets", "per layer", "per head", "repetition"):
        check_answer(params, batch, kept, tokens)


def test_a_model_of_nan_answers_nothing(params, inputs):
    broken = tiny.answer(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params), inputs[0], MECHANISMS["per layer"])
    assert (broken.tokens == -1).all() and (broken.lengths == 1).all()


def test_norms_of_projected_values(params, batch):
    prompt, x = programs.read_prompt(params, batch, policies.CriticalKV(keep=0.4)), np.asarray(embed(params, batch))
    for row, valid in enumerate(batch.valid):
        _, layers = reference.prefill(params.decoder, x[row, valid], batch.positions[row, valid][:, 0])
        for i, (q, _, v) in enumerate(layers):
            weight = np.asarray(params.decoder.layers[i].out.weight[...], np.float64)  # [D, N, H]
            projected = np.einsum("dnh,tnh->ntd", weight, np.repeat(v, q.shape[1] // v.shape[1], axis=1))
            norms = numpy_policies.per_key_head(np.abs(projected).sum(axis=-1), v.shape[1])
            found = np.asarray(prompt.layers[i].context.output_norm)[row][:, valid]
            np.testing.assert_allclose(found, norms, rtol=1e-3)


def test_repetition(params, batch, read):
    """Images are repeated as their embeddings; rows are padded on the left. The answer does not change."""
    instruction = 7, 9, 11
    policy = policies.KVzip(keep=0.4, sinks=2, instruction=instruction)
    prompt = programs.read_prompt(params, batch, policy)
    np.testing.assert_allclose(prompt.logits, read.logits, atol=1e-5)
    assert (prompt.next_position == read.next_position).all()
    x, said = np.asarray(embed(params, batch)), np.asarray(params.decoder.embedding.weight[...])[np.array(instruction)]
    score = jax.jit(jax.vmap(largest))
    scores = [score(y.context.repeated.q, y.k, y.context.repeated.lse) for y in prompt.layers]
    for row, valid in enumerate(batch.valid):
        own, positions = x[row, valid], batch.positions[row, valid][:, 0]
        length, begin = valid.sum(), positions.max() + 1
        again = begin + 3 + positions
        _, layers = reference.prefill(
            params.decoder, np.concatenate([own, said, own]), np.concatenate([positions, begin + np.arange(3), again])
        )
        for (q, k, _), found in zip(layers, scores, strict=True):
            each = numpy_policies.attention(np.swapaxes(q, 0, 1), np.swapaxes(k, 0, 1))[:, length:, :length]
            wanted = each.max(axis=1).reshape(k.shape[1], -1, length).max(axis=1)
            np.testing.assert_allclose(np.asarray(found)[row][:, valid], wanted, rtol=1e-3, atol=1e-6)


def test_what_is_missing_is_named(params, batch, read):
    q, k = (np.zeros((1, 2, 8, 4), np.float32) for _ in range(2))
    for missing, said in (
        (policies.ExpectedAttention(keep=0.5), "ExpectedAttention uses more of the model"),
        (policies.KVzip(keep=0.5), "KVzip scores while the model repeats the prompt"),
    ):
        with pytest.raises(vlkv.InputError, match=said):
            programs.select(missing, q, k, k, np.zeros(8, bool))
    with pytest.raises(vlkv.InputError, match="give the policy to read_prompt"):
        programs.fill_cache(read, policies.CriticalKV(keep=0.4), new_tokens=1)
    with pytest.raises(vlkv.InputError, match="has the id 99999, but the vocabulary has"):
        vlkv.prefill(params, batch, policies.KVzip(keep=0.5, instruction=(5, 99999)), new_tokens=1)


@pytest.mark.full
def test_csp_calibrated_share(params, batch, read):
    """The share of cross attention among all attention of the last four rows, mean over rows, layers and heads."""
    policy, found = policies.CSP(keep=0.5, window=4, heads="each"), []
    for row in range(len(batch.valid)):
        inside, length = batch.valid[row], batch.valid[row].sum()
        vision = batch.is_vision[row][inside]
        for layer in read.layers:
            q, k = (np.asarray(x)[row][:, inside] for x in (layer.q, layer.k))
            a = numpy_policies.attention(q, k, n=1)[:, -4:].reshape(len(k), -1, 4, length)
            crossing = vision[-4:, None] != vision
            found += (np.where(crossing, a, 0).sum((1, 2, 3)) / a.sum((1, 2, 3))).tolist()
    assert abs(profiles.cross_share(params, [batch], policy) - np.mean(found)) < 1e-5


def test_avl_any_keep_on_the_command_line():
    parser = argparse.ArgumentParser()
    add_policy_arguments(parser)
    for keep in (0.05, 0.2, 1.0):
        policy = policy_from(parser.parse_args(["--policy", "avl", "--keep", str(keep)]), lambda: None)
        assert (policy.keep, policy.core) == (keep, 0.3)
