"""Rules of `generation_config.json`: against the logits processors of transformers, on arrays and in every loop."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.models import IMAGE_TOKEN, SMALL, random_model, unequal_batch
from vlkv import policies
from vlkv.cache import resize
from vlkv.families import config_from_hf, read_generation
from vlkv.generation.rules import LogitRules
from vlkv.generation.sampling import check_settings

VOCAB, LAST, STOP = 12, 5, (2, 4)
PENALTY = {"repetition_penalty": 1.7}
NGRAMS = [{"no_repeat_ngram_size": size} for size in (1, 2, 3)]
WORDS = {"bad_words_ids": [[3], [4], [7, 1], [9, 3], [1, 1, 5], [8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 5, 6]]}
ENDS = {"min_new_tokens": 3, "forced_eos_token_id": [4, 6], "suppress_tokens": [0, 99], "begin_suppress_tokens": [5]}
ALL = {**PENALTY, **NGRAMS[1], **WORDS, **ENDS, "forced_eos_token_id": 4}


def processors(settings, prompt: int, last: int = LAST, stop=STOP):
    """transformers' own list, for a row with `prompt` tokens and `last` + 1 new ones."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.GenerationConfig(**settings, max_length=prompt + last + 1, eos_token_id=list(stop) or None)
    config._eos_token_tensor = torch.tensor(stop) if stop else None

    class Holder(transformers.GenerationMixin):
        config = transformers.LlamaConfig()

    return Holder()._get_logits_processor(config, input_ids_seq_length=prompt, device="cpu")


def theirs(settings, ids, logits, prompt: int, **more) -> np.ndarray:
    torch = pytest.importorskip("torch")
    process = processors(settings, prompt, **more)
    return process(torch.tensor([ids]), torch.tensor(logits[None]))[0].numpy()


@pytest.mark.parametrize("settings", [PENALTY, *NGRAMS, WORDS, ENDS, ALL], ids=lambda x: "+".join(x)[:40])
def test_rules_are_those_of_transformers(settings):
    rng, rules = np.random.default_rng(0), LogitRules.of(dict(read_generation(settings)))
    lengths = [1, 2, 3, 9, 30, 30]
    rows = [rng.integers(0, 10, size).tolist() for size in lengths]
    rows[3][-2:] = rows[3][:2]  # a sequence of three that occurs twice, but for its last id
    rows[5] = [8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 1, 9]
    history = np.array([row + [-1] * (33 - len(row)) for row in rows], np.int32)
    logits = rng.normal(size=(len(rows), VOCAB)).astype(np.float32)
    apply = jax.jit(
        lambda step: rules.apply(jnp.asarray(logits), jnp.asarray(history), step=step, last=LAST, stop=STOP)
    )
    changed = False
    for step in (0, 1, 2, 3, LAST):
        ours = np.asarray(apply(step))
        changed |= not np.array_equal(ours, logits)
        for row, ids in enumerate(rows):
            if step < len(ids):
                wanted = theirs(settings, ids, logits[row], len(ids) - step)
                np.testing.assert_allclose(ours[row], wanted, rtol=1e-6, err_msg=f"step {step}, row {row}")
    assert changed


def test_without_rules_nothing_is_computed_and_the_cache_has_no_ids(params, batch):
    logits = jnp.zeros((1, 3))
    assert LogitRules().apply(logits, None, step=0, last=3, stop=(2,)) is logits
    cache, _ = jax.eval_shape(vlkv.prefill, params, batch, policies.Full())
    assert cache.history is None


def chosen(params, inputs, settings, new: int, stop) -> np.ndarray:
    """Greedy tokens by the logits of whole prompts without a cache, and transformers' processors."""
    forward = jax.jit(vlkv.forward)
    length, counts = inputs.tokens.shape[1], np.asarray(inputs.lengths).tolist()
    tokens, valid, positions = (np.array(getattr(inputs, name)) for name in ("tokens", "valid", "positions"))
    answers = [[] for _ in counts]
    assert length >= max(counts) + new - 1
    for step in range(new):
        now = dataclasses.replace(inputs, tokens=tokens, valid=valid, positions=positions)
        logits = np.asarray(forward(params, now))
        for row, count in enumerate(counts):
            place = count + step
            ids = tokens[row, :place].tolist()
            wanted = theirs(settings, ids, logits[row, place - 1], count, last=new - 1, stop=stop)
            answers[row].append(int(wanted.argmax()))
            if place < length:
                tokens[row, place], valid[row, place], positions[row, place] = answers[row][-1], True, place
    return np.array(answers)


NEW = 8
EVERY = {
    "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[IMAGE_TOKEN], [30, 31]],
    "min_new_tokens": 3, "forced_eos_token_id": 2, "suppress_tokens": list(range(40, 44)),
}  # fmt: skip


@pytest.fixture(scope="module")
def ruled():
    """A tiny model whose folder asks for rules, prompts with images, and their answers by transformers' processors."""
    config = dataclasses.replace(SMALL, generation=read_generation(EVERY), stop=())
    params, inputs = random_model(config), unequal_batch(SMALL)
    wider = [np.pad(x, [(0, 0), (0, NEW)]) for x in (inputs.tokens, inputs.valid)]
    inputs = vlkv.Inputs.from_hf(
        {"input_ids": wider[0], "attention_mask": wider[1], "pixel_values": inputs.pixels}, config
    )
    wanted = chosen(params, inputs, EVERY, NEW, ())
    plain = random_model(dataclasses.replace(config, generation=()))
    free = np.asarray(vlkv.generate(plain, inputs, sampling=vlkv.Greedy(max_new_tokens=NEW)).tokens)
    assert (free != wanted).any(axis=1).all(), "or the rules would change nothing"
    return params, plain, inputs, wanted


