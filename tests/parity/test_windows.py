"""Models whose layers have sliding windows against transformers, with prompts longer than the window."""

from __future__ import annotations

import numpy as np
import pytest

import vlkv
from tests import programs
from tests.parity.conftest import make_text, torch

WINDOW, PROMPT = 8, 20
MODELS = {
    "mistral": dict(sliding_window=WINDOW),
    "qwen2": dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "phi3": dict(sliding_window=WINDOW),
    "gemma3_text": dict(
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        head_dim=10,
        query_pre_attn_scalar=30,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_theta=5e5,
        rope_local_base_freq=5e3,
    ),
}


def batch(length: int = PROMPT, padding: str = "left") -> dict[str, np.ndarray]:
    """Three rows of which two are padded, one to less than the window."""
    ids = np.random.default_rng(0).integers(3, 99, (3, length)).astype(np.int32)
    counts = np.array([[length], [length - 5], [WINDOW - 2]])
    index = np.arange(length)
    mask = index >= length - counts if padding == "left" else index < counts
    return {"input_ids": np.where(mask, ids, 0), "attention_mask": mask.astype(np.int32)}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """transformers' model and ours."""
    model = make_text(request.param, **MODELS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, vlkv.load_params(folder)


@pytest.mark.default("left")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_logits_at_every_token(pair, padding):
    model, params = pair
    given = batch(padding=padding)
    inputs = vlkv.Inputs.from_hf(given, params.config)
    got = np.asarray(programs.forward(params, inputs))
    for row, mask in enumerate(given["attention_mask"].astype(bool)):
        with torch.no_grad():
            want = model(torch.tensor(given["input_ids"][row][mask][None])).logits[0].numpy()
        ours = got[row][np.asarray(inputs.valid[row])]
        np.testing.assert_allclose(ours, want, atol=1e-4)


@pytest.mark.default("qwen2-left")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_greedy_tokens_of_a_batch(pair, padding):
    model, params = pair
    given = batch(padding=padding)
    inputs = vlkv.Inputs.from_hf(given, params.config)
    output = vlkv.generate(params, inputs, sampling=vlkv.Greedy(max_new_tokens=32, stop=()))
    for row, mask in enumerate(given["attention_mask"].astype(bool)):
        ids = torch.tensor(given["input_ids"][row][mask][None])
        want = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, eos_token_id=None
        )
        np.testing.assert_array_equal(output.tokens[row], want[0, ids.shape[1] :].numpy())
    assert output.slots == vlkv.pool_slots(params, inputs, vlkv.policies.Full(), new_tokens=32)


def test_a_method_has_nothing_to_compress_if_all_layers_have_a_window(pair):
    _, params = pair
    inputs = vlkv.Inputs.from_hf(batch(), params.config)
    policy = vlkv.policies.SnapKV(keep=0.5, scope="all")
    if params.decoder.full_layers:
        output = vlkv.generate(params, inputs, policy=policy, sampling=vlkv.Greedy(max_new_tokens=2))
        assert output.kept.shape[0] == params.decoder.full_layers
        return
    with pytest.raises(vlkv.InputError, match="SnapKV: all layers of this model have a sliding window"):
        vlkv.generate(params, inputs, policy=policy)
