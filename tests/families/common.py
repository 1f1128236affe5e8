"""What a family's record contains, and helpers: batches of unequal rows, and transformers' answer to each row alone."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.models import padded
from tests.parity.conftest import VOCABULARY, perturb, torch, transformers
from vlkv.config import ModelConfig
from vlkv.decoder import attend_to_prompt, recur_over_prompt
from vlkv.families import config_from_hf

NEW = 32  # greedy tokens that are compared
prefill, extend, forward = programs.prefill, programs.extend, programs.forward


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt: ids, and the other arrays that transformers' processor returns for this prompt alone."""

    ids: list[int]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Saved(NamedTuple):
    """A model of transformers, the folder that it is saved to, our parameters, and prompts."""

    model: Any
    folder: Path
    params: Any
    rows: list[Row]

    def inputs(self, padding: str | Sequence[str] = "right") -> vlkv.Inputs:
        return vlkv.Inputs.from_hf(joined(self.rows, padding), self.params.config)


def save(model, folder, rows=(), write: Callable[[Any, Path], Any] | None = None) -> Saved:
    """Writes the model, with `save_pretrained` unless `write` is given, and loads it."""
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder) if write is None else write(model, folder)
    return Saved(model, folder, vlkv.load_params(folder), rows)


class Refused(NamedTuple):
    """Other fields of a part of `config.json` (None: outside of the parts) and what the error says of them."""

    part: str | None
    change: dict[str, Any]
    says: str


def fields(part: str | None, *pairs: tuple[str, Any]) -> tuple[Refused, ...]:
    """Fields of which each is refused by its name."""
    return tuple(Refused(part, {field: value}, field) for field, value in pairs)


def changes(part: str | None, *pairs: tuple[dict[str, Any], str]) -> tuple[Refused, ...]:
    """Fields of a part, and what is said."""
    return tuple(Refused(part, *pair) for pair in pairs)


