"""Helpers for the tests of all families: batches of unequal rows, and transformers' answer to each row alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.models import padded
from tests.parity.conftest import perturb, torch, transformers
from vlkv import policies
from vlkv.decoder import attend_to_prompt, recur_over_prompt

save_file = pytest.importorskip("safetensors.torch").save_file  # skips instead of failing if torch is missing
NEW = 32  # greedy tokens that are compared
__all__ = [
    "NEW",
    "Row",
    "answer",
    "check_answers",
    "check_states",
    "joined",
    "perturb",
    "read",
    "save_file",
    "torch",
    "transformers",
]


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt: ids, and the other arrays that transformers' processor returns for this prompt alone."""

    ids: list[int]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def joined(rows: list[Row], padding: str = "right") -> dict[str, Any]:
    """One batch, padded on one side; the other arrays of all rows are joined in lists."""
    batch: dict[str, Any] = padded([row.ids for row in rows], padding)
    for row in rows:
        for name, value in row.extra.items():
            batch.setdefault(name, []).extend(value)
    return batch


@jax.jit
def read(params, inputs):
    """The input of the first layer, the output of every layer, and the logits."""
    embedded, states, decoder = params.embed(inputs), [], params.decoder

    def note(i, carry, x):
        x = decoder.add_features(embedded.added, i, x)
        states.append(x)
        return carry, x, None

    attend = attend_to_prompt(decoder, inputs.valid, decoder.until(inputs.is_vision))
    recur = recur_over_prompt(inputs.valid)
    _, x = decoder.walk(None, embedded.x, inputs.positions, attend, note, recur=recur)
    return jnp.stack([embedded.x, *states]), decoder.logits(x)


def answer(model, row: Row, new: int = 0):
    """Transformers' hidden states and logits for one prompt alone, and `new` greedy tokens."""
    extra = {name: torch.tensor(np.asarray(value)) for name, value in row.extra.items()}
    ids = torch.tensor([row.ids])
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True, **extra)
        tokens = None
        if new:
            tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                                    do_sample=False, eos_token_id=None, **extra)[0, len(row.ids) :].numpy()  # fmt: skip
    return [state[0].numpy() for state in out.hidden_states], out.logits[0].numpy(), tokens


def check_states(params, rows: list[Row], answers, padding: str = "right") -> vlkv.Inputs:
    """`check_batch` for these rows, padded on one side."""
    return check_batch(params, joined(rows, padding), answers)


def check_batch(params, batch: dict[str, Any], answers) -> vlkv.Inputs:
    """Asserts that layer outputs and logits are within 1e-4, and that logits are far from uniform."""
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    states, logits = (np.asarray(x) for x in read(params, inputs))
    mask = np.asarray(batch["attention_mask"], bool)
    width = mask.shape[1]
    for i, (hidden, theirs, _) in enumerate(answers):
        for ours, wanted in zip(states[:-1], hidden[:-1], strict=True):  # transformers' last state is after the norm
            np.testing.assert_allclose(ours[i, :width][mask[i]], wanted, atol=1e-4)
        np.testing.assert_allclose(logits[i, :width][mask[i]], theirs, atol=1e-4)
    assert np.concatenate([theirs for _, theirs, _ in answers]).std() >= 1
    return inputs


def check_answers(params, inputs: vlkv.Inputs, answers) -> None:
    """Asserts that the greedy tokens with the full cache are equal."""
    sampling = vlkv.Greedy(max_new_tokens=len(answers[0][2]), stop=())
    output = jax.jit(vlkv.generate)(params, inputs, sampling=sampling)
    for row, (_, _, tokens) in enumerate(answers):
        np.testing.assert_array_equal(output.tokens[row], tokens)


def every_stage() -> policies.Policy:
    """A policy with all stages: scores, a reduction on the grid, budgets per layer, merging and steps."""
    reduce = policies.LightKV(layers=(1,), windows=(2,))
    return policies.compose(policies.SnapKV(keep=0.5), allocate=policies.PyramidKV, step=policies.H2O, reduce=reduce)


def check_neighbours(params, rows: list[Row], policy) -> None:
    """Asserts that the rows in reverse order give the same tokens, because all bounds are those of the batch."""
    run, sampling = jax.jit(vlkv.generate), vlkv.Greedy(max_new_tokens=6, stop=())
    first, second = (
        np.asarray(
            run(params, vlkv.Inputs.from_hf(joined(order), params.config), policy=policy, sampling=sampling).tokens
        )
        for order in (rows, rows[::-1])
    )
    np.testing.assert_array_equal(first, second[::-1])
    assert len(np.unique(first)) > 2


class ParityTests:
    """Tests for a module with the fixture `saved`: model, folder, params, rows, and transformers' answers to them."""

    @pytest.mark.parametrize("padding", ["left", "right"])
    def test_layer_outputs_and_logits(self, saved, padding):
        _, _, params, rows, answers = saved
        check_states(params, rows, answers, padding)

    @pytest.mark.full
    def test_greedy_tokens(self, saved):
        _, _, params, rows, answers = saved
        check_answers(params, vlkv.Inputs.from_hf(joined(rows), params.config), answers)

    @pytest.mark.full
    def test_a_row_is_answered_alike_whatever_its_neighbours(self, saved):
        _, _, params, rows, _ = saved
        check_neighbours(params, rows, every_stage())
