"""EVE: decoder, patch layer, projector. What served its training alone is ignored."""

from __future__ import annotations

import re
from collections.abc import Iterator

from checkpoints_convert.tables.decoder import decoder
from checkpoints_convert.tables.entry import Entry, affine, rows
from vlkv.config import EveVisionConfig, ModelConfig

RENAMES = ()
_UNUSED = re.compile(r"^model\.(?:vision_clip|vision_tower_compressor)\.")


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    c, width = config.vision, config.decoder.width
    assert isinstance(c, EveVisionConfig)
    d, prefix = c.width, "model.vision_tower."
    yield from decoder(config.decoder, "model.")
    yield Entry(prefix + "patch_embedding.weight", "vision.patch", (d, 3, c.patch_size, c.patch_size))
    yield Entry(prefix + "class_embedding", "vision.class_token", (d,))
    yield Entry(prefix + "split_embedding", "vision.split_token", (d,))
    for name, ours in (("local_attention", "within"), ("global_attention", "whole")):
        key, path = f"{prefix}{name}.", f"vision.{ours}."
        yield from affine(key + "q.0", path + "query_norm", (d,))
        yield Entry(key + "q.1.weight", path + "query.weight", (d, d))
        yield from affine(key + "kv.0", path + "key_norm", (d,))
        yield rows(key + "kv.1.weight", path + "key.weight", (2 * d, d), 0, d)
        yield rows(key + "kv.1.weight", path + "value.weight", (2 * d, d), d, d)
        yield from affine(key + "proj", path + "out", (d, d))
    yield from affine("model.mm_projector.0", "projector.first", (width, d))
    yield from affine("model.mm_projector.2", "projector.second", (width, width))


def ignored(key: str, config: ModelConfig) -> bool:
    """The teacher of its training, and what compared the decoder with it."""
    del config
    return bool(_UNUSED.match(key))
