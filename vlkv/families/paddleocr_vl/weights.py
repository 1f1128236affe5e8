"""Tensor names of PaddleOCR-VL: decoder, SigLIP tower, projector; in the form of transformers 5 or of the authors."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names, Shaped
from vlkv.config import ModelConfig
from vlkv.families.llava.weights import TOWER
from vlkv.families.qwen2_vl.weights import RENAMES
from vlkv.families.text.weights import below, decoder


def names(config: ModelConfig) -> Names:
    """The names of all parameters. SigLIP's pooling head and another table of positions are published and unused."""
    side = config.vision.patch_size
    own: dict[str, Name] = {
        "patch.weight": Shaped("embeddings.patch_embedding.weight", (-1, 3, side, side)),
        "patch.bias": TOWER["patch_bias"], "positions": TOWER["position"], "norm": TOWER["last_norm"],
    }  # fmt: skip
    projector: dict[str, Name] = {"norm": "pre_norm", "first": "linear_1", "second": "linear_2"}
    return Names(
        ours=decoder(config, "model.language_model.")
        | below("vision.", "model.visual.vision_model.", TOWER | own)
        | below("projector.", "model.projector.", projector),
        renames=(*RENAMES, (r"^mlp_AR\.", "model.projector.")),
        unused=r"^model\.visual\.vision_model\.(?:head|embeddings\.packing_position_embedding)\.",
    )  # fmt: skip
