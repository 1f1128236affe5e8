"""Helpers for the tests of all families: batches of unequal rows, and transformers' answer to each row alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests import programs
from tests.models import padded, same
from tests.parity.conftest import torch
from vlkv import policies
from vlkv.decoder import attend_to_prompt, recur_over_prompt
from vlkv.families import config_from_hf

save_file = pytest.importorskip("safetensors.torch").save_file  # skips instead of failing if torch is missing
NEW = 32  # greedy tokens that are compared
prefill = programs.prefill
extend = programs.extend
forward = programs.forward


def save(model, folder, rows=()):
    """The model, the folder that it is saved to, our parameters, and prompts: `saved` of `ParityTests`."""
    model.save_pretrained(folder)
    return model, folder, vlkv.load_params(folder), rows


def raw_of(folder) -> dict[str, Any]:
    """The `config.json` of a folder."""
    return json.loads((folder / "config.json").read_text())


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt: ids, and the other arrays that transformers' processor returns for this prompt alone."""

    ids: list[int]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def joined(rows: list[Row], padding: str | Sequence[str] = "right") -> dict[str, Any]:
    """One batch, padded on one side, or on one side for each row; the other arrays of all rows are joined in lists."""
    batch: dict[str, Any] = padded([row.ids for row in rows], padding)
    for row in rows:
        for name, value in row.extra.items():
            batch.setdefault(name, []).extend(value)
    return batch


def whole(*turns: Row) -> Row:
    """Several turns as one prompt."""
    names = dict.fromkeys(name for turn in turns for name in turn.extra)
    extra = {name: [one for turn in turns for one in turn.extra.get(name, ())] for name in names}
    for name in names:
        if name.endswith("token_type_ids"):
            extra[name] = [[kind for kinds in extra[name] for kind in kinds]]
    return Row([token for turn in turns for token in turn.ids], extra)


@partial(jax.jit, static_argnames="before")
def read(params, inputs, *, before: bool = False):
    """The input of the first layer, the output of every layer, and the logits.

    `before`: outputs before features of the tower are added to them, as transformers returns them with DeepStack.
    """
    embedded, states, decoder = params.embed(inputs), [], params.decoder

    def note(i, carry, x):
        added = decoder.add_features(embedded.added, i, x)
        states.append(x if before else added)
        return carry, added, None

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


def check_states(
    params, rows: list[Row], answers, padding: str | Sequence[str] = "right", *, within: float = 1e-4, **options
) -> vlkv.Inputs:
    """Asserts that layer outputs and logits of a batch are `within` of theirs, and that logits are far from uniform.

    `options` are those of `read`.
    """
    batch = joined(rows, padding)
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    states, logits = (np.asarray(x) for x in read(params, inputs, **options))
    mask = np.asarray(batch["attention_mask"], bool)
    width = mask.shape[1]
    for i, (hidden, theirs, _) in enumerate(answers):
        for ours, wanted in zip(states[:-1], hidden[:-1], strict=True):  # transformers' last state is after the norm
            np.testing.assert_allclose(ours[i, :width][mask[i]], wanted, atol=within)
        np.testing.assert_allclose(logits[i, :width][mask[i]], theirs, atol=within)
    assert np.concatenate([theirs for _, theirs, _ in answers]).std() >= 1
    return inputs


def check_answers(params, rows: list[Row], answers, padding: str | Sequence[str] = "right") -> None:
    """Asserts that the greedy tokens with the full cache are equal."""
    inputs = vlkv.Inputs.from_hf(joined(rows, padding), params.config)
    sampling = vlkv.Greedy(max_new_tokens=len(answers[0][2]), stop=())
    output = programs.generate(params, inputs, sampling=sampling)
    for row, (_, _, tokens) in enumerate(answers):
        np.testing.assert_array_equal(output.tokens[row], tokens)


def check_later_turn(params, turns: list[Row], wanted=None, atol: float = 1e-4) -> None:
    """Asserts that a prompt and a later turn, with a full cache, give the logits of one prompt, or `wanted`."""
    first, second, both = (vlkv.Inputs.from_hf(joined([row]), params.config) for row in (*turns, whole(*turns)))
    cache, _ = prefill(params, first, policies.Full(), new_tokens=second.tokens.shape[1])
    _, logits = extend(params, cache, second)
    wanted = np.asarray(forward(params, both))[0, both.valid[0]][-1] if wanted is None else wanted
    np.testing.assert_allclose(logits[0], wanted, atol=atol)


