"""Whole models, once for each mechanism, against float64 and against the methods on arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.families import tiny
from tests.models import embed
from tests.policies import arrays
from tests.policies.test_every_method import check_kept
from vlkv import policies

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
