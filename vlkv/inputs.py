"""Inputs: the model's input, a pytree made by the processor. Its static bounds are part of jit's cache key.

Also the random keys that public functions accept.

Axes: B batch · T padded prompt length · A position axes (1; 3 for M-RoPE) · I images, tiles or frames of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from vlkv.buckets import Buckets, round_up
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.files import one_line

# The processor makes numpy arrays; inside jit they are jax arrays.
if TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = np.ndarray | jax.Array

# Arrays of `Inputs` with values for each token -> the value in padding.
_FILLS = {"tokens": 0, "positions": 0, "valid": 0, "vision_index": -1, "grid": -1, "tiles": -1, "frame": -1}

_KEY = "pass key=jax.random.key(seed)"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Static bounds on the tokens of a row: the fields `max_*` of `Inputs`."""

    vision: int
    text: int
    instruction: int
    images: int = 1
    placeless: int = 0

    @property
    def sizes(self) -> dict[str, Any]:
        """The bounds from which the sizes of caches follow, as arguments of the functions of `compression/sizes.py`."""
        return {"vision": self.vision, "text": self.text, "images": self.images, "placeless": self.placeless}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """A padded batch of prompts. Rows may be padded on either side.

    The bounds are static: two batches with equal bounds and shapes share one trace.
    """

    tokens: Int[AnyArray, "B T"]
    positions: Int[AnyArray, "B T A"]  # of RoPE; in `extend` relative to the end of the cache, so they may be negative
    valid: Bool[AnyArray, "B T"]
    vision_index: Int[AnyArray, "B T"]  # index in the list of the batch's vision embeddings; -1: text
    grid: Int[AnyArray, "B T 3"]  # (image number in the prompt, line, column) of the patch; -1: none
    pixels: Float[AnyArray, " I *pixels"] | None  # input of the family's tower
    # For images that are cut into tiles: [..., 0] the token's own tile, numbered in the prompt; [..., 1] for tokens of
    # an overview, the tile that shows the same part of the image. -1: none. None: no image is cut into tiles.
    tiles: Int[AnyArray, "B T 2"] | None = None
    # For frames of videos: the number of the token's frame in its video, from 0. -1: none. None: there are no videos.
    frame: Int[AnyArray, "B T"] | None = None
    # Further arrays for the family's model; see the family's inputs.py.
    layout: dict[str, AnyArray] = dataclasses.field(default_factory=dict)
    max_vision: int = dataclasses.field(metadata={"static": True})  # vision tokens of any row
    max_text: int = dataclasses.field(metadata={"static": True})  # text tokens of any row
    max_instruction: int = dataclasses.field(metadata={"static": True})  # text after the last vision token
    max_images: int = dataclasses.field(metadata={"static": True})  # images of any row
    # Vision tokens of any row without a place on the grid, such as the ends of lines, beyond one for each image.
    max_placeless: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def bounds(self) -> Bounds:
        """The static bounds on the tokens of any row."""
        return Bounds(**{field.name: getattr(self, f"max_{field.name}") for field in dataclasses.fields(Bounds)})

    @property
    def is_vision(self) -> Bool[AnyArray, "B T"]:
        """Which tokens are vision tokens."""
        return self.vision_index >= 0

    @property
    def lengths(self) -> Int[np.ndarray, " B"] | None:
        """Number of tokens of each row; None if it is unknown: under jit, or if another host has some of them."""
        valid = self.valid
        if isinstance(valid, jax.core.Tracer) or (isinstance(valid, jax.Array) and not valid.is_fully_addressable):
            return None
        return np.asarray(valid).sum(axis=1)

    @classmethod
    def of(cls, given: Inputs | Mapping[str, Any], config: ModelConfig) -> Inputs:
        """Converts the output of a transformers processor; returns `Inputs` unchanged.

        Raises:
            InputError: `given` is of another type, or contains traced arrays, which cannot be converted on the host;
                or as `from_hf`.
        """
        if isinstance(given, Inputs):
            return given
        is_mapping = isinstance(given, Mapping)
        if is_mapping and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(list(given.values()))):
            return cls.from_hf(given, config)
        what = "a transformers batch under jit" if is_mapping else type(given).__name__
        raise InputError(
            f"inputs: {what} cannot be used here; make them with the processor of vlkv.load, or outside jit with "
            "vlkv.Inputs.from_hf(batch, params.config); vlkv.answer takes pictures"
        )

    @classmethod
    def from_hf(cls, batch: Mapping[str, Any], config: ModelConfig, buckets: Buckets | None = None) -> Inputs:
        """Converts the output of the family's transformers processor: input_ids, attention_mask, pixel_values etc.

        Args:
            batch: arrays, lists or tensors of torch, on any device; the image token must be repeated once per vision
                token.
            config: the model's config (`params.config`).
            buckets: how to round lengths and counts; None for the defaults.

        Raises:
            InputError: values that are not arrays of numbers, image tokens and pixels that do not match, or a prompt
                beyond the model's limit.
        """
        buckets = buckets or Buckets()
        if "input_ids" not in batch:
            raise InputError(f"inputs have no input_ids (found: {', '.join(sorted(map(str, batch))) or 'nothing'})")
        for name in ("inputs_embeds", "past_key_values"):
            if batch.get(name) is not None:
                raise InputError(f"inputs: {name} is not supported; give input_ids of the whole prompt")
        batch = {name: _on_host(name, value) for name, value in batch.items()}
        tokens = _ids(batch["input_ids"])
        mask = batch.get("attention_mask")
        valid = np.ones(tokens.shape, bool) if mask is None else _mask(mask)
        _check_prompts(tokens, valid, config)
        try:
            arranged = config.arrange(batch, tokens.astype(np.int32), valid, buckets)
        except InputError:
            raise
        except (TypeError, ValueError) as error:  # numpy's errors for texts, and for lists of unequal lengths
            raise InputError(f"inputs are not arrays of numbers: {one_line(error)[:120]}") from error

        if batch.get("position_ids") is not None:
            _check_positions(batch["position_ids"], arranged.positions, valid)
        return cls._rounded(
            buckets,
            # The id of the image token may be outside the vocabulary.
            tokens=np.where(valid & (tokens < config.decoder.vocab_size), tokens, 0).astype(np.int32),
            valid=valid,
            **vars(arranged),
        )

    def with_ends(
        self, dropped: Sequence[int], ends: Sequence[Int[np.ndarray, " _t"]], buckets: Buckets | None = None
    ) -> Inputs:
        """The prompts with other text at their ends. On the host, like `from_hf`.

        Each row loses `dropped` tokens of text at its end, and gets the ids in `ends` instead.

        Raises:
            InputError: the rows are not padded on the right, or a row would lose an image token or all tokens.
        """
        lengths, is_vision = np.asarray(self.valid).sum(axis=1), np.asarray(self.is_vision)
        place = np.arange(self.tokens.shape[1])
        kept = place < (lengths - dropped)[:, None]
        if (np.asarray(self.valid) != (place < lengths[:, None])).any():
            raise InputError("only rows that are padded on the right can get other ends")
        if (is_vision & ~kept).any() or not kept[:, 0].all():
            raise InputError("a prompt would lose an image token, or all its tokens: the end to replace must be text")
        longest = int((lengths - dropped + [len(end) for end in ends]).max())

        def beginnings(x: Any, fill: int) -> np.ndarray:
            x = np.asarray(x)
            x = np.where(kept.reshape(kept.shape + (1,) * (x.ndim - 2)), x, x.dtype.type(fill))[:, :longest]
            return _padded(x, longest - x.shape[1], fill)

        arrays = {name: getattr(self, name) for name in _FILLS}
        rows: Any = {name: beginnings(x, _FILLS[name]) for name, x in arrays.items() if x is not None}
        tokens, positions, valid = rows["tokens"], rows["positions"], rows["valid"]
        for row, end in enumerate(ends):
            begin = lengths[row] - dropped[row]
            new = slice(begin, begin + len(end))
            tokens[row, new], valid[row, new] = end, True
            # As in `extend`: positions continue after the greatest one of all axes.
            positions[row, new] = positions[row, :begin].max() + 1 + np.arange(len(end))[:, None]
        unchanged = {name: getattr(self, name) for name in ("pixels", "layout", "max_vision", "max_images")}
        return Inputs._rounded(buckets or Buckets(), **rows, **unchanged)

    @classmethod
    def _rounded(cls, buckets: Buckets, *, max_vision: int, **fields: Any) -> Inputs:
        """Computes the bounds on the text, and pads the rows so that T depends only on bounds."""
        valid, is_vision, grid = fields["valid"], fields["vision_index"] >= 0, fields["grid"]
        place = np.arange(valid.shape[1])
        last_vision = np.where(is_vision, place, -1).max(axis=1)  # -1 without an image: the whole row is instruction
        instruction = (valid & (place > last_vision[:, None])).sum(axis=1)
        max_text = round_up(int((valid & ~is_vision).sum(axis=1).max()), buckets.text)
        extra = max(0, max_vision + max_text - valid.shape[1])
        for name, fill in _FILLS.items():
            if fields.get(name) is not None:
                fields[name] = _padded(fields[name], extra, fill)
        placeless = int((is_vision & (grid[..., 1] < 0)).sum(axis=1).max()) - fields["max_images"]
        return cls(
            **fields,
            max_vision=max_vision,
            max_text=max_text,
            max_instruction=min(max_text, round_up(int(instruction.max()), buckets.text)),
            max_placeless=min(max_vision, round_up(max(placeless, 0), buckets.vision)),
        )