def test_every_loop_follows_the_rules_of_the_folder(ruled):
    params, plain, inputs, wanted = ruled
    sampling = vlkv.Greedy(max_new_tokens=NEW)
    np.testing.assert_array_equal(vlkv.generate(params, inputs, sampling=sampling).tokens, wanted)
    np.testing.assert_array_equal(np.stack(list(vlkv.stream(params, inputs, sampling=sampling)), axis=1), wanted)
    given = vlkv.Greedy(max_new_tokens=NEW, rules=LogitRules.of(dict(read_generation(EVERY))))
    np.testing.assert_array_equal(vlkv.generate(plain, inputs, sampling=given).tokens, wanted)
    off = vlkv.Greedy(max_new_tokens=NEW, rules=LogitRules())
    free = vlkv.generate(plain, inputs, sampling=sampling).tokens
    np.testing.assert_array_equal(vlkv.generate(params, inputs, sampling=off).tokens, free)


@pytest.mark.full
def test_the_ids_survive_a_late_compression_an_extension_and_a_larger_cache(ruled):
    params, _, inputs, wanted = ruled
    late = policies.compose(policies.SnapKV(keep=1.0), answer=3)
    output = vlkv.generate(params, inputs, policy=late, sampling=vlkv.Greedy(max_new_tokens=NEW))
    np.testing.assert_array_equal(output.tokens, wanted)
    # The answer's first tokens as a second turn: all ids of the conversation count.
    short = vlkv.Greedy(max_new_tokens=4, rules=LogitRules(repetition_penalty=1.5, no_repeat_ngram_size=2))
    cache, _ = jax.jit(vlkv.prefill)(params, inputs, policies.Full(), sampling=short)
    cache = resize(cache, NEW)
    fed = vlkv.Inputs.from_hf({"input_ids": wanted[:, :3]}, params.config)
    cache, logits = jax.jit(vlkv.extend)(params, cache, fed)
    counts = np.asarray(inputs.lengths)
    for row in range(3):
        ids = np.asarray(cache.history)[row]
        np.testing.assert_array_equal(ids[counts[row] : counts[row] + 3], wanted[row, :3])
        assert (ids >= 0).sum() == counts[row] + 3 and len(ids) >= counts[row] + NEW
    with pytest.raises(vlkv.InputError, match="need the prompt's ids: give prefill the same sampling="):
        bare = dataclasses.replace(cache, history=None)
        vlkv.decode(params, bare, logits, sampling=short)


def test_sampling_of_the_folder():
    def of(**settings):
        return random_model(dataclasses.replace(SMALL, generation=read_generation(settings)))

    assert vlkv.sampling.Greedy() == vlkv.default_sampling(of())
    drawn = vlkv.default_sampling(of(do_sample=True, temperature=0.7, top_p=0.8, max_new_tokens=9))
    assert drawn == vlkv.Sample(max_new_tokens=9, temperature=0.7, top_p=0.8, top_k=50), "50 is transformers' default"
    assert vlkv.default_sampling(of(do_sample=True, top_k=0), max_new_tokens=3) == vlkv.Sample(max_new_tokens=3)
    assert vlkv.default_sampling(of(do_sample=False, temperature=0.7)) == vlkv.Greedy()
    with pytest.raises(vlkv.InputError, match=r"generation_config\.json: top_p=3.0 must lie"):
        vlkv.default_sampling(of(do_sample=True, top_p=3))


def test_what_is_not_used_is_said_in_one_line():
    def said(**settings):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            check_settings(dataclasses.replace(SMALL, generation=read_generation(settings)))
        return [str(one.message) for one in found]

    assert said(**ALL, eos_token_id=2, temperature=0.5, top_k=20, max_length=4096, num_beams=1, min_p=None) == []
    assert said(num_beams=4, min_p=0.1, max_length=100, stop_strings=["x"]) == [
        "generation_config.json: num_beams=4, max_length=100, stop_strings=('x',) not used"
    ]
    assert said(do_sample=True, temperature=0.7, typical_p=0.9, max_new_tokens=5) == [
        "generation_config.json: typical_p=0.9 not used; do_sample=True, temperature=0.7, max_new_tokens=5 used only "
        "with sampling=vlkv.default_sampling(params)"
    ]
    wrong = {"repetition_penalty": 0, "bad_words_ids": [[]], "min_new_tokens": -1}
    for name, value in wrong.items():
        with pytest.raises(vlkv.InputError, match=rf"generation_config\.json: {name}"):
            said(**{name: value})


def test_settings_in_config_json_count_without_the_other_file():
    raw = {"model_type": "qwen2", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
           "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8, "top_k": 50,
           "repetition_penalty": 1.2}  # fmt: skip
    assert config_from_hf(raw).generation == (("repetition_penalty", 1.2),)
    assert config_from_hf(raw, {}).generation == ()
    assert config_from_hf(raw, json.loads('{"top_k": null, "bad_words_ids": [[1]]}')).generation == (
        ("bad_words_ids", ((1,),)),
    )


def test_any_temperature_gives_a_distribution():
    """Tiny ones the most likely tokens, huge ones all that a rule has not banned."""
    logits = jnp.array([[1.0, 3.0, -jnp.inf, 2.999]])
    keys = jax.random.split(jax.random.key(0), 200)
    for temperature, wanted in ((1e-60, {1}), (1e-45, {1}), (1e-38, {1}), (1e-6, {1}), (1e30, {0, 1, 3}),
                                (float("inf"), {0, 1, 3})):  # fmt: skip
        choose = jax.jit(jax.vmap(lambda key, t=temperature: vlkv.Sample(temperature=t).choose(logits, key)[0]))
        assert set(np.asarray(choose(keys)).tolist()) == wanted, temperature
