"""What all public functions accept: a transformers batch as inputs, keys of both kinds, and numbers of numpy."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.families import tiny
from tests.models import CONFIG, IMAGE_TOKEN, SMALL, padded
from vlkv import analysis, policies
from vlkv.analysis import profiles
from vlkv.mini import CHECKPOINT

pytestmark = pytest.mark.usefixtures("shapes_for_arrays")  # which switches the types of arguments off
SHORT = vlkv.Greedy(max_new_tokens=2, stop=())
SNAPKV, RANDOM = policies.SnapKV(keep=0.3), policies.Random(keep=0.5)
BATCH = {
    "input_ids": [[1, *[IMAGE_TOKEN] * 25, 9, 8, 7]],
    "attention_mask": np.ones((1, 29)),
    "pixel_values": np.random.default_rng(0).normal(size=(1, 3, 20, 20)).astype(np.float32),
    "labels": [["ignored"]],
}
TEXT = {"input_ids": [[9, 8, 7]]}
IDS = jnp.array([[5, 6]])


@pytest.fixture(scope="module")
def cache(params):
    inputs = vlkv.Inputs.from_hf(BATCH, CONFIG)
    return jax.eval_shape(lambda params: vlkv.prefill(params, inputs, SNAPKV, new_tokens=64), params)[0]


# The public functions of inputs that jax can trace, and those that run on the host.
TRACED = {
    "generate": lambda params, cache, batch: vlkv.generate(params, batch, policy=SNAPKV, sampling=SHORT),
    "forward": lambda params, cache, batch: vlkv.forward(params, batch),
    "prefill": lambda params, cache, batch: vlkv.prefill(params, batch, SNAPKV, new_tokens=2),
    "read_prompt": lambda params, cache, batch: vlkv.read_prompt(params, batch),
    "score": lambda params, cache, batch: vlkv.score(params, batch, IDS),
    "extend": vlkv.extend,
    "kl_to_full": lambda params, cache, batch: vlkv.kl_to_full(params, batch, SNAPKV, sampling=SHORT),
    "curves": lambda params, cache, batch: profiles.curves(params, batch, policies.PrefixKV(keep=0.3)),
}
ON_HOST = {
    "stream": lambda params, batch: next(vlkv.stream(params, batch, sampling=SHORT)),
    "merged_into": lambda params, batch: analysis.merged_into(params, batch, policies.LightKV()),
    "measure": lambda params, batch: profiles.measure(params, [batch], policies.PrefixKV(keep=0.3)),
    "cross_share": lambda params, batch: profiles.cross_share(params, [batch], policies.CSP(keep=0.3)),
    "draw_survivors": lambda params, batch: vlkv.draw_survivors(params, batch, np.zeros((9, 9, 3), np.uint8), [SNAPKV]),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_transformers_batch_is_an_input(params, cache, name):
    """Traced, which compiles nothing: the result has the shapes that it has for `Inputs`. Under jit it is refused."""
    inputs, call = vlkv.Inputs.from_hf(BATCH, CONFIG), TRACED[name]
    shapes = jax.eval_shape(
        lambda params, cache: (call(params, cache, BATCH), call(params, cache, inputs)), params, cache
    )
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    arrays = {name: np.asarray(value) for name, value in BATCH.items() if name != "labels"}
    with pytest.raises(vlkv.InputError, match=r"batch under jit cannot be used here; .*outside jit with vlkv\.Inputs"):
        jax.eval_shape(call, params, cache, arrays)


@pytest.mark.parametrize("name", ON_HOST)
def test_a_transformers_batch_is_converted_on_the_host(params, name, monkeypatch):
    class Converted(Exception):
        """Raised by the conversion, so that the model does not run."""

    def convert(batch, config):
        assert batch is BATCH and config is params.config
        raise Converted

    monkeypatch.setattr(vlkv.Inputs, "from_hf", convert)
    with pytest.raises(Converted):
        ON_HOST[name](params, BATCH)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"input_ids": [[1.0, 9.0]]}, r"input_ids must be whole numbers \[B, T\], not float64 \[1, 2\]"),
        ({"input_ids": [["a", "b"]]}, "input_ids must be whole numbers"),
        ({"input_ids": [[[1, 9]]]}, "input_ids must be whole numbers"),
        ({"input_ids": [[1, 2**32 + 9]]}, "a token id is outside the vocabulary of 50"),
        ({"input_ids": [[1, 9], [1]]}, "input_ids: rows differ in length"),
        ({"input_ids": np.zeros((1, 0))}, "a prompt of the batch is empty"),
        ({"attention_mask": [[0.0, -1e9]]}, "attention_mask must be 1 for tokens and 0 for padding"),
        ({"attention_mask": [[1, 2]]}, "attention_mask must be 1 for tokens and 0 for padding"),
        ({"attention_mask": [[1], [1, 1]]}, "attention_mask: rows differ in length"),
        ({"pixel_values": "page.png"}, "inputs are not arrays of numbers"),
        ({"pixel_values": [[1.0, 2.0], [1.0]]}, "inputs are not arrays of numbers"),
    ],
)
def test_batches_that_are_no_numbers_are_refused_in_a_line(changes, says):
    with pytest.raises(vlkv.InputError, match=says) as error:
        vlkv.Inputs.from_hf({"input_ids": [[1, 9]], **changes}, CONFIG)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 200


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_vl"])
def test_other_ends_are_those_of_another_prompt(family):
    """Against the conversion of the other prompt, with rows of unequal length; positions of M-RoPE too."""
    config, rng = tiny.read_config(family), np.random.default_rng(0)
    picture = tiny.TINY[family].picture(config, rng, 1, True)
    image = [config.image_token] * picture.tokens
    begin, ends = [[5, *image, 7, 8], [5, 6, 7]], [np.arange(20, 60), np.array([30])]

    def inputs(*ends):
        rows = padded([[*ids, *end] for ids, end in zip(begin, ends, strict=True)])
        made = vlkv.Inputs.from_hf({**rows, **picture.extra}, config)
        return dataclasses.replace(made, positions=made.positions * made.valid[..., None])  # those of padding are free

    made, wanted = inputs([12, 13], [14]).with_ends([2, 1], ends), inputs(*ends)
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, made, wanted)
    with pytest.raises(vlkv.InputError, match="would lose an image token"):
        made.with_ends([43, 0], [np.array([1])] * 2)
    with pytest.raises(vlkv.InputError, match="or all its tokens"):
        made.with_ends([0, 4], [np.array([1])] * 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [(policies.SnapKV, "policy=SnapKV is a class: "), ("snapkv", "policy='snapkv' is a name: ")],
)
def test_what_is_no_policy_is_refused(params, given, says):
    inputs = vlkv.Inputs.from_hf(BATCH, CONFIG)
    for run in (
        lambda: vlkv.generate(params, inputs, policy=given),
        lambda: next(vlkv.stream(params, inputs, policy=given)),
        lambda: vlkv.score(params, inputs, IDS, given),
        lambda: vlkv.prefill(params, inputs, given, new_tokens=1),
        lambda: vlkv.read_prompt(params, inputs, given),
        lambda: policies.select(given, *QKV),
        lambda: policies.compose(given, store=policies.KIVI),
        *([lambda: jax.jit(vlkv.generate)(params, inputs, policy=given)] if given is policies.SnapKV else []),
    ):
        with pytest.raises(vlkv.InputError) as error:
            run()
        assert str(error.value).startswith(says) and "keep=0.1)" in str(error.value)
        assert "\n" not in str(error.value)


def test_64_bits_are_refused(params, cache):
    inputs = vlkv.Inputs.from_hf(BATCH, CONFIG)
    with jax.enable_x64(True):
        for run in (
            lambda: vlkv.generate(params, inputs, policy=policies.H2O(keep=0.5)),
            lambda: programs.generate(params, inputs, policy=policies.AirCache(keep=0.5)),
            lambda: policies.select(policies.PrefixKV(keep=0.5), *QKV),
            lambda: jax.eval_shape(vlkv.decode_step, params, cache, np.array([7], np.int32)),
        ):
            with pytest.raises(vlkv.InputError, match="switch jax_enable_x64 off"):
                run()


def test_pieces_are_those_of_one_row():
    processor = vlkv.load_processor(CHECKPOINT)
    rows = np.stack([processor.tokenizer.encode(text, add_special=False) for text in ("4 2", "7 9")])
    steps = list(rows.T)  # as `stream` yields them
    with pytest.raises(vlkv.InputError, match=r"pieces are of one row, and this is int32 \[2\]: of row i of a batch"):
        next(processor.pieces(steps))
    with pytest.raises(vlkv.InputError, match=r"this is float64 \[\]"):
        next(processor.pieces([1.0]))
    assert "".join(processor.pieces(tokens[1] for tokens in steps)) == "7 9"
    assert "".join(processor.pieces(tokens[:1] for tokens in steps)) == "4 2"


# --- keys -----------------------------------------------------------------------------------------------------------

KEYS = {
    "generate": lambda params, key: vlkv.generate(params, TEXT, policy=RANDOM, sampling=SHORT, key=key),
    "stream": lambda params, key: next(vlkv.stream(params, TEXT, policy=RANDOM, sampling=SHORT, key=key)),
    "score": lambda params, key: vlkv.score(params, TEXT, IDS, RANDOM, key=key),
    "prefill": lambda params, key: vlkv.prefill(params, TEXT, RANDOM, key=key),
    "read_prompt": lambda params, key: vlkv.read_prompt(params, TEXT, key=key),
    "fill_cache": lambda params, key: vlkv.fill_cache(None, RANDOM, new_tokens=2, key=key),
    "decode": lambda params, key: vlkv.decode(params, None, IDS, sampling=SHORT, key=key),
    "Chat": lambda params, key: vlkv.Chat(params, object.__new__(vlkv.processing.Processor), key=key),
    "kl_to_full": lambda params, key: vlkv.kl_to_full(params, TEXT, RANDOM, key=key),
    "select": lambda params, key: policies.select(RANDOM, *QKV, key=key),
    "compress": lambda params, key: policies.compress(RANDOM, *QKV, key=key),
    "choose": lambda params, key: analysis.choose(NO_PROMPT, RANDOM, key=key),
    "oracle_cache": lambda params, key: analysis.oracle_cache(None, None, None, new_tokens=2, key=key),
    "init": lambda params, key: vlkv.init(SMALL, key),
}
NO_PROMPT = types.SimpleNamespace(reducer=None, layers=())
QKV = (np.zeros((1, 1, 4, 2)), np.zeros((1, 1, 4, 2)), np.zeros((1, 1, 4, 2)), np.zeros(4, bool))


@pytest.mark.parametrize("name", KEYS)
def test_what_is_no_key_is_refused_before_anything_runs(params, name):
    for key, says in (
        (0, "key 0 is not a random key: pass key=jax.random.key(seed)"),
        (np.int64(3), "key of type int64 is not a random key: pass key=jax.random.key(seed)"),
        (jnp.zeros(2), "key of float32 [2] is not a random key: pass key=jax.random.key(seed)"),
        (jnp.zeros(3, jnp.uint32), "key of uint32 [3] is not a random key: pass key=jax.random.key(seed)"),
        (jax.random.split(jax.random.key(0), 3), "key has shape [3]: pass one key, key=jax.random.key(seed), for"),
        (jax.random.split(jax.random.PRNGKey(0), 3), "key has shape [3, 2]: pass one key"),
    ):
        with pytest.raises(vlkv.InputError) as error:
            KEYS[name](params, key)
        assert str(error.value).startswith(says) and len(str(error.value)) <= 200


def test_raw_keys_draw_the_same_numbers_and_other_keys_others():
    q = np.zeros((1, 1, 40, 2))
    first, raw, other = (
        np.asarray(programs.select(RANDOM, q, q, q, np.zeros(40, bool), key=key).kept)
        for key in (jax.random.key(5), jax.random.PRNGKey(5), jax.random.key(6))
    )
    np.testing.assert_array_equal(first, raw)
    assert not np.array_equal(first, other)


# --- numbers of numpy -----------------------------------------------------------------------------------------------

NUMBERS = [
    (lambda x: policies.SnapKV(keep=x), np.float32(0.2), 0.2),
    (lambda x: policies.SnapKV(keep=x), np.float16(0.1), 0.1),
    (lambda x: policies.SnapKV(keep=x), np.float64(0.3), 0.3),
    (lambda x: policies.SnapKV(budget=x), np.int64(20), 20),
    (lambda x: policies.PyramidKV(keep=0.1, window=x), np.int32(2), 2),
    (lambda x: policies.LightKV(layers=(1, x, 3)), np.int64(2), 2),
    (lambda x: policies.CSP(keep=0.5, fill=x), np.bool_(True), True),
    (lambda x: policies.Downsample(side=x), np.int64(3), 3),
    (policies.Smooth, np.int64(9), 9),
    (lambda x: policies.Smooth((x, 3)), np.int64(9), 9),
    (lambda x: policies.compose(policies.SnapKV(keep=x), allocate=policies.PrefixKV), np.float32(0.2), 0.2),
    (lambda x: vlkv.Greedy(max_new_tokens=x), np.int64(5), 5),
    (lambda x: vlkv.Greedy(stop=(x, 2)), np.int64(5), 5),
    (lambda x: vlkv.Sample(temperature=x), np.float32(0.7), 0.7),
    (lambda x: vlkv.Sample(top_k=x), np.int64(5), 5),
]  # fmt: skip


@pytest.mark.parametrize(("make", "numpy", "python"), NUMBERS)
def test_numbers_of_numpy_are_those_of_python(make, numpy, python):
    """Equal, with the same hash and text: so jit's cache and the tables of `vlkv eval` do not distinguish them."""
    ours, wanted = make(numpy), make(python)
    assert ours == wanted and hash(ours) == hash(wanted) and repr(ours) == repr(wanted)


def test_numbers_of_numpy_are_checked(params):
    inputs = vlkv.Inputs.from_hf(TEXT, SMALL)
    caches = [
        jax.eval_shape(lambda new=new: vlkv.prefill(params, inputs, SNAPKV, new_tokens=new)) for new in (3, np.int64(3))
    ]
    assert jax.tree.structure(caches[0]) == jax.tree.structure(caches[1])
    with pytest.raises(vlkv.InputError, match=r"keep='0\.2' must be a number"):
        policies.SnapKV(keep="0.2")
    with pytest.raises(vlkv.InputError, match=r"keep=2\.0 must lie in"):
        policies.SnapKV(keep=np.float32(2))
    with pytest.raises(vlkv.InputError, match=r"stop=\[2\] must be a tuple of whole numbers"):
        vlkv.Greedy(stop=[2])