def _padded(x: np.ndarray, extra: int, fill: int) -> np.ndarray:
    """Rows with more tokens of padding at the end."""
    return np.pad(x, [(0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)


def _on_host(name: str, value: Any) -> Any:
    """The value with numpy arrays in place of tensors of torch, which this module does not import.

    numpy cannot read a tensor that has a gradient, is on another device, or is of bfloat16.
    """
    if isinstance(value, list | tuple) and any(hasattr(element, "detach") for element in value):
        return [_on_host(name, element) for element in value]
    if not hasattr(value, "detach"):
        return value
    try:
        tensor = value.detach().cpu()
        return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)
    except (RuntimeError, TypeError, ValueError) as error:  # on the meta device; sparse; quantised
        raise InputError(f"{name}: this tensor has no values to read: {one_line(error)[:120]}") from None


def _check_prompts(tokens: Int[np.ndarray, "B T"], valid: Bool[np.ndarray, "_ _"], config: ModelConfig) -> None:
    """Raises InputError for a mask of another shape, empty or long prompts, and ids outside the vocabulary."""
    if valid.shape != tokens.shape:
        raise InputError(f"attention_mask has shape {valid.shape}, input_ids {tokens.shape}")
    if not valid.any(axis=1).all():
        raise InputError("a prompt of the batch is empty: every row needs at least one token")
    is_image = np.zeros(tokens.shape, bool) if config.image_token is None else tokens == config.image_token
    longest, limit = int(valid.sum(axis=1).max()), config.decoder.max_positions
    if longest > limit:
        vision = int((valid & is_image).sum(axis=1).max())
        hint = f" ({vision} of them from images: give fewer images)" if vision else ""
        raise InputError(f"the prompt has {longest} tokens, the model's limit is {limit}{hint}")
    text = tokens[valid & ~is_image]
    if (text < 0).any() or (text >= config.decoder.vocab_size).any():
        raise InputError(f"a token id is outside the vocabulary of {config.decoder.vocab_size} tokens")


def _check_positions(values: Any, positions: Int[np.ndarray, "B T A"], valid: Bool[np.ndarray, "B T"]) -> None:
    """Raises InputError unless `position_ids` [B, T] or [axes, B, T] are those that follow from the prompt."""
    ids = np.asarray(values)
    if ids.ndim == 3:  # a fourth axis, the first one, counts the text in some versions of transformers
        ids = np.moveaxis(ids, 0, -1)[..., -positions.shape[-1] :]
    ids = ids if ids.ndim == 3 else np.atleast_2d(ids)[..., None]
    try:
        same = (np.broadcast_to(ids, positions.shape) == positions)[valid].all()
    except ValueError:  # of another length
        same = False
    if not same:
        wanted = "those that follow from the prompt"
        raise InputError(f"inputs: position_ids other than {wanted} are not supported; leave them out")


def _ids(values: Any) -> Int[np.ndarray, "B T"]:
    """`input_ids` as 64-bit integers, so that ids outside the vocabulary are not wrapped into it."""
    ids = _rows("input_ids", values)
    if ids.ndim != 2 or not (np.issubdtype(ids.dtype, np.integer) or not ids.size):
        raise InputError(f"input_ids must be whole numbers [B, T], not {ids.dtype} {list(ids.shape)}")
    return ids.astype(np.int64)


def _mask(values: Any) -> Bool[np.ndarray, "B T"]:
    mask = _rows("attention_mask", values)
    if not np.isin(mask, (0, 1)).all():
        others = "packed prompts and masks that are added to logits are not supported"
        raise InputError(f"attention_mask must be 1 for tokens and 0 for padding; {others}")
    return mask.astype(bool)


def _rows(name: str, values: Any) -> np.ndarray:
    try:
        return np.atleast_2d(np.asarray(values))
    except ValueError:  # numpy's error for a ragged list
        raise InputError(f"{name}: rows differ in length; call the processor with padding=True") from None


def single_key(key: object) -> Key[Array, ""] | None:
    """The key as one of `jax.random.key`; None stays None.

    Args:
        key: from `jax.random.key` or `jax.random.PRNGKey`, which give the same random numbers; it may be traced.

    Raises:
        InputError: an array of several keys, or no key.
    """
    if key is None:
        return None
    if not isinstance(key, jax.Array):
        what = repr(key) if isinstance(key, int | float | str) else f"of type {type(key).__name__}"
        raise InputError(f"key {what[:60]} is not a random key: {_KEY}")
    wrong = InputError(f"key of {key.dtype} {list(key.shape)} is not a random key: {_KEY}")
    typed, raw = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key), key.dtype == "uint32"
    if not (typed or raw):
        raise wrong
    if key.ndim != raw:
        raise InputError(
            f"key has shape {list(key.shape)}: pass one key, key=jax.random.key(seed), for the whole batch"
        )
    try:
        return key if typed else jax.random.wrap_key_data(key)
    except (TypeError, ValueError):
        raise wrong from None


def required_key(key: object) -> Key[Array, ""]:
    """`single_key` for functions that always draw; raises InputError for None too."""
    single = single_key(key)
    if single is None:
        raise InputError(f"no key is given: {_KEY}")
    return single
