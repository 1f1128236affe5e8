"""Gemma 3 with images against transformers in float32: prompts longer than the window, images that see both ways."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import (
    NEW,
    Row,
    answer,
    check_answers,
    check_batch,
    every_stage,
    joined,
    perturb,
    read,
    transformers,
)
from vlkv import policies
from vlkv.errors import InputError
from vlkv.families import config_from_hf

IMAGE, BEGIN, END = 118, 116, 117
SIDE, PATCH, TOKENS, WINDOW = 28, 7, 4, 6  # 16 patches; an image of 4 tokens


def make(**changes):
    """A two-block tower; five layers, of which the third and the last have full attention."""
    config = transformers.Gemma3Config(
        text_config=dict(
            vocab_size=120, hidden_size=48, intermediate_size=80, num_hidden_layers=5, num_attention_heads=6,
            num_key_value_heads=2, head_dim=10, query_pre_attn_scalar=30, sliding_window=WINDOW,
            max_position_embeddings=256, rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=5e5,
            rope_local_base_freq=5e3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            layer_types=["sliding_attention", *["sliding_attention", "full_attention"] * 2])
        | changes,
        vision_config=dict(model_type="siglip_vision_model", hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                           num_attention_heads=2, image_size=SIDE, patch_size=PATCH, vision_use_head=False),
        mm_tokens_per_image=TOKENS, image_token_index=IMAGE, boi_token_index=BEGIN, eoi_token_index=END,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    perturb(model, 0)
    return model


def make_rows(seed: int = 0, tokens: int = TOKENS) -> list[Row]:
    """Two images; one image; none. All are longer than the window, also the text after the image."""
    rng, rows = np.random.default_rng(seed), []
    for images, words in ((2, 12), (1, 19), (0, 15)):
        ids = rng.integers(3, 110, words).tolist()
        for _ in range(images):
            ids[2:2] = [BEGIN, *[IMAGE] * tokens, END, 5]
        kinds = [[int(token == IMAGE) for token in ids]]
        pixels = list(rng.normal(size=(images, 3, SIDE, SIDE)).astype(np.float32))
        rows.append(Row(ids, {"token_type_ids": kinds, **({"pixel_values": pixels} if images else {})}))
    return rows


def batch_of(rows: list[Row], padding: str = "right") -> dict:
    """Without the token types, which we do not need."""
    pictures = [Row(row.ids, {k: v for k, v in row.extra.items() if k != "token_type_ids"}) for row in rows]
    return joined(pictures, padding)


def check_states(params, rows, answers, padding: str = "right") -> vlkv.Inputs:
    """Layers and logits of a batch within 1e-4 of transformers' on each row alone."""
    inputs = check_batch(params, batch_of(rows, padding), answers)
    np.testing.assert_allclose(jax.jit(vlkv.forward)(params, inputs), read(params, inputs)[1], atol=1e-5)
    return inputs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    model = make()
    model.save_pretrained(folder)
    return model, folder, vlkv.load_params(folder)


@pytest.mark.default("left")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_layers_and_logits_of_a_batch(saved, padding):
    model, _, params = saved
    rows = make_rows()
    check_states(params, rows, [answer(model, row) for row in rows], padding)


def test_the_direction_within_an_image_matters(saved):
    """Without its token types transformers uses causal attention, which gives other logits."""
    model, _, params = saved
    row = make_rows()[0]
    causal = Row(row.ids, {"pixel_values": row.extra["pixel_values"]})
    both, one = (answer(model, x)[1] for x in (row, causal))
    assert np.abs(both - one).max() > 0.1
    assert params.decoder.image_block == TOKENS


@pytest.mark.full
def test_greedy_tokens(saved):
    model, _, params = saved
    rows = make_rows()
    inputs = vlkv.Inputs.from_hf(batch_of(rows, "left"), params.config)
    check_answers(params, inputs, [answer(model, row, NEW) for row in rows])


@pytest.mark.full
def test_rows_without_any_image(saved):
    model, _, params = saved
    rows = [Row(row.ids, {"token_type_ids": row.extra["token_type_ids"]}) for row in make_rows()[2:]]
    rows.append(Row(rows[0].ids[:7], {"token_type_ids": [[0] * 7]}))
    check_states(params, rows, [answer(model, row) for row in rows], "left")


