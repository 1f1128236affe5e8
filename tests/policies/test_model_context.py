"""What methods use of a model besides queries, keys and values, against float64 numpy with the model's weights."""

import argparse

import jax
import numpy as np
import pytest

import vlkv
from tests import programs, reference
from tests.models import embed
from tests.policies import numpy_policies
from vlkv import policies
from vlkv.analysis import profiles
from vlkv.policies.kvzip import largest
from vlkv.tools.commands.options import add_policy_arguments, policy_from


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
