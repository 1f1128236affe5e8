"""Configs of models, frozen and hashable, and functions that read them from a Hugging Face `config.json`.

A field that would change the output and is not supported raises an error with its name; it is never ignored. The
fields of one family are in its file in `vlkv/families`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from typing_extensions import TypeIs

from vlkv.buckets import Buckets
from vlkv.errors import InputError

Raw = Mapping[str, Any]
_LARGEST = 3e38  # of float32


def require(field: str, value: object, *supported: object) -> None:
    """Raises InputError unless a field of `config.json` has one of the supported values."""
    if value not in supported:
        only = " and ".join(map(repr, supported))
        raise InputError(f"config.json: {field}={value!r} is not supported (only {only})")


def require_all(raw: Raw, supported: Raw, prefix: str = "") -> None:
    """Raises InputError unless every field of `supported` is missing from `raw` or has the value given there."""
    for field, value in supported.items():
        require(prefix + field, raw.get(field, value), value)


def positive(field: str, value: object) -> int:
    """Returns `value` if it is a whole number of at least 1, else raises InputError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: {field}={value!r} must be a whole number of at least 1")
    return value


def number(field: str, value: object, *, above: float = 0) -> float:
    """Returns `value` if it is a finite number greater than `above`, else raises InputError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value < _LARGEST:
        raise InputError(f"config.json: {field}={value!r} must be a number greater than {above:g}")
    return float(value)


def token_id(raw: Raw, *fields: str, default: int) -> int:
    """The token id in the first of these fields of `config.json` that is not missing or null, else the default."""
    field, value = next(((field, raw[field]) for field in fields if raw.get(field) is not None), ("", default))
    if not is_token_id(value):
        raise InputError(f"config.json: {field}={value!r} must be a token id, a whole number of at least 0")
    return value


def is_token_id(value: object) -> TypeIs[int]:
    """Whether the value is a whole number of at least 0; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def positives(raw: Raw, fields: Iterable[str], prefix: str = "") -> None:
    """Raises InputError unless all these fields are whole numbers of at least 1."""
    for field in fields:
        positive(prefix + field, raw.get(field))