def rope_index(model, row: Row) -> tuple[np.ndarray, int]:
    """transformers' positions of one prompt on three axes, and what they add to the position of the next token."""
    given = {name: torch.tensor(np.asarray(value)) for name, value in row.extra.items() if "pixel" not in name}
    positions, delta = model.model.get_rope_index(torch.tensor([row.ids]), **given)
    return positions[:, 0].numpy().T, int(delta[0, 0])


def check_positions(model, params, row: Row, other: Row) -> vlkv.Inputs:
    """Asserts transformers' positions of a row, and that every vision token is where its pixels are."""
    positions, delta = rope_index(model, row)
    inputs, merge = vlkv.Inputs.from_hf(joined([row, other], "left"), params.config), params.config.vision.merge
    valid, is_vision = inputs.valid[0], inputs.is_vision[0]
    np.testing.assert_array_equal(inputs.positions[0][valid], positions)
    assert inputs.positions[0].max() + 1 - valid.sum() == delta
    place = inputs.layout["place"].reshape(-1, merge**2, 2)[inputs.vision_index[0][is_vision], 0]
    np.testing.assert_array_equal(place, merge * inputs.grid[0][is_vision, 1:])
    return inputs


def random_pieces(rng, most=lambda lines, columns: 8) -> list:
    """Numbers of text tokens, and images and videos of random sizes; `most`: frames of a video of such patches."""
    pieces: list = [int(rng.integers(1, 6))]
    for _ in range(4):
        lines, columns = 2 * rng.integers(1, 8, 2)
        frames = int(rng.integers(1, 1 + most(lines, columns)))
        pieces += [("video", frames, lines, columns) if rng.random() < 0.5 else ("image", 1, lines, columns)]
        pieces += [int(rng.integers(0, 6))]
    return pieces


def check_files(saved, folder, *more: str) -> None:
    """Asserts that shards, a converted copy, and what is in `more` of the folder, give the same parameters."""
    model, source, params, *_ = saved
    model.save_pretrained(folder / "sharded", max_shard_size="40KB")
    convert(source, folder / "converted", progress=False)
    for other in ("sharded", "converted", *more):
        same(params, vlkv.load_params(folder / other))


def check_tied(model, params, folder) -> None:
    """Asserts that the model's head is the embedding table, and that of `params` is not."""
    tied = save(model, folder)[2]
    assert tied.config.decoder.tied and tied.decoder.head is None
    assert not params.config.decoder.tied


def check_refused(raw, change: dict[str, Any], message: str, part: str | None = "text_config", **options) -> None:
    """Asserts that a config with other fields in one part (None: outside of them) is refused in a short message.

    `change` may contain fields of the tower as "vision". `options` are those of `config_from_hf`.
    """
    change, part = (change["vision"], "vision_config") if "vision" in change else (change, part)
    changed = raw | (change if part is None else {part: raw[part] | change})
    with pytest.raises(vlkv.InputError, match=message) as error:
        config_from_hf(changed, **options)
    assert len(str(error.value)) <= 200


def every_stage() -> policies.Policy:
    """A policy with all stages: scores, a reduction on the grid, budgets per layer, merging and steps."""
    reduce = policies.LightKV(layers=(1,), windows=(2,))
    return policies.compose(policies.SnapKV(keep=0.5), allocate=policies.PyramidKV, step=policies.H2O, reduce=reduce)


def check_neighbours(params, rows: list[Row], policy) -> None:
    """Asserts that the rows in reverse order give the same tokens, because all bounds are those of the batch."""
    run, sampling = programs.generate, vlkv.Greedy(max_new_tokens=6, stop=())
    batches = (vlkv.Inputs.from_hf(joined(order), params.config) for order in (rows, rows[::-1]))
    first, second = (np.asarray(run(params, inputs, policy=policy, sampling=sampling).tokens) for inputs in batches)
    np.testing.assert_array_equal(first, second[::-1])
    assert len(np.unique(first)) > 2


class ParityTests:
    """Tests for a module with the fixture `saved`: model, folder, params, and rows. `before` as in `read`."""

    before = False
    within = 1e-4  # of transformers' layer outputs and logits
    new = NEW  # greedy tokens

    def test_layer_outputs_and_logits(self, saved):
        """Of rows that are padded on either side."""
        model, _, params, rows = saved
        sides = (["left", "right"] * len(rows))[: len(rows)]
        check_states(params, rows, [answer(model, row) for row in rows], sides, within=self.within, before=self.before)

    @pytest.mark.full
    def test_greedy_tokens(self, saved):
        model, _, params, rows = saved
        check_answers(params, rows, [answer(model, row, self.new) for row in rows], "left")

    @pytest.mark.full
    def test_a_row_is_answered_alike_whatever_its_neighbours(self, saved):
        check_neighbours(saved[2], saved[3], every_stage())
