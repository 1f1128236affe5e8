"""Tiny random InternVLs made by transformers, one padded batch for all tests, and what transformers makes of it."""

from __future__ import annotations

import jax
import numpy as np

import vlkv
from pallas_kernels import prefill_attention
from tests.parity.conftest import perturb, torch, transformers

IMAGE, START, END = 99, 98, 97
SIDE, TOKENS = 56, 16  # pixels of a tile, vision tokens of a tile
STOP = 96

_TEXT = {
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "phi3": transformers.Phi3Config,
}
SMALL_VIT = dict(norm_type="layer_norm", attention_bias=True, use_qk_norm=False)  # as InternViT-300M
LARGE_VIT = dict(norm_type="rms_norm", attention_bias=False, use_qk_norm=True)  # as InternViT-6B


def make_internvl(kind, vision, *, seed=0, tied=False, layer=-1, **changes):
    """A three-layer tower with 64 patches a tile, and a two-layer decoder with grouped heads."""
    vision = transformers.InternVLVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, image_size=SIDE,
        patch_size=7, **vision,
    )  # fmt: skip
    text = _TEXT[kind](
        vocab_size=120, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=tied, **changes,
    )  # fmt: skip
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=TOKENS,
        vision_feature_layer=layer, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.InternVLForConditionalGeneration(config).eval()
    perturb(model, seed)
    return model


def make_batch(seed=0, order=(0, 1, 2)):
    """Three rows: a picture of three tiles and one of one, a picture of one, none. Padded left, right and left."""
    rng = np.random.default_rng(seed)
    rows = []
    for pictures, words in (((3, 1), 12), ((1,), 13), ((), 9)):
        ids = list(rng.integers(3, 90, words))
        for tiles in pictures:
            ids[4:4] = [START, *[IMAGE] * (TOKENS * tiles), END, 7]
        rows.append((ids, sum(pictures)))
    pixels = np.split(rng.normal(size=(5, 3, SIDE, SIDE)).astype(np.float32), [4, 5])
    longest = max(len(ids) for ids, _ in rows)
    ids, mask = np.zeros((3, longest), int), np.zeros((3, longest), int)
    for place, row in enumerate(order):
        start = 0 if row == 1 else longest - len(rows[row][0])
        ids[place, start : start + len(rows[row][0])] = rows[row][0]
        mask[place, start : start + len(rows[row][0])] = 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": np.concatenate([pixels[row] for row in order]),
    }


def single_rows(batch):
    """What transformers gets: each row alone, without padding, with its own tiles."""
    used = 0
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].astype(bool), strict=True):
        tiles = int((ids[mask] == IMAGE).sum()) // TOKENS
        extra = {"pixel_values": torch.tensor(batch["pixel_values"][used : used + tiles])} if tiles else {}
        used += tiles
        yield {"input_ids": torch.tensor(ids[mask][None]), **extra}


@jax.jit
def states_and_logits(params, inputs):
    """The embeddings, the output of every layer, and the logits."""
    x = params.embed(inputs)
    states = [x]
    rotation = params.decoder.rotation(inputs.positions)
    for layer in params.decoder.layers:
        q, k, v = layer.project(x, rotation)
        x = layer.finish(x, prefill_attention(q, k, v, valid=inputs.valid))
        states.append(x)
    return states, params.decoder.logits(x)


def check_forward(model, params, batch):
    """Logits and layer outputs within 1e-4, row by row."""
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    states, logits = states_and_logits(params, inputs)
    width = batch["input_ids"].shape[1]
    spread = []
    for row, alone in enumerate(single_rows(batch)):
        mask = np.pad(batch["attention_mask"][row].astype(bool), (0, states[0].shape[1] - width))
        with torch.no_grad():
            theirs = model(**alone, output_hidden_states=True)
        spread.append(theirs.logits.numpy().ravel())
        np.testing.assert_allclose(np.asarray(logits)[row, mask], theirs.logits[0].numpy(), atol=1e-4)
        for ours, hidden in zip(states[:-1], theirs.hidden_states[:-1], strict=True):  # their last is after the norm
            np.testing.assert_allclose(np.asarray(ours)[row, mask], hidden[0].numpy(), atol=1e-4)
    assert np.concatenate(spread).std() >= 1


def check_generate(model, params, batch, count=32):
    """Greedy tokens of every row equal transformers'."""
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    output = jax.jit(vlkv.generate)(params, inputs, sampling=vlkv.Greedy(max_new_tokens=count, stop=()))
    for row, alone in enumerate(single_rows(batch)):
        length = alone["input_ids"].shape[1]
        tokens = model.generate(
            **alone, attention_mask=torch.ones((1, length), dtype=torch.long), max_new_tokens=count, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        np.testing.assert_array_equal(output.tokens[row], tokens[0, length:].numpy())
