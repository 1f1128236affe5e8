"""Pruning by the tower's class token and by the instruction: golden vectors, and whole models against float64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import reference
from tests.families import forms, tiny
from tests.policies import arrays
from tests.policies.numpy_policies import attention
from tests.policies.test_vision_selection import half_up, prompt
from vlkv.generation.prompt import read_prompt
from vlkv.policies.fastervlm import FasterVLM
from vlkv.policies.hired import HiRED
from vlkv.policies.ivtp import IVTP
from vlkv.processing.arranging import cells

group = jax.jit(lambda policy, tokens: policy.reduce(tokens, None, stage=0))
prune = jax.jit(lambda policy, tokens, obs: policy.reduce(tokens, obs, stage=1))


def best(scores, count):
    """A mask of the `count` largest, ties to the earlier."""
    return np.isin(np.arange(len(scores)), np.argsort(-scores, kind="stable")[:count])


def tokens_of(tower, images=None, valid=None, tiles=None):
    """Vision tokens alone, with the attention that they received: tower [W, N, V], or [N, V] of every watched block."""
    tower = np.asarray(tower) if np.ndim(tower) == 3 else np.stack([tower, tower])
    length = tower.shape[-1]
    grid = np.tile(np.zeros((length, 1)) if images is None else np.array(images)[:, None], (1, 3))
    more = {} if tiles is None else {"tiles": tiles}
    return arrays.tokens_of(np.zeros((length, 4)), grid, None, valid, tower=tower, **more)


def tokens_in_tiles(first, late, rows, columns):
    """A view and rows x columns tiles of it: first, late [I, N, V]."""
    count, _, length = first.shape
    side = int(length**0.5)
    shown = np.full((count, length), -1)
    shown[0] = 1 + cells(side, rows, columns).ravel()
    tiles = np.stack([np.repeat(np.arange(count), length), shown.ravel()], axis=-1)
    tower = np.stack([np.concatenate([*x], axis=-1) for x in (first, late)])
    return tokens_of(tower, tiles=jnp.asarray(tiles))


def kept(policy, tokens):
    return np.asarray(policy.reduce(tokens, None, stage=0)[1])


# --- golden vectors -------------------------------------------------------------------------------------------------


def test_fastervlm_keeps_what_the_released_code_keeps(golden):
    g = golden("vision_pruning")
    attention = g["fastervlm_class_attention"]
    for count, expected in zip(g["fastervlm_token_counts"], g["as_released_fastervlm_kept"], strict=True):
        policy = FasterVLM(keep=float(count / attention.shape[1]))
        np.testing.assert_array_equal(kept(policy, tokens_of(attention)), expected)


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_hired_shares_out_the_budget_of_an_image_in_parts(golden, variant):
    g = golden("vision_pruning")
    rows, columns = g["hired_grid_rows_columns"].tolist()
    tokens = tokens_in_tiles(*(g[f"hired_{which}_layer_class_attention"][..., 1:] for which in ("first", "late")),
                             rows, columns)  # fmt: skip
    source = "paper" if variant == "paper" else "as_released"
    for (i, rate), (j, alpha) in itertools.product(*map(enumerate, (g["hired_token_budget_rates"], g["hired_alphas"]))):
        policy = HiRED(keep=float(rate), alpha=float(alpha), variant=variant)
        wanted = g[f"{source}_hired_kept_rate{i}_alpha{j}"]
        np.testing.assert_array_equal(kept(policy, tokens).reshape(wanted.shape), wanted)


def test_cells_of_a_view():
    np.testing.assert_array_equal(cells(3, 2, 1), [[0] * 3, [0] * 3, [1] * 3])
    np.testing.assert_array_equal(cells(4, 1, 3), [[0, 0, 1, 2]] * 4)


@pytest.mark.parametrize("keep", [0.05, 0.29, 0.7, 1.0])
def test_hired_bound_holds_for_every_way_to_cut_tokens_into_images(keep):
    policy = HiRED(keep=keep)
    table = np.minimum(np.arange(61), np.maximum(1, np.floor(keep * np.arange(61)))).astype(int)
    for images in (1, 2, 3):
        cuts = [[60]] if images == 1 else [[n, 60 - n] for n in range(1, 60)]
        if images == 3:
            cuts = [[1, n, 59 - n] for n in range(1, 59)]
        most = max(sum(table[list(cut)]) for cut in cuts)
        assert most <= policy.remaining(stage=0, vision=60, images=images) <= most + 1


# --- whole models ---------------------------------------------------------------------------------------------------


def class_attention(params, pixels):
    """Head-mean share that the class token gives to each patch in the first block, which is the last that runs."""
    get, tower = reference._array, params.vision
    side, count = tower.config.patch_size, tower.config.grid

    def norm(x, m):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + m.eps) * get(m.weight) + get(m.bias)

    attention = []
    for image in np.asarray(pixels, np.float64):
        patches = [
            np.einsum("cab,dcab->d", image[:, y * side :, x * side :][:, :side, :side], get(tower.patch))
            for y in range(count)
            for x in range(count)
        ]
        h = norm(np.stack([get(tower.class_token), *patches]) + get(tower.position.weight), tower.first_norm)
        block = tower.blocks[0]
        h = norm(h, block.attention_norm)
        q, k = (np.einsum("vd,nhd->vnh", h, get(m.weight)) + get(m.bias) for m in (block.query, block.key))
        logits = np.einsum("nh,vnh->nv", q[0], k) / np.sqrt(q.shape[-1])
        e = np.exp(logits - logits.max(-1, keepdims=True))
        attention.append((e / e.sum(-1, keepdims=True)).mean(0)[1:])
    return np.stack(attention)


def test_class_attention(params, batch):
    given = jax.jit(lambda params, batch: params.embed(batch, (0,)).attention)(params, batch)
    expected = class_attention(params, batch.pixels).ravel()
    for row, index in enumerate(batch.vision_index):
        received = np.asarray(given)[row, 0].mean(axis=0)[index >= 0]
        np.testing.assert_allclose(received, expected[index[index >= 0]], rtol=1e-4)


def test_ivtp_groups_patches_and_then_keeps_what_the_instruction_looks_at():
    """0.6 of the image in groups of means, then twice the square root of (0.3 / 0.6)."""
    policy, step = IVTP(keep=0.3, layers=(1, 2), groups=0.6), (0.3 / 0.6) ** 0.5
    for row, text_follows in ((0, True), (1, True), (2, True), (0, False)):
        tokens, obs, valid, vision, cosine, tower, q, k = prompt(row)
        if not text_follows:  # then the last token judges
            valid = valid & (np.arange(len(valid)) <= np.flatnonzero(vision)[-1])
            tokens, obs = (dataclasses.replace(x, valid=jnp.asarray(valid)) for x in (tokens, obs))
        made, kept = (np.asarray(x) for x in (lambda t, m: (t.x, m))(*group(policy, tokens)))
        count = half_up(0.6, vision.sum())
        mask = best(np.where(vision, tower, -1), count) & vision
        members = {i: [i] for i in np.flatnonzero(mask)}
        for i in np.flatnonzero(vision & ~mask):
            members[max(members, key=lambda j, i=i: cosine[i, j])].append(i)
        np.testing.assert_array_equal(kept, mask | (valid & ~vision))
        for i, some in members.items():
            np.testing.assert_allclose(made[i], np.float64(tokens.x)[some].mean(axis=0), atol=1e-5)
        _, kept = prune(policy, tokens, obs)
        text = np.flatnonzero(valid & (np.arange(len(valid)) > np.flatnonzero(vision)[-1]))
        text = text if len(text) else np.flatnonzero(valid)[-1:]
        weights = np.zeros((len(valid), len(valid)))
        weights[np.ix_(valid, valid)] = attention(q[:, valid], k[:, valid]).mean(axis=0)
        scores = weights[text].sum(axis=0)
        wanted = best(np.where(vision, scores, -1), half_up(step, vision.sum())) & vision
        np.testing.assert_array_equal(kept, wanted | (valid & ~vision))


def test_layers_that_the_model_does_not_have_are_named(params, batch):
    for layers in ((2, 1), (3,)):
        with pytest.raises(vlkv.InputError, match="change layers"):
            read_prompt(params, batch, IVTP(keep=0.3, layers=layers))


# --- towers without a class token -----------------------------------------------------------------------------------


SUMMED = (forms.native, forms.marked, forms.windows)  # a token receives the sum over its patches


@pytest.mark.default("qwen2_5_vl", "eve")
@pytest.mark.parametrize("family", [kind for kind, entry in tiny.TINY.items() if entry.picture in SUMMED])
def test_the_tokens_of_a_picture_receive_the_attention_of_all_its_patches(family):
    """In every block that runs, also in windows: the shares of a picture's tokens add up to 1."""
    params, batch = tiny.make_model(family), tiny.make_batch(family)
    given = jax.jit(lambda params, batch: params.embed(batch, (0, -1)).attention)(params, batch)
    for row in range(2):
        for image in range(batch.grid[row, :, 0].max() + 1):
            total = np.asarray(given)[row, ..., batch.grid[row, :, 0] == image].sum(axis=0)
            np.testing.assert_allclose(total, 1, atol=1e-5)


def test_a_resampled_token_receives_what_the_patches_that_it_reads_receive():
    params, batch = tiny.make_model("qwen"), tiny.make_batch("qwen")

    @jax.jit
    def run(params, batch):
        x, patches = super(type(params.vision), params.vision).with_attention(batch.pixels, (-1,))
        return patches, params.vision.resampler(x)[1], params.embed(batch, (-1,)).attention

    patches, reads, given = run(params, batch)
    reads = np.asarray(reads, np.float64).mean(axis=1)  # [I, token, patch]
    is_vision = batch.is_vision[1]
    wanted = np.einsum("tv,nv->nt", reads[2], np.asarray(patches[0], np.float64)[2])
    np.testing.assert_allclose(np.asarray(given)[1, 0][:, is_vision], wanted, atol=1e-6)