text, vision, outer = (partial(changes, part) for part in ("text_config", "vision_config", None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A family, or a variant of one, in the tests of `test_every_family.py`."""

    make: Callable[..., Any]  # transformers' tiny model, all parameters perturbed; `tied=True` ties its head
    rows: Callable[[ModelConfig], list[Row]]  # prompts for a config: among them several images, one, and none
    write: Callable[[Any, Path], Any] | None = None  # writes the model into a folder in place of `save_pretrained`
    before: bool = False  # transformers returns layer outputs before features of the tower are added to them
    within: float = 1e-4  # of transformers' layer outputs and logits
    new: int = NEW  # greedy tokens that are compared
    text_only: bool = True  # whether a prompt has no image in it at all
    # Writes other forms of the folder, by name, which hold the same parameters.
    copies: Mapping[str, Callable[[Saved, Path], Any]] = dataclasses.field(default_factory=dict)
    ties: bool = False  # whether `make` can tie the head
    turns: Callable[[], tuple[list[Row], list[Row]]] | None = None  # prompts of a first turn, and of a second one
    row: Callable[[np.random.Generator], Row] | None = None  # random, with positions of transformers' rope index
    refused: Sequence[Refused] = ()  # configs
    prompts: Callable[[], list[Row]] | None = None  # for `unfit`, if not `rows`
    # Other arrays of the processor (or functions of those of `prompts`), and what the error says.
    unfit: Sequence[tuple[dict[str, Any], str]] = ()
    # Asserts what vision tokens receive of the last block's attention, [B, 1, heads, T].
    attention: Callable[[Saved, vlkv.Inputs, np.ndarray], None] | None = None


TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def make(kind: str, *, text: Mapping[str, Any], vision: Mapping[str, Any], seed: int = 0, **others: Any):
    """transformers' model of a config with all parameters perturbed; `text`: fields that differ from `TEXT`."""
    fields = dict(tie_word_embeddings=False) | others
    config = transformers.AutoConfig.for_model(kind, text_config=TEXT | text, vision_config=dict(vision), **fields)
    torch.manual_seed(seed)  # some parameters keep their first values
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    perturb(model, seed)
    return model


def raw_of(folder) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def new_names(saved: Saved, folder: Path) -> None:
    saved.model.save_pretrained(folder, save_original_format=False)


def save_file(tensors, path) -> None:
    from safetensors.torch import save_file as save_tensors

    save_tensors(tensors, path, {"format": "pt"})


def normal(rng: np.random.Generator, *shape: int) -> list[np.ndarray]:
    return list(rng.normal(size=shape).astype(np.float32))


def prompt(rng, words: int, runs: Sequence[list[int]], kinds: tuple[str, int] | None = None, **extra: Any) -> Row:
    """Words, between which are `runs` of an image token; `kinds`: the array of token types, and that token."""
    ids, place = rng.integers(3, 90, words).tolist(), 1
    for run in runs:
        ids[place:place] = run
        place += len(run) + 2
    types = {} if kinds is None else {kinds[0]: [[int(token == kinds[1]) for token in ids]]}
    return Row(ids, types | (extra if runs else {}))


def joined(rows: list[Row], padding: str | Sequence[str] = "right") -> dict[str, Any]:
    """One batch, padded on one side, or on one side for each row; the other arrays of all rows are joined in lists."""
    batch: dict[str, Any] = padded([row.ids for row in rows], padding)
    for row in rows:
        for name, value in row.extra.items():
            batch.setdefault(name, []).extend(value)
    return batch


def whole(*turns: Row) -> Row:
    names = dict.fromkeys(name for turn in turns for name in turn.extra)
    extra = {name: [one for turn in turns for one in turn.extra.get(name, ())] for name in names}
    for name in names:
        if name.endswith("token_type_ids"):
            extra[name] = [[kind for kinds in extra[name] for kind in kinds]]
    return Row([token for turn in turns for token in turn.ids], extra)


@partial(jax.jit, static_argnames=("before", "blocks"))
def read(params, inputs, *, before: bool = False, blocks: tuple[int, ...] = ()):
    """The first layer's input, all outputs (`before`: of the tower's features), logits, and the tower's attention."""
    embedded, states, decoder = params.embed(inputs, blocks), [], params.decoder

    def note(i, carry, x):
        added = decoder.add_features(embedded.added, i, x)
        states.append(x if before else added)
        return carry, added, None

    attend = attend_to_prompt(decoder, inputs.valid, decoder.until(inputs.is_vision))
    recur = recur_over_prompt(inputs.valid)
    _, x = decoder.walk(None, embedded.x, inputs.positions, attend, note, recur=recur)
    return jnp.stack([embedded.x, *states]), decoder.logits(x), embedded.attention


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
) -> tuple[vlkv.Inputs, np.ndarray | None]:
    """Asserts layer outputs and logits `within` theirs; returns the batch and the attention in blocks of the tower."""
    batch = joined(rows, padding)
    inputs = vlkv.Inputs.from_hf(batch, params.config)
    states, logits, attention = (None if x is None else np.asarray(x) for x in read(params, inputs, **options))
    mask = np.asarray(batch["attention_mask"], bool)
    width = mask.shape[1]
    for i, (hidden, theirs, _) in enumerate(answers):
        for ours, wanted in zip(states[:-1], hidden[:-1], strict=True):  # transformers' last state is after the norm
            np.testing.assert_allclose(ours[i, :width][mask[i]], wanted, atol=within)
        np.testing.assert_allclose(logits[i, :width][mask[i]], theirs, atol=within)
    assert np.concatenate([theirs for _, theirs, _ in answers]).std() >= 1
    return inputs, attention


def check_answers(params, rows: list[Row], answers, padding: str | Sequence[str] = "right") -> None:
    inputs = vlkv.Inputs.from_hf(joined(rows, padding), params.config)
    sampling = vlkv.Greedy(max_new_tokens=len(answers[0][2]), stop=())
    output = programs.generate(params, inputs, sampling=sampling)
    for row, (_, _, tokens) in enumerate(answers):
        np.testing.assert_array_equal(output.tokens[row], tokens)


def sums_to_one(saved: Saved, inputs: vlkv.Inputs, received: np.ndarray) -> None:
    """Asserts that the attention of each picture's tokens sums to one, and that it is in the order of the tokens."""
    for row, pictures in enumerate(inputs.grid[..., 0]):
        for number in range(pictures.max() + 1):
            each = received[row, 0][:, pictures == number]
            np.testing.assert_allclose(each.sum(axis=-1), 1, atol=1e-5)
            assert each.std(axis=-1).min() > 1e-4


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


def check_refused(raw, refused: Refused, **options) -> None:
    """Asserts that a config with other fields is refused in a short message; `options`: of `config_from_hf`."""
    part, change, says = refused
    changed = raw | (change if part is None else {part: raw[part] | change})
    with pytest.raises(vlkv.InputError, match=says) as error:
        config_from_hf(changed, **options)
    assert len(str(error.value)) <= 200
