"""What a harness asks for, on the miniature: the same answers as one by one, the same log-probabilities as `score`."""

from types import SimpleNamespace

import numpy as np
import pytest

import vlkv
from vlkv import policies
from vlkv.mini import CHECKPOINT, pages
from vlkv.processing.prompts import literal
from vlkv.tools.harness import answering
from vlkv.tools.harness.answering import Answerer, Question, sampling_from

POLICY = policies.AirCache(keep=0.4)
SAMPLING = vlkv.Greedy(max_new_tokens=12)


@pytest.fixture(scope="module")
def answerer():
    params, processor = vlkv.load(CHECKPOINT)
    return Answerer(params=params, processor=processor, policy=POLICY, batch_size=3)


@pytest.fixture(scope="module")
def quick(miniature):
    """One that compiles in a third of the time, where it does not matter what it says."""
    params, processor = vlkv.load(miniature())
    return Answerer(params=params, processor=processor, policy=POLICY, batch_size=3)


@pytest.fixture(scope="module")
def questions():
    return [Question(sample.question, (sample.image,)) for sample in pages.held_out(5, seed=1, kind="digits")]


def test_a_mark_in_a_continuation_is_text(quick):
    image = quick.processor.config.image_token
    for text in ("<image>", r"see \<image>"):
        ids = quick._target(text)
        assert image not in ids
        np.testing.assert_array_equal(ids, quick.processor.encode(literal(text), begin=False))
    np.testing.assert_array_equal(quick._target(" 1 2 "), quick.processor.tokenizer.encode("1 2", add_special=False))


@pytest.mark.full
def test_a_continuation_is_greedy_if_it_is_what_generate_says(answerer, questions):
    said = [" ".join(answer.text.split()[:2]) for answer in answerer.answers(questions[:3], SAMPLING)]
    ours = answerer.likelihoods(questions[:3], [[text, "/"] for text in said])
    assert [[one.greedy for one in each] for each in ours] == [[True, False]] * 3


def test_bad_questions_are_refused(quick, questions):
    with pytest.raises(vlkv.InputError, match="is empty: there is nothing to score"):
        quick.likelihoods(questions[:1], [[" "]])
    with pytest.raises(vlkv.InputError, match=r"2 <image> mark"):
        quick.answers([Question("<image><image>?", questions[0].pictures)], SAMPLING)
    assert quick.answers([], SAMPLING) == quick.likelihoods([], []) == []


@pytest.mark.parametrize(
    ("options", "sampling", "until"),
    [
        ({}, vlkv.Greedy(max_new_tokens=1024), ()),
        ({"max_new_tokens": 16, "until": "\n\n", "temperature": 0, "do_sample": False, "num_beams": 1, "top_p": None},
         vlkv.Greedy(max_new_tokens=16), ("\n\n",)),
        ({"max_gen_toks": 2048, "until": ["a", "b"], "temperature": 0.7, "do_sample": False},
         vlkv.Greedy(max_new_tokens=500), ("a", "b")),
        ({"temperature": 0.2, "top_p": 0.9}, vlkv.Sample(max_new_tokens=500, temperature=0.2, top_p=0.9), ()),
        ({"do_sample": True, "top_k": 5}, vlkv.Sample(max_new_tokens=500, top_k=5), ()),
        ({"do_sample": True, "temperature": 0.0, "top_p": 0, "image_aspect_ratio": "original"},
         vlkv.Greedy(max_new_tokens=500), ()),
    ],
)  # fmt: skip
def test_generation_options(options, sampling, until):
    before = dict(options)
    most = None if not options or options.get("max_new_tokens") else 500
    assert sampling_from(options, most=most) == (sampling, until)
    assert options == before


@pytest.mark.parametrize(("options", "said"), [
    ({"num_beams": 5}, "num_beams=5 is not supported"),
    ({"visual_cot": True}, "visual_cot=True is not supported"),
    ({"image_aspect_ratio": "pad"}, "image_aspect_ratio='pad', but layout='checkpoint'"),
    ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 must lie in"),
])  # fmt: skip
def test_generation_options_that_are_not_honoured(options, said):
    with pytest.raises(vlkv.InputError, match=said):
        sampling_from(options)


def test_an_answer_has_the_positions_that_are_left_and_its_share_of_the_cache(monkeypatch, miniature):
    processor = vlkv.load_processor(miniature())
    asked = []

    def generate(params, inputs, *, policy, sampling, key):
        asked.append(sampling.max_new_tokens + int(inputs.valid.sum(axis=1).max()))
        return SimpleNamespace(tokens=np.zeros((2, 1), int), lengths=np.ones(2, int), cache_bytes=100)

    monkeypatch.setattr(answering, "generate", generate)
    model = Answerer(params=None, processor=processor, policy=policies.Full(), batch_size=2)
    (answer,) = model.answers([Question("read the page")], vlkv.Greedy(max_new_tokens=10**6))
    assert asked == [processor.config.decoder.max_positions] and answer.cache_bytes == 50