def filled(raw: Raw, defaults: Raw) -> dict[str, Any]:
    """The fields of `raw`, with defaults for those that are missing or null."""
    return {**defaults, **{field: value for field, value in raw.items() if value is not None}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one decoder, with H/2 channel pairs."""

    theta: float = 1e4  # base of the frequencies
    axes: tuple[int, ...] | None = None  # M-RoPE: position axis of each pair (0 time, 1 line, 2 column); None: one axis
    channels: int | None = None  # the first ones of a head are rotated, and H means this number; None: all
    neighbours: bool = False  # channels 2i and 2i + 1 are a pair, as in GLM; otherwise i and i + H/2, as in Llama
    divisors: tuple[float, ...] | None = None  # of the frequency of each channel pair; None: no scaling
    long: tuple[float, ...] | None = None  # long-RoPE: `divisors` of rows that may exceed `original` positions
    original: int = 0  # long-RoPE: number of positions in the first training
    scale: float = 1.0  # factor of cosine and sine

    @property
    def position_axes(self) -> int:
        """Numbers in the position of a token."""
        return 1 if self.axes is None else 3


class LayerKind(NamedTuple):
    """Full attention, a sliding window or a recurrence; and whether a layer has keys and values of its own."""

    window: int | None  # a query attends to its own token and the `window` - 1 before it; None: to all before it
    number: int  # of layers of the same kind before this one, or, if `shared`, before the owner of its keys and values
    # The layer uses keys and values of the last earlier layer with the same window, and has no memory in the cache.
    shared: bool = False
    recurrent: bool = False  # the layer has a state of constant size in place of keys and values

    @property
    def is_counted(self) -> bool:
        """Whether policies count the layer: it has full attention, and keys and values of its own."""
        return self.window is None and not self.shared and not self.recurrent


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The gated delta rule, which some layers of a decoder have in place of attention; see `decoder/recurrence.py`."""

    layers: tuple[int, ...]  # indices of these layers
    key_heads: int  # heads of queries and keys
    heads: int  # heads of values; `heads` / `key_heads` of them share a key head
    key_dim: int  # channels of a query or key
    value_dim: int
    taps: int  # tokens that the convolution of queries, keys and values sees, including the token itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixtures of experts, which some layers of a decoder have in place of the MLP."""

    layers: tuple[int, ...]  # indices of these layers
    count: int  # experts of a layer
    active: int  # experts that a token passes through
    width: int  # channels of an expert
    normalised: bool  # the shares of a token's active experts sum to 1
    # The MLP gets the layer's input too, and the outputs are added. The router has an RMSNorm and scales of its own.
    beside: bool = False
    activation: str = "silu"  # of the gate
    shared: int | None = None  # channels of an expert that all tokens pass through, times a sigmoid gate; None: none


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputsConfig:
    """Vectors of each token for every layer, mixed into the layer's output (per-layer embeddings, Gemma 3n)."""

    vocab_size: int  # rows of the table
    width: int  # channels of a vector
    pad: int  # id whose row vision tokens have


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of RMSNorm, RoPE, grouped-query attention and gated MLP or mixture of experts."""

    vocab_size: int
    width: int  # D
    mlp_width: int  # of the MLP
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K, of layers with full attention
    head_dim: int  # H, likewise
    norm_eps: float
    max_positions: int
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # an RMSNorm of the queries and one of the keys of each head, before RoPE
    log_from: int | None = None  # log-length scaling: number of tokens from which queries are scaled; see `Decoder`
    tied: bool = False  # the output head is the embedding table
    experts: ExpertsConfig | None = None
    sandwich_norms: bool = False  # an RMSNorm of the outputs of attention and MLP too, before they are added
    norm_offset: float | None = None  # as in `vlkv.decoder.layers.RMSNorm`
    activation: str = "silu"  # of the MLP's gate; see `vlkv.decoder.layers.ACTIVATIONS`
    embedding_scale: float = 1.0  # factor of text embeddings
    query_scale: float | None = 1.0  # factor of queries, besides the 1 / sqrt(H) of attention; None: sqrt(H)
    value_norm: bool = False  # an RMSNorm of the values of each head, without weights
    key_is_value: bool = False  # in layers with full attention, the value is the key before its norm and RoPE
    layer_inputs: LayerInputsConfig | None = None
    layer_scale: bool = False  # a factor of each layer's output
    logit_cap: float | None = None  # logits are cap * tanh(logits / cap)
    shared_layers: int = 0  # the last ones, which use keys and values of an earlier layer; see `LayerKind`
    shared_mlp_width: int | None = None  # of the MLP of these layers; None: `mlp_width`
    sliding_rope: RopeConfig | None = None  # of layers with a window; None: that of the others
    sliding_heads: tuple[int, int] | None = None  # (K, H) of layers with a window; None: those of the others
    windows: tuple[int | None, ...] = ()  # of each layer, in tokens; None: full attention. (): all layers have it
    recurrent: RecurrentConfig | None = None  # layers with a recurrence in place of attention
    gated: bool = False  # outputs of attention are multiplied by the sigmoid of a projection of the layer's input
    image_block: int = 0  # most tokens of an image, which attend to each other both ways in prefill; 0: they do not
    image_block_slides: bool = False  # they do so only in layers with a window
    names: str = ""  # which tensor names the checkpoint has; see vlkv/families/names.py

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        windows, unshared = self.windows or (None,) * self.layers, self.layers - self.shared_layers
        recurrent = () if self.recurrent is None else self.recurrent.layers
        sorts, kinds = [(window is None, i in recurrent) for i, window in enumerate(windows)], []
        for i, window in enumerate(windows):
            alike = (j for j in range(unshared) if windows[j] == window and j not in recurrent)
            owner = i if i < unshared else max(alike)
            number = sorts[:owner].count(sorts[owner])
            kinds.append(LayerKind(window, number, shared=i >= unshared, recurrent=i in recurrent))
        return tuple(kinds)

    @property
    def full_layers(self) -> int:
        """Number of layers that policies count; see `LayerKind.is_counted`."""
        return sum(kind.is_counted for kind in self.kinds)

    @property
    def sliding(self) -> tuple[int, ...]:
        """Window of each layer with a ring."""
        return tuple(kind.window for kind in self.kinds if kind.window is not None and not kind.shared)

    def heads_of(self, kind: LayerKind) -> tuple[int, int]:
        """K and H of a layer."""
        full = self.kv_heads, self.head_dim
        return full if kind.window is None or self.sliding_heads is None else self.sliding_heads

    def mlp_width_of(self, layer: int) -> int:
        """Channels of the layer's MLP; 0: it has only experts."""
        if self.experts is not None and layer in self.experts.layers and not self.experts.beside:
            return 0
        return self.shared_mlp_width or self.mlp_width if self.kinds[layer].shared else self.mlp_width

    @property
    def idle_parameters(self) -> int:
        """Number of parameters of the experts that a token does not pass through, in all layers."""
        e = self.experts
        return 0 if e is None else len(e.layers) * (e.count - e.active) * 3 * e.width * self.width


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Config of a whole model. `vision` and the token ids are None for a family without a tower.

    The config of a family derives from `HostConfig` in vlkv/processing/host.py. It reads `config.json` and converts
    images on the host, so code outside `vlkv/families` does not depend on the family.
    """

    family: str  # `model_type`
    decoder: DecoderConfig
    vision: Any = None  # the tower's config
    image_token: int | None = None
    video_token: int | None = None
    projector_bias: bool = True
    wiring: Any = None  # the family's own settings
    stop: tuple[int, ...] = ()  # ids that end a sequence
    generation: tuple[tuple[str, Any], ...] = ()  # see `read_generation` of vlkv.families

    # Arrays of Inputs without an axis for the rows of the batch -> the buckets of their first axes.
    whole_batch: ClassVar[Mapping[str, tuple[str, ...]]] = {"pixels": ("images",)}

    @classmethod
    def read(cls, raw: Raw) -> dict[str, Any]:
        """Reads a `config.json`: name of each field of this class, except `family` -> its value.

        Args:
            raw: its fields, and two more: `generation_config` (the fields of that file) and `added_tokens` (text of
                each token that was added to the tokenizer -> its id).

        Raises:
            InputError: a value is not supported, or tower and decoder do not fit together.
        """
        raise NotImplementedError

    def arrange(self, batch: Raw, tokens: Any, valid: Any, buckets: Buckets) -> Any:
        """Maps each image token to its vision embedding: `Arranged` of vlkv/processing/arranging.py.

        Args:
            batch: array name -> array, as the family's processor in transformers returns them.
            tokens: ids [B, T].
            valid: False for padding [B, T].
            buckets: how to round lengths and counts.

        Raises:
            InputError: image tokens and pixels that do not match.
        """
        raise NotImplementedError

    def sample(self, pictures: int, max_tokens: int) -> tuple[dict[str, Any], int]:
        """Images of zeros for one prompt, to plan and to time a job, as `batch` of `arrange`, and their vision tokens.

        Args:
            pictures: number of images.
            max_tokens: limit on the vision tokens of all images together. Only families whose tower accepts images of
                any size use it; other images have the tower's size, or `PICTURE` before they are cut or resized.
        """
        raise NotImplementedError

    def max_pictures(self, max_tokens: int) -> int:
        """The greatest number of images with at most `max_tokens` vision tokens, at least 1; 0 without a tower."""
        if self.vision is None:
            return 0
        best = 1
        while best < 4096 and self.sample(best + 1, max_tokens)[1] <= max_tokens:
            best += 1
        return best
