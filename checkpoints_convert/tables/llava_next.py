"""LLaVA-NeXT and OneVision: decoder, CLIP or SigLIP tower, projector, newline."""

from __future__ import annotations

import re
from collections.abc import Iterator

from checkpoints_convert.tables import llava
from checkpoints_convert.tables.decoder import decoder
from checkpoints_convert.tables.entry import Entry
from vlkv.config import ClipConfig, ModelConfig, SiglipConfig

RENAMES = (*llava.RENAMES, (r"^image_newline$", "model.image_newline"))
_UNUSED = re.compile(r"^model\.vision_tower\.(?:post_layernorm\.|head\.|encoder\.layers\.(\d+)\.)")


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    yield from decoder(config.decoder, "model.language_model.")
    if isinstance(config.vision, ClipConfig):
        yield from llava.tower(config.vision, "model.vision_tower.")
    else:
        assert isinstance(config.vision, SiglipConfig)
        yield from siglip(config.vision, "model.vision_tower.")
    yield from llava.projector(config, "model.multi_modal_projector.")
    yield Entry("model.image_newline", "newline", (config.decoder.width,))


def ignored(key: str, config: ModelConfig) -> bool:
    """Tower layers behind the feature layer, and the norm and the pooling after them."""
    match = _UNUSED.match(key)
    if match is None or not isinstance(config.vision, ClipConfig | SiglipConfig):
        return False
    return match[1] is None or int(match[1]) >= config.vision.blocks


def siglip(c: SiglipConfig, prefix: str) -> Iterator[Entry]:
    """All tensors of a SigLIP tower up to its feature layer."""
    d = c.width
    yield Entry(prefix + "embeddings.patch_embedding.weight", "vision.patch", (d, 3, c.patch_size, c.patch_size))
    yield Entry(prefix + "embeddings.patch_embedding.bias", "vision.patch_bias", (d,))
    yield Entry(prefix + "embeddings.position_embedding.weight", "vision.position.weight", (c.grid**2, d))
    yield from llava.blocks(c, prefix)
