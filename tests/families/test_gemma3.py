"""Gemma 3 with images against transformers in float32: prompts longer than the window, images that see both ways."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import vlkv
from tests.families.common import (
    ParityTests,
    Row,
    answer,
    check_files,
    check_later_turn,
    check_refused,
    check_states,
    extend,
    joined,
    prefill,
    raw_of,
    save,
)
from tests.parity.conftest import perturb, transformers
from vlkv import policies
from vlkv.errors import InputError

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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(make(), tmp_path_factory.mktemp("gemma3"), make_rows())


class TestParity(ParityTests):
    pass


def test_the_direction_within_an_image_matters(saved):
    """Without its token types transformers uses causal attention, which gives other logits."""
    model, _, params, (row, *_) = saved
    causal = Row(row.ids, {"pixel_values": row.extra["pixel_values"]})
    both, one = (answer(model, x)[1] for x in (row, causal))
    assert np.abs(both - one).max() > 0.1
    assert params.decoder.image_block == TOKENS


@pytest.mark.full
def test_rows_without_any_image(saved):
    model, _, params, _ = saved
    rows = [Row(row.ids, {"token_type_ids": row.extra["token_type_ids"]}) for row in make_rows()[2:]]
    rows.append(Row(rows[0].ids[:7], {"token_type_ids": [[0] * 7]}))
    check_states(params, rows, [answer(model, row) for row in rows], "left")


TURNS = make_rows(1)[1], make_rows(2)[0]  # the second is longer, and has two images


@pytest.mark.full
def test_a_later_turn_with_images(saved):
    """Images that are added to the tail and to rings attend in both directions too."""
    check_later_turn(saved[2], TURNS)


def test_tokens_that_are_processed_one_by_one_cannot_contain_an_image(saved):
    """A method that evicts while decoding refuses an image in a later turn."""
    params = saved[2]
    first, second = (vlkv.Inputs.from_hf(joined([row]), params.config) for row in TURNS)
    cache, _ = prefill(params, first, policies.H2O(keep=0.5), new_tokens=60)
    with pytest.raises(InputError, match="image tokens of this model attend to each other in both directions"):
        extend(params, cache, second)


def test_every_file_gives_the_same_parameters(saved, tmp_path):
    check_files(saved, tmp_path)


def test_the_attention_of_a_token_is_the_mean_of_its_patches(saved):
    """It is in the order of the tokens: the embedding of a token follows the patches whose attention it gets."""
    _, _, params, rows = saved
    inputs = vlkv.Inputs.from_hf(joined(rows), params.config)
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
    raw = raw_of(saved[1])
    raw.pop("image_token_id", None)
    check_refused(raw, {field: value}, field, part)
