"""Gemma 3 with images against transformers in float32: prompts longer than the window, images that see both ways."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.families.common import (
    NEW,
    Row,
    answer,
    check_answers,
    joined,
    perturb,
    transformers,
)
from vlkv.decoder import attend_to_prompt

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


@jax.jit
def read(params, inputs):
    """The input of the first layer, the output of every layer, and the logits."""
    embedded, states = params.embed(inputs).x, []
    until = params.decoder.until(inputs.is_vision)
    attend = attend_to_prompt(params.decoder, inputs.valid, until)
    _, x = params.decoder.walk(
        None, embedded, inputs.positions, attend, lambda i, carry, x: (states.append(x), x, None)
    )
    return jnp.stack([embedded, *states]), params.decoder.logits(x)


def check_states(params, rows, answers, padding: str = "right") -> vlkv.Inputs:
    """Layers and logits of a batch within 1e-4 of transformers' on each row alone."""
    batch = batch_of(rows, padding)
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    states, logits = (np.asarray(x) for x in read(params, inputs))
    mask = np.asarray(batch["attention_mask"], bool)
    for i, (hidden, theirs, _) in enumerate(answers):
        for ours, wanted in zip(states[:-1], hidden[:-1], strict=True):  # transformers' last state is after the norm
            np.testing.assert_allclose(ours[i, : mask.shape[1]][mask[i]], wanted, atol=1e-4)
        np.testing.assert_allclose(logits[i, : mask.shape[1]][mask[i]], theirs, atol=1e-4)
    assert np.concatenate([theirs for _, theirs, _ in answers]).std() >= 1
    np.testing.assert_allclose(jax.jit(vlkv.forward)(params, inputs), logits, atol=1e-5)
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


def test_greedy_tokens(saved):
    model, _, params = saved
    rows = make_rows()
    inputs = vlkv.Inputs.from_hf(batch_of(rows, "left"), params.config)
    check_answers(params, inputs, [answer(model, row, NEW) for row in rows])