@pytest.mark.full
def test_a_row_is_answered_alike_whatever_its_neighbours(saved):
    _, _, params = saved
    run, sampling = jax.jit(vlkv.generate), vlkv.Greedy(max_new_tokens=6, stop=())
    rows = make_rows()
    first, second = (
        np.asarray(run(params, vlkv.Inputs.from_hf(batch_of(order), params.config), policy=every_stage(),
                       sampling=sampling).tokens)
        for order in (rows, rows[::-1])
    )  # fmt: skip
    np.testing.assert_array_equal(first, second[::-1])
    assert len(np.unique(first)) > 2


def later_turn(params):
    """A prompt, a longer turn with two images, and both as one prompt."""
    first, second = make_rows(1)[1], make_rows(2)[0]
    pixels = first.extra["pixel_values"] + second.extra["pixel_values"]
    whole = Row(first.ids + second.ids, {"pixel_values": pixels})
    return (vlkv.Inputs.from_hf(batch_of([row]), params.config) for row in (first, second, whole))


@pytest.mark.full
def test_a_later_turn_with_images(saved):
    """Images that are added to the tail and to rings attend in both directions too."""
    _, _, params = saved
    first, second, both = later_turn(params)
    cache, _ = jax.jit(vlkv.prefill, static_argnames="new_tokens")(
        params, first, policies.Full(), new_tokens=second.tokens.shape[1]
    )
    _, logits = jax.jit(vlkv.extend)(params, cache, second)
    wanted = np.asarray(jax.jit(vlkv.forward)(params, both))[0, both.valid[0]][-1]
    np.testing.assert_allclose(logits[0], wanted, atol=1e-4)


def test_tokens_that_are_processed_one_by_one_cannot_contain_an_image(saved):
    """A method that evicts while decoding refuses an image in a later turn."""
    _, _, params = saved
    first, second, _ = later_turn(params)
    cache, _ = jax.jit(vlkv.prefill, static_argnames="new_tokens")(params, first, policies.H2O(keep=0.5), new_tokens=60)
    with pytest.raises(InputError, match="image tokens of this model attend to each other in both directions"):
        vlkv.extend(params, cache, second)


def test_every_file_gives_the_same_parameters(saved, tmp_path):
    model, folder, params = saved
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    convert(folder, tmp_path / "converted", progress=False)
    for other in ("sharded", "converted"):
        made = vlkv.load_params(tmp_path / other)
        assert made.config == params.config
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(made), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_attention_of_a_token_is_the_mean_of_its_patches(saved):
    """It is in the order of the tokens: the embedding of a token follows the patches whose attention it gets."""
    _, _, params = saved
    inputs = vlkv.Inputs.from_hf(batch_of(make_rows()), params.config)
    given = np.asarray(jax.jit(lambda params, inputs: params.embed(inputs, (-1,)).attention)(params, inputs))
    window = (SIDE // PATCH) ** 2 // TOKENS
    for row, images in enumerate((2, 1)):
        each = given[row, 0][:, inputs.is_vision[row]].reshape(2, images, TOKENS)
        np.testing.assert_allclose(window * each.sum(axis=-1), 1, atol=1e-5)
        assert each.std(axis=-1).min() > 1e-4


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        (None, "mm_tokens_per_image", 5),
        (None, "mm_tokens_per_image", 9),
        (None, "mm_tokens_per_image", 0),
        (None, "image_token_index", "<image>"),
        ("vision_config", "hidden_act", "gelu"),
        ("vision_config", "model_type", "clip_vision_model"),
        ("text_config", "model_type", "gemma2"),
        ("text_config", "final_logit_softcapping", 30.0),
        ("text_config", "use_bidirectional_attention", True),
    ],
)
def test_what_is_not_supported_is_refused_by_name(saved, part, field, value):
    raw = json.loads((saved[1] / "config.json").read_text())
    raw.pop("image_token_id", None)
    (raw if part is None else raw[part])[field] = value
    with pytest.raises(InputError, match=field):
        config_from_hf(raw)
