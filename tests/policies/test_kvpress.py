"""Methods against the logits of kvpress' presses (tests/golden/kvpress_logits.py)."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import vlkv
from tests import programs
from tests.golden import kvpress_logits as golden
from vlkv import analysis, policies

SAME = {"budget": golden.KEPT, "scope": "all"}
WINDOW = {"window": 8, "kernel": 5, "pooling": "avg"}
METHODS = {
    "snapkv": policies.SnapKV(**SAME, **WINDOW),
    # kvpress' beta is 4, because its budgets contain the window: 48 / 4 = (48 - 6) / 7 + 6.
    "pyramidkv": policies.PyramidKV(**SAME, **WINDOW | {"window": 6}, beta=7),
    "streamingllm": policies.StreamingLLM(**SAME),
    "tova": policies.TOVA(**SAME, recent=1, evict=False),
    "knorm": policies.Knorm(**SAME),
    "keydiff": policies.KeyDiff(**SAME),
    "observed": policies.RoCo(**SAME, recent=0, spread=0.0, evict=False),  # the mean attention of the later rows
    "adakv": policies.AdaKV(**SAME, **WINDOW, safeguard=0.0),
    "expectedattention": policies.ExpectedAttention(**SAME, ahead=64),
    "criticalkv": policies.CriticalKV(**SAME, **WINDOW),
    "kvzip": policies.KVzip(**SAME, instruction=golden.INSTRUCTION),
}


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(golden.CONFIG))
    save_file(golden.weights(), folder / "model.safetensors")
    return vlkv.load_params(folder, dtype="float32")


@pytest.mark.default("criticalkv")
@pytest.mark.ci("expectedattention", "criticalkv")
@pytest.mark.parametrize("name", METHODS)
def test_logits_are_those_of_the_press(params, name):
    found, ids = np.load(golden.FILE), golden.tokens()
    prompt = {"input_ids": ids[None, : golden.PROMPT], "attention_mask": np.ones((1, golden.PROMPT), int)}
    inputs = vlkv.Inputs.from_hf(prompt, params.config)
    cache, _ = programs.prefill(params, inputs, METHODS[name], new_tokens=golden.NEW)
    step, logits = programs.decode_step, []
    for token in ids[golden.PROMPT :]:
        cache, out = step(params, cache, np.array([token]))
        logits.append(out[0])
    np.testing.assert_allclose(np.array(logits), found[name], atol=1e-4)
    if name not in ("adakv", "kvzip"):  # kvpress masks what it evicts
        np.testing.assert_array_equal(np.asarray(cache.counts)[:, 0, 0], found[f"{name}_entries"])


def test_scores_of_kvzip_are_those_of_the_press(params):
    """Those of the sinks are set to the largest one later, so they are not compared."""
    prompt = {"input_ids": golden.tokens()[None, : golden.PROMPT]}
    policy = METHODS["kvzip"]
    read = programs.read_prompt(params, vlkv.Inputs.from_hf(prompt, params.config), policy)
    scores = jax.jit(analysis.choose)(read, policy).scores[0, ..., policy.sinks : golden.PROMPT]
    np.testing.assert_allclose(scores, np.load(golden.FILE)["kvzip_scores"][..., policy.sinks :], rtol=1e-4, atol=1e-5)
