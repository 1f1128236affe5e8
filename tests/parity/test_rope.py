"""Every kind of rotary scaling against transformers: beyond the length of the first training, and across it."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import vlkv
from vlkv.errors import InputError
from vlkv.families.text.rotary import read_rope

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, rms_norm_eps=1e-5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SECTIONS = {"mrope_section": [2, 3, 3]}
KINDS = {
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": YARN,
    "yarn, mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn, attention factor": YARN | {"attention_factor": 1.3, "rope_theta": 1e6},
}


def save(model, folder):
    """The model with all parameters perturbed, in a folder."""
    model.eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.as_tensor(ids)).logits.numpy()


def generated(model, ids, new):
    with torch.no_grad():
        full = model.generate(
            torch.as_tensor(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return full[:, ids.shape[1] :].numpy()


def ours(params, ids, new):
    return np.asarray(vlkv.generate(params, ids, sampling=vlkv.Greedy(max_new_tokens=new, stop=())).tokens)


@pytest.mark.default("llama3", "yarn, mscale")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_beyond_the_first_length(kind, tmp_path):
    """Prompts of 90 tokens; the first training had 32."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, max_position_embeddings=256, rope_parameters=dict(KINDS[kind]))
    )
    save(model, tmp_path)
    params = vlkv.load_params(tmp_path)
    ids = np.random.default_rng(1).integers(3, 300, (2, 90))
    batch = vlkv.Inputs.from_hf({"input_ids": ids}, params.config)
    got, want = np.asarray(jax.jit(vlkv.forward)(params, batch))[:, :90], logits_of(model, ids)
    assert want.std() > 0.5
    np.testing.assert_allclose(got, want, atol=1e-4 * max(1.0, want.std()))
    np.testing.assert_array_equal(ours(params, batch, 32), generated(model, ids, 32))


TABLES = {**KINDS, "default": {"rope_type": "default", "rope_theta": 1e4},
          "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
                       "short_factor": [1.0 + 0.1 * i for i in range(8)],
                       "long_factor": [2.0 + i for i in range(8)], "factor": 3.0}}  # fmt: skip


@pytest.mark.parametrize("old", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", TABLES)
def test_frequencies_are_those_of_transformers(kind, old):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = dict(TABLES[kind])
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=256, rope_parameters=dict(raw))
    fields = {"max_position_embeddings": 256, "rope_parameters": raw}
    if old:
        theta = raw.pop("rope_theta")
        raw["type"] = raw.pop("rope_type")
        fields = {"max_position_embeddings": 256, "rope_theta": theta, "rope_scaling": raw}
    rope = read_rope(fields, 16)
    plain = rope.theta ** -(np.arange(8) / 8)
    lists = [rope.divisors] if rope.long is None else [rope.divisors, rope.long]
    for divisors, length in zip(lists, (1, 100), strict=False):
        if kind == "default":
            assert divisors is None
            continue
        want, scale = ROPE_INIT_FUNCTIONS[raw.get("rope_type", raw.get("type"))](config, "cpu", seq_len=length)
        np.testing.assert_allclose(plain / np.array(divisors), want.numpy(), rtol=2e-6)
        assert rope.scale == pytest.approx(scale)


@pytest.mark.full
def test_yarn_with_three_position_axes(tmp_path):
    """Qwen2-VL in its form for long contexts: text positions beyond the first length, on all three axes."""
    torch.manual_seed(0)
    rope = {k: v for k, v in YARN.items()} | SECTIONS
    text = SIZES | {"max_position_embeddings": 256, "rope_parameters": rope}
    ids = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    model = transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    )
    save(model, tmp_path)
    params = vlkv.load_params(tmp_path)
    assert params.config.decoder.rope.sections == (2, 3, 3) and params.config.decoder.rope.divisors is not None
    prompt = np.random.default_rng(2).integers(3, 290, (1, 80))
    batch = vlkv.Inputs.from_hf({"input_ids": prompt}, params.config)
    got, want = np.asarray(jax.jit(vlkv.forward)(params, batch))[:, :80], logits_of(model, prompt)
    np.testing.assert_allclose(got, want, atol=1e-4 * max(1.0, want.std()))
    np.testing.assert_array_equal(ours(params, batch, 32), generated(model, prompt, 32))


# --- long-RoPE ----------------------------------------------------------------------------------------------------

