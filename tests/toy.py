"""A whole family, as docs/architecture.md describes it. tests/families/test_toy.py adds it to the table of families."""

from checkpoints_convert.entry import Fused, Names
from vlkv.families.decoders.kinds import read_decoder
from vlkv.families.family import Family, VisionLanguageModel
from vlkv.families.names import below, decoder
from vlkv.processing.host import SquareConfig
from vlkv.towers.vit import ClipConfig


# Reads config.json. SquareConfig turns images into arrays: every image becomes one square of tokens.
class ToyConfig(SquareConfig):
    prompt_format = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"

    @classmethod
    def read(cls, raw):
        vision = ClipConfig.from_hf(raw["vision_config"], -1, keep_class_token=True)
        return {"decoder": read_decoder(raw), "vision": vision, "image_token": raw["image_token"]}


# A config.json of the family.
RAW = dict(
    model_type="toy", image_token=3,
    text_config=dict(model_type="llama", vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2),
    vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                       patch_size=7),
)  # fmt: skip


# Our name of each module of the tower -> its name in the checkpoint, where queries, keys and values are one tensor.
TOWER: dict[str, str | Fused] = {
    "patch": "patches", "class_token": "class", "position": "places", "first_norm": "norm",
    "blocks.*.attention_norm": "*.norm1", "blocks.*.out": "*.out", "blocks.*.mlp_norm": "*.norm2",
    "blocks.*.up": "*.up", "blocks.*.down": "*.down",
    **{f"blocks.*.{name}": Fused("*.qkv") for name in ("query", "key", "value")},
}  # fmt: skip


def names(config):
    joined = below("vision.", "eyes.", TOWER) | below("projector.", "bridge.", {"first": "0", "second": "1"})
    return Names(ours=decoder(config, "mouth.") | joined)


FAMILIES = {"toy": Family(config=ToyConfig, model=VisionLanguageModel, names=names)}
