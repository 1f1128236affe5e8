"""NaN logits: every entry point raises one error that says in which part of the model they come from, and why."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.families import tiny
from tests.models import random_model
from vlkv import mini, policies
from vlkv.analysis import profiles
from vlkv.generation.nan import explain
from vlkv.processing.images import open_image
from vlkv.tools.evaluation.journal import Journal
from vlkv.tools.evaluation.records import Settings, read_records
from vlkv.tools.evaluation.running import run
from vlkv.tools.harness.answering import Answerer, Question

SAMPLING = vlkv.Greedy(max_new_tokens=4, stop=())
POLICY = policies.SnapKV(keep=0.5, scope="vision")
QUESTION = "what does row one say?"
LAST_LAYER = (
    "the logits are NaN, first in decoder layer 1 of 0 to 1: its weight decoder.layers[1].down.weight is NaN or "
    "infinite; compare the checkpoint with another copy"
)


def refused(call) -> str:
    with pytest.raises(vlkv.InputError) as caught:
        call()
    return str(caught.value)


@pytest.mark.full
def test_every_entry_point_says_where_nan_comes_from(miniature, tmp_path):
    params, processor = vlkv.load(miniature())
    weight = params.decoder.layers[1].down.weight
    weight[...] = weight[...].at[0, 0].set(jnp.nan)
    page, answerer = open_image(mini.PAGE), Answerer(params=params, processor=processor, policy=POLICY)
    inputs, questions, asked = processor(page, QUESTION), tmp_path / "q.jsonl", [Question(QUESTION, (page,))]
    questions.write_text(json.dumps({"image": str(mini.PAGE), "question": QUESTION, "answers": ["1"]}))
    records, journal = read_records(questions), Journal(tmp_path, {})
    options = dict(policy=POLICY, sampling=SAMPLING)
    calls = {
        "generate": lambda: vlkv.generate(params, inputs, **options),
        "stream": lambda: list(vlkv.stream(params, inputs, **options)),
        "Chat": lambda: vlkv.Chat(params, processor, page, **options).ask(QUESTION),
        "agnostic Chat": lambda: vlkv.Chat(params, processor, page, policy=POLICY, query_agnostic=True),
        "score": lambda: vlkv.score(params, inputs, np.array([[7, 8]]), POLICY),
        "kl_to_full": lambda: vlkv.kl_to_full(params, inputs, POLICY, sampling=SAMPLING),
        "eval": lambda: run(params, processor, records, [POLICY], Settings(max_new_tokens=4), journal),
        "answers": lambda: answerer.answers(asked, SAMPLING),
        "likelihoods": lambda: answerer.likelihoods(asked, [["1", "2"]]),
        "profile": lambda: profiles.measure(params, [inputs], policies.PrefixKV(keep=0.5)),
    }
    for name, call in calls.items():
        assert refused(call) == LAST_LAYER, name
    journal.close()
    assert not journal.entries


def test_bounds_without_effect_are_not_the_cause():
    """A tower of Gemma 4 whose bounds are infinite, as by default: a fault in another weight, and an overflow."""
    c = tiny.read_config("gemma4")
    params = random_model(dataclasses.replace(c, vision=dataclasses.replace(c.vision, clipped=True)))
    block, inputs = params.vision.blocks[1], tiny.make_batch("gemma4")
    for one in params.vision.blocks:
        for product in ("query", "key", "value", "out", "gate", "up", "down"):
            bounds = getattr(one, f"{product}_bounds")
            bounds.input_min[...] = bounds.output_min[...] = -jnp.inf
            bounds.input_max[...] = bounds.output_max[...] = jnp.inf

    def said() -> str:
        return str(explain(params, inputs, np.array([True, True, False])))

    first = "the logits are NaN, first in the vision tower or the projector: "
    weight = block.down.weight[...]
    block.down.weight[...] = jnp.full_like(weight, 3e38)
    assert said().startswith(f"{first}a number is too large for float32")
    block.down.weight[...] = weight.at[0, 0].set(jnp.inf)
    assert said().startswith(f"{first}its weight vision.blocks[1].down.weight is NaN or infinite")
    block.down.weight[...] = weight
    block.down_bounds.output_max[...] = -jnp.inf
    assert said().startswith(f"{first}its weight vision.blocks[1].down_bounds.output_max is NaN or infinite")


def test_a_token_of_nan_is_no_text(miniature):
    processor = vlkv.load(miniature())[1]
    tokens, lengths = np.array([[7, -1, -1]]), np.array([2])  # as `decode` returns them
    for given in (None, lengths):
        assert "-1 means that logits are NaN" in refused(lambda given=given: processor.decode(tokens, given))
