"""Every kind of rotary scaling against transformers: beyond the length of the first training, and across it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.models import padded
from tests.parity.conftest import torch, transformers
from vlkv.analysis import oracle_cache
from vlkv.errors import InputError
from vlkv.families import qwen2_vl
from vlkv.families.decoders.kinds import KINDS as DECODERS
from vlkv.families.decoders.rotary import read_rope
from vlkv.generation import jitted
from vlkv.generation.decode import check_positions, decode_steps
from vlkv.generation.score import log_probabilities

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
    model.eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def generated(model, ids, new):
    with torch.no_grad():
        full = model.generate(
            torch.as_tensor(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return full[:, ids.shape[1] :].numpy()


def ours(params, ids, new):
    return np.asarray(programs.generate(params, ids, sampling=vlkv.Greedy(max_new_tokens=new, stop=())).tokens)


LONG = [2.0 + i for i in range(8)]
SHORT = [1.0 + 0.1 * i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "short_factor": SHORT,
            "long_factor": LONG, "factor": 3.0}  # fmt: skip
TABLES = {**KINDS, "default": {"rope_type": "default", "rope_theta": 1e4}, "longrope": LONGROPE}


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


def test_yarn_with_three_position_axes():
    """Qwen2-VL in its form for long contexts: the divisors of yarn, on all three axes."""
    fields = {"max_position_embeddings": 256}
    rope, plain = (read_rope(fields | {"rope_parameters": kind}, 16) for kind in (YARN | SECTIONS, YARN))
    assert rope.axes == (0, 0, 1, 1, 1, 2, 2, 2)
    assert (rope.divisors, rope.scale) == (plain.divisors, plain.scale) and rope.divisors is not None


# --- long-RoPE ----------------------------------------------------------------------------------------------------

FIRST, NEW = 64, 16


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    """A Phi-3, its parameters, and the same Phi-3 with the long factors at every length."""

    def make(short):
        torch.manual_seed(0)
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": LONG}
        config = transformers.Phi3Config(
            **SIZES, original_max_position_embeddings=FIRST, max_position_embeddings=256, rope_parameters=rope
        )
        return transformers.Phi3ForCausalLM(config)

    folder = tmp_path_factory.mktemp("phi")
    model, always_long = save(make(SHORT), folder), make(LONG)
    always_long.eval()
    always_long.load_state_dict(model.state_dict())
    return model, vlkv.load_params(folder), always_long


def prompt_of(length):
    return np.random.default_rng(length).integers(3, 250, (1, length))


@pytest.mark.default("49")
@pytest.mark.parametrize("length", [20, FIRST - NEW, FIRST - NEW + 1, FIRST - 1, FIRST, FIRST + 1, 90])
def test_a_row_has_the_factors_of_its_prompt_and_capacity(phi, length):
    """Where an answer may cross the first length, the long factors hold from the first token, as in vLLM."""
    model, params, always_long = phi
    crosses = length <= FIRST < length + NEW
    ids = prompt_of(length)
    batch = vlkv.Inputs.from_hf({"input_ids": ids}, params.config)
    np.testing.assert_array_equal(ours(params, batch, NEW), generated(always_long if crosses else model, ids, NEW))


@pytest.mark.full
def test_rows_of_a_batch_decide_by_themselves(phi):
    model, params, _ = phi
    rows = [prompt_of(20)[0], prompt_of(90)[0]]
    batch = vlkv.Inputs.from_hf(padded(rows), params.config)
    got = ours(params, batch, NEW)
    for row, tokens in enumerate(rows):
        np.testing.assert_array_equal(got[row : row + 1], generated(model, tokens[None], NEW))


@pytest.fixture
def short_cache(phi):
    """A cache for at most FIRST tokens, resized so that its rows may have more."""
    _, params, _ = phi
    batch = vlkv.Inputs.from_hf({"input_ids": prompt_of(40)}, params.config)
    cache, logits = jitted.prefill(params, batch, vlkv.policies.Full(), new_tokens=8)
    return params, vlkv.cache.resize(cache, 40), logits


def test_new_tokens_beyond_the_rotation_are_refused(short_cache):
    params, cache, logits = short_cache
    says = r"need long-RoPE's long factors, but the keys are rotated for at most 64 tokens: prefill again"
    for decode in (vlkv.decode, lambda *a, **b: list(decode_steps(*a, **b))):
        with pytest.raises(InputError, match="65 tokens " + says):
            decode(params, cache, logits, sampling=vlkv.Greedy(max_new_tokens=26))
    with pytest.raises(InputError, match="65 tokens " + says):
        log_probabilities(params, cache, logits, np.zeros((1, 26), np.int32))
    with pytest.raises(InputError, match="70 tokens " + says):
        vlkv.extend(params, cache, vlkv.Inputs.from_hf({"input_ids": prompt_of(30)}, params.config))
    at_the_end = dataclasses.replace(cache, next_position=cache.next_position + 24)
    with pytest.raises(InputError, match="65 tokens " + says):
        vlkv.decode_step(params, at_the_end, jnp.array([5]))
    last = dataclasses.replace(params.config.decoder, max_positions=40)
    with pytest.raises(InputError, match="would have 41 tokens, the model's limit is 40"):
        check_positions(dataclasses.replace(params.config, decoder=last), cache, 1)


def test_a_prompt_makes_no_cache_for_more_tokens_than_it_was_read_for(phi):
    _, params, _ = phi
    batch = vlkv.Inputs.from_hf({"input_ids": prompt_of(40)}, params.config)
    prompt = jitted.read_prompt(params, batch, new_tokens=24)
    evidence, key = np.zeros(prompt.valid.shape, bool), jax.random.key(0)
    for fill in (
        lambda new: vlkv.fill_cache(prompt, vlkv.policies.Full(), new_tokens=new),
        lambda new: oracle_cache(prompt, evidence, vlkv.policies.ImgRandom(keep=1.0), new_tokens=new, key=key),
    ):
        with pytest.raises(InputError, match="65 tokens need long-RoPE's long factors"):
            fill(25)


@pytest.mark.parametrize(("settings", "says"), [
    (LLAMA3 | {"rope_type": "ntk"}, "rope type='ntk' is not supported"),
    (LLAMA3 | {"factor": None}, "rope_parameters.factor=None must be a number greater than 0"),
    (LLAMA3 | {"factor": float("nan")}, "rope_parameters.factor=nan must be a number greater than 0"),
    (LLAMA3 | {"factor": 10**400}, "must be a number greater than 0"),
    (LLAMA3 | {"high_freq_factor": 0.5}, "must be larger than low_freq_factor=1"),
    (LLAMA3 | {"partial": 1}, "rope_parameters.partial is not supported"),
    (LLAMA3 | {"rope_theta": "abc"}, "rope_parameters.rope_theta='abc' must be a number greater than 1"),
    (YARN | {"rope_theta": 1}, "rope_parameters.rope_theta=1 must be a number greater than 1"),
    (YARN | {"attention_factor": "x"}, "rope_parameters.attention_factor='x' must be a number greater than 0"),
    (YARN | {"truncate": "no"}, "rope_parameters.truncate='no' is not supported"),
    (LLAMA3 | {"original_max_position_embeddings": "x"}, "embeddings='x' must be a whole number"),
    (LONGROPE | {"original_max_position_embeddings": 1}, "original_max_position_embeddings=1 must be a number"),
    (LONGROPE | {"short_factor": [1] * 7 + [0]}, "rope_parameters.short_factor[7]=0 must be a number greater than"),
    (LONGROPE | {"long_factor": [-1] + [1] * 7}, "rope_parameters.long_factor[0]=-1 must be a number greater than"),
    (LONGROPE | {"long_factor": [1] * 7}, "rope_parameters.long_factor has 7 numbers, 16 channels need 8"),
    (LONGROPE | SECTIONS, "rope type='longrope' is not supported with mrope_section"),
    ({"rope_type": "dynamic", "factor": 2.0} | SECTIONS, "rope type='dynamic' is not supported with mrope_section"),
    (LLAMA3 | {"rope_type": "mrope"}, "rope_parameters.mrope_section is missing"),
    (LLAMA3 | {"mrope_section": 8}, "rope_parameters.mrope_section=8 must be three whole numbers"),
    (LLAMA3 | {"mrope_section": ["a", 3, 3]}, "must be three whole numbers that add up to half of 16 channels"),
])  # fmt: skip
def test_bad_settings_are_named(settings, says):
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(InputError) as error:
            read_rope({"max_position_embeddings": 256, name: settings}, 16)
        assert says in str(error.value) and len(str(error.value)) <= 200


def test_bad_fields_around_the_settings_are_named():
    for fields, says in (
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        ({"rope_scaling": []}, r"rope_scaling=\[\] must be an object"),
        ({"rope_theta": "abc"}, "rope_theta='abc' must be a number greater than 1"),
    ):
        with pytest.raises(InputError, match=says):
            read_rope({"max_position_embeddings": 256} | fields, 16)


# --- sliding windows ----------------------------------------------------------------------------------------------

USED, FULL, SLIDING = {"use_sliding_window": True}, "full_attention", "sliding_attention"
WINDOWS = [
    ("qwen2", {}), ("qwen2", USED), ("qwen2", USED | {"num_hidden_layers": 29}),
    ("qwen2", USED | {"max_window_layers": 1}), ("qwen2", USED | {"max_window_layers": 3}),
    ("qwen2", USED | {"max_window_layers": 0, "sliding_window": None}), ("qwen2", {"sliding_window": 8}),
    ("qwen2", USED | {"layer_types": [FULL] * 3}), ("qwen2", USED | {"layer_types": [FULL, SLIDING, FULL]}),
    ("qwen2_vl_text", USED | {"num_hidden_layers": 80}), ("qwen2_vl_text", USED | {"num_hidden_layers": 81}),
    ("mistral", {}), ("mistral", {"sliding_window": None}), ("phi3", {}), ("phi3", {"sliding_window": 64}),
    ("qwen2", {"sliding_window": 8, "max_window_layers": 1}), ("qwen3", USED | {"max_window_layers": 1}),
    ("qwen3_moe", USED | {"sliding_window": 8}), ("qwen3_moe", {"sliding_window": 8}), ("llama", USED),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change"), WINDOWS, ids=str)
def test_windows_are_those_of_transformers(kind, change):
    fields = SIZES | {"max_position_embeddings": 8192} | change
    config = transformers.AutoConfig.for_model(kind, **fields)
    layers, window = fields["num_hidden_layers"], getattr(config, "sliding_window", None)
    every = (SLIDING if window is not None else FULL,) * layers
    types = config.layer_types if kind.startswith(("qwen2", "qwen3")) and kind != "qwen3_moe" else every
    want = tuple(window if kind == SLIDING else None for kind in types) if SLIDING in types else ()
    read = DECODERS.get(kind, qwen2_vl.DECODERS["qwen2_vl"]).read
    sections = {"rope_scaling": {"type": "mrope", **SECTIONS}} if kind not in DECODERS else {}
    for raw in (fields | sections, config.to_dict()):
        assert read(raw).windows == want
    if want:
        assert read(fields | sections | {"sliding_window": 8192}).windows == ()  # longer than any prompt


# --- Gemma 3 ---------------------------------------------------------------------------------------------------------

GEMMA3 = SIZES | {"max_position_embeddings": 256, "sliding_window": 8}


@pytest.mark.parametrize(("kind", "change", "says"), [
    ("qwen2", {"layer_types": [FULL]}, "layer_types must be a list of 3 layers, .*, not 1 layers"),
    ("qwen2", {"layer_types": ["linear_attention"] * 3}, "list of 3 layers, .*, not 'linear_attention'"),
    ("qwen2", {"layer_types": FULL}, "layer_types must be a list of 3 layers, .*, not 'full_attention'"),
    ("qwen2", USED | {"max_window_layers": "x"}, "max_window_layers='x' must be a whole number"),
    ("qwen2", USED | {"max_window_layers": 1, "sliding_window": 0}, "sliding_window=0 must be a whole number of at l"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "must have full_attention and sliding_attention"),
    ("gemma3_text", {"rope_parameters": {SLIDING: {"rope_type": "yarn", "factor": 2.0}}},
     "rope_type of sliding_attention='yarn'"),
])  # fmt: skip
def test_settings_of_windows_that_are_refused(kind, change, says):
    with pytest.raises(InputError, match=says):
        DECODERS[kind].read((GEMMA3 if kind == "gemma3_text" else SIZES) | change)