FIRST, NEW = 64, 16
LONG = [2.0 + i for i in range(8)]
SHORT = [1.0 + 0.1 * i for i in range(8)]


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    """A Phi-3, our parameters of it, and the same Phi-3 with the long factors at every length."""

    def make(short):
        torch.manual_seed(0)
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": LONG}
        return transformers.Phi3ForCausalLM(
            transformers.Phi3Config(
                **SIZES, original_max_position_embeddings=FIRST, max_position_embeddings=256, rope_parameters=rope
            )
        )

    folder = tmp_path_factory.mktemp("phi")
    model, always_long = save(make(SHORT), folder), make(LONG)
    always_long.eval()
    always_long.load_state_dict(model.state_dict())
    return model, vlkv.load_params(folder), always_long


def prompt_of(length):
    return np.random.default_rng(length).integers(3, 250, (1, length))


@pytest.mark.default("48", "49", "65")
@pytest.mark.parametrize("length", [20, FIRST - NEW, FIRST - NEW + 1, FIRST - 1, FIRST, FIRST + 1, 90])
def test_a_row_has_the_factors_of_its_prompt_and_capacity(phi, length):
    """Where an answer may cross the first length, the long factors hold from the first token, as in vLLM."""
    model, params, always_long = phi
    crosses = length <= FIRST < length + NEW
    ids = prompt_of(length)
    batch = vlkv.Inputs.from_hf({"input_ids": ids}, params.config)
    want = generated(always_long if crosses else model, ids, NEW)
    np.testing.assert_array_equal(ours(params, batch, NEW), want)
    streamed = list(vlkv.stream(params, batch, sampling=vlkv.Greedy(max_new_tokens=NEW, stop=())))
    np.testing.assert_array_equal(np.stack(streamed, axis=1), want)


@pytest.mark.full
def test_rows_of_a_batch_decide_by_themselves(phi):
    model, params, _ = phi
    rows = [prompt_of(20)[0], prompt_of(90)[0]]
    ids, mask = np.zeros((2, 90), int), np.zeros((2, 90), int)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    batch = vlkv.Inputs.from_hf({"input_ids": ids, "attention_mask": mask}, params.config)
    got = ours(params, batch, NEW)
    for row, tokens in enumerate(rows):
        np.testing.assert_array_equal(got[row : row + 1], generated(model, tokens[None], NEW))


def test_scores_and_turns_use_the_same_factors(phi):
    model, params, always_long = phi
    ids, target = prompt_of(60), np.random.default_rng(3).integers(3, 250, (1, NEW))
    batch = vlkv.Inputs.from_hf({"input_ids": ids}, params.config)
    whole = np.concatenate([ids, target], axis=1)
    with torch.no_grad():
        logits = torch.log_softmax(model(torch.as_tensor(whole)).logits, -1).numpy()[0, 59:-1]
    want = logits[np.arange(NEW), target[0]]
    np.testing.assert_allclose(np.asarray(vlkv.score(params, batch, target))[0], want, atol=1e-4)
    cache, _ = vlkv.prefill(params, batch, vlkv.policies.Full(), new_tokens=NEW)
    turn = vlkv.Inputs.from_hf({"input_ids": target[:, :8]}, params.config)
    _, last = vlkv.extend(params, cache, turn)
    np.testing.assert_allclose(
        np.asarray(last)[0], logits_of(always_long, whole[:, :68])[0, -1], atol=1e-4 * max(1.0, float(last.std()))
    )


def test_a_cache_for_short_rows_does_not_grow_beyond_them(phi):
    _, params, _ = phi
    batch = vlkv.Inputs.from_hf({"input_ids": prompt_of(40)}, params.config)
    cache, _ = vlkv.prefill(params, batch, vlkv.policies.Full(), new_tokens=8)
    cache = vlkv.cache.resize(cache, 40)
    turn = vlkv.Inputs.from_hf({"input_ids": prompt_of(30)}, params.config)
    with pytest.raises(InputError, match=r"70 tokens needs long-RoPE's long factors.* at most 64: prefill again"):
        vlkv.extend(params, cache, turn)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_type": "ntk"}, "rope type='ntk' is not supported"),
        ({"factor": None}, "rope_parameters.factor=None must be a positive number"),
        ({"factor": "8"}, "rope_parameters.factor='8' must be a positive number"),
        ({"high_freq_factor": 0.5}, "must be larger than low_freq_factor=1"),
        ({"partial": 1}, "rope_parameters.partial is not supported"),
    ],
)
def test_bad_settings_are_named(change, says):
    with pytest.raises(InputError) as error:
        read_rope({"max_position_embeddings": 256, "rope_parameters": LLAMA3 | change}, 16)
    assert says in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "change"),
    [("Mistral", {"sliding_window": 64}), ("Phi3", {"sliding_window": 64}),
     ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1})],
)  # fmt: skip
def test_a_sliding_window_is_refused_by_name(kind, change, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**SIZES, max_position_embeddings=256, **change)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(InputError, match=r"sliding_(window=64|attention.*) is not supported"):
        vlkv.load_params(tmp_path)
