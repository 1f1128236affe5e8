"""Tiny LLaVA-NeXT, LLaVA-NeXT-Video, LLaVA-OneVision and LLaVA-Video models, their prompts and records.

transformers has no class for LLaVA-Video: its towers and layers are used, the arrangement of frames is this file's own.
"""

import copy
import json
from functools import partial

import numpy as np

from tests.families import forms
from tests.families.common import Record, Row, fields, make, new_names, outer, save_file
from tests.families.forms import Tiny, tiled, tiny_text
from tests.parity.conftest import torch
from vlkv.families.llava_next.inputs import Views

IMAGE, VIDEO = 99, 98

# --- LLaVA-NeXT -------------------------------------------------------------------------------------------------------

SIDE, PATCH = 28, 7  # 16 patches a tile
NEXT_PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
SIZES = [(30, 50), (90, 21), (61, 60), (20, 21), (7, 40)]


def make_next(kind: str = "llama", *, video: bool = False):
    changes = {"sliding_window": None} if kind == "mistral" else {}
    tower = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=SIDE,
                 patch_size=PATCH, model_type="clip_vision_model")  # fmt: skip
    return make(
        "llava_next_video" if video else "llava_next", text=dict(model_type=kind) | changes, vision=tower,
        image_token_index=IMAGE, image_grid_pinpoints=NEXT_PINPOINTS, **({"video_token_index": VIDEO} if video else {}),
    )  # fmt: skip


def next_tiles(size) -> int:
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    return image_size_to_num_patches(list(size), NEXT_PINPOINTS, SIDE)


def pixels_of(sizes, rng) -> dict:
    """The arrays of pictures that transformers pads, so that each picture of a batch has as many tiles."""
    most = max(map(next_tiles, SIZES))
    pixels = np.zeros((len(sizes), most, 3, SIDE, SIDE), np.float32)
    for one, size in zip(pixels, sizes, strict=True):
        one[: next_tiles(size)] = rng.normal(size=(next_tiles(size), 3, SIDE, SIDE))
    return {"pixel_values": list(pixels), "image_sizes": [list(size) for size in sizes]}


def next_rows(config, *, video: bool = False) -> list[Row]:
    rng = np.random.default_rng(0)

    def prompt(sizes, text):
        ids = rng.integers(3, 90, text).tolist()
        for at, size in enumerate(sizes):
            ids[2 * at + 1 : 2 * at + 1] = [IMAGE] * len(Views(config).picture(size))
        return Row(ids, pixels_of(sizes, rng) if sizes else {})

    rows = [prompt(SIZES[:1], 9), prompt(SIZES[1:3], 12), prompt([], 7), prompt(SIZES[3:], 5)]
    if video:
        frames = rng.normal(size=(1, 3, 3, SIDE, SIDE)).astype(np.float32)
        rows[3] = Row([5, *[VIDEO] * 12, 7, 8, 9], {"pixel_values_videos": list(frames)})
    return rows


NEXT_UNFIT = (
    ({"image_sizes": None}, "no image_sizes"),
    ({"image_sizes": [[30, 50]]}, "pixel_values has"),
    ({"image_sizes": [[56, 56]] * 5}, "need"),
    ({"pixel_values": np.zeros((5, 2, 3, SIDE, SIDE))}, r"expected \[\d+, 3"),
    ({"pixel_values_videos": np.zeros((1, 2, 3, SIDE, SIDE))}, "does not support videos"),
)

# --- LLaVA-OneVision --------------------------------------------------------------------------------------------------

WIDER, GRID = 22, 3  # 3 x 3 patches of 7 pixels a tile, and one pixel over
ONEVISION_PINPOINTS = [[WIDER * y, WIDER * x] for y in range(1, 4) for x in range(1, 4)]


def make_onevision(tied: bool = False):
    tower = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=WIDER,
                 patch_size=7, vision_use_head=False, model_type="siglip_vision_model")  # fmt: skip
    return make(
        "llava_onevision", text=dict(model_type="qwen2", tie_word_embeddings=tied), vision=tower,
        image_token_index=IMAGE, video_token_index=VIDEO, image_grid_pinpoints=ONEVISION_PINPOINTS,
        vision_aspect_ratio="anyres_max_2", tie_word_embeddings=tied,
    )  # fmt: skip


def onevision_tiles(size) -> int:
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    return image_size_to_num_patches(list(size), ONEVISION_PINPOINTS, WIDER)


def onevision_rows(config) -> list[Row]:
    """One large picture (resized after stitching), two pictures (a tile each), none, a video."""
    rng = np.random.default_rng(0)

    def pixels(*shape):
        return rng.normal(size=(*shape, 3, WIDER, WIDER)).astype(np.float32)

    text = rng.integers(3, 90, (4, 6)).tolist()
    large, small = (60, 50), (9, 30)
    most = onevision_tiles(large)
    pair = np.zeros((2, most, 3, WIDER, WIDER), np.float32)
    pair[:, :1] = pixels(2, 1)
    one = {"pixel_values": list(pixels(1, most)), "image_sizes": [list(large)], "batch_num_images": [1]}
    two = {"pixel_values": list(pair), "image_sizes": [list(small), list(large)], "batch_num_images": [2]}
    return [
        Row([7, *[IMAGE] * len(Views(config).picture(large)), *text[0]], one),
        Row([*[IMAGE] * 10, 8, 9, *[IMAGE] * 10, *text[1]], two),
        Row(text[2]),
        Row([5, *[VIDEO] * len(Views(config).video(3)), *text[3]], {"pixel_values_videos": list(pixels(1, 3))}),
    ]


def mean_attention(saved, inputs, received) -> None:
    """The mean attention received in the last block of transformers' tower; newlines receive nothing."""
    tower = copy.deepcopy(saved.model.model.vision_tower)
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        given = tower(torch.tensor(inputs.pixels), output_attentions=True).attentions[-1].mean(2).numpy()  # [I, N, V]
    flat = given.swapaxes(1, 2).reshape(-1, given.shape[1])
    plain = (inputs.vision_index >= 0) & (inputs.vision_index < len(flat))
    newline = inputs.is_vision & (inputs.grid[..., 1] < 0)
    assert plain.any() and newline.any()
    received = received[:, 0].swapaxes(1, 2)
    np.testing.assert_allclose(received[plain], flat[inputs.vision_index[plain]], atol=1e-6)
    assert (received[newline] == 0).all()


# --- LLaVA-Video ------------------------------------------------------------------------------------------------------

VIDEO_RAW = {
    "architectures": ["LlavaQwenForCausalLM"], "model_type": "llava", "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 120,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 2,
    "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": False,
    "image_aspect_ratio": "anyres_max_2", "image_grid_pinpoints": "(1x1),...,(3x3)", "image_token_index": IMAGE,
    "mm_newline_position": "grid", "mm_spatial_pool_mode": "bilinear", "mm_spatial_pool_stride": 2,
    "mm_projector_type": "mlp2x_gelu", "mm_patch_merge_type": "spatial_unpad", "text_config": {"model_type": "llama"},
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": WIDER, "patch_size": 7,
    },
}  # fmt: skip


def write_video(model, folder) -> None:
    """Under the original names, with what the original files hold besides."""
    names = {
        "model.language_model.": "model.", "model.image_newline": "model.image_newline",
        "model.multi_modal_projector.linear_1.": "model.mm_projector.0.",
        "model.multi_modal_projector.linear_2.": "model.mm_projector.2.",
        "model.vision_tower.": "model.vision_tower.vision_tower.vision_model.", "lm_head.": "lm_head.",
    }  # fmt: skip
    tensors = {}
    for key, value in model.state_dict().items():
        start = next(name for name in names if key.startswith(name))
        tensors[names[start] + key.removeprefix(start)] = value.clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(VIDEO_RAW))


def video_features(model, frames, newline: str, mode: str, stride: int = 2):
    """One video's embeddings: frames projected, then pooled, then newlines (LLaVA-Video, Zhang et al. 2024)."""
    net = model.model
    x = net.multi_modal_projector(net.vision_tower(frames, output_hidden_states=True).hidden_states[-1])
    x = x.transpose(1, 2).unflatten(2, (GRID, GRID))  # [frames, D, h, w]
    if mode == "bilinear":
        side = -(-GRID // stride)
        x = torch.nn.functional.interpolate(x, size=(side, side), mode="bilinear")
    else:
        x = torch.nn.functional.avg_pool2d(x, stride)
    end = net.image_newline
    if newline == "grid":
        x = torch.cat([x, end[None, :, None, None].expand(*x.shape[:3], 1)], dim=3)
    x = x.flatten(2).transpose(1, 2)  # [frames, tokens, D]
    if newline == "frame":
        x = torch.cat([x, end.expand(len(x), 1, -1)], dim=1)
    x = x.flatten(0, 1)
    return torch.cat([x, end[None]]) if newline == "one_token" else x


class FramesModel:
    """LLaVA-OneVision with the frames of LLaVA-Video, and one token for pictures and frames."""

    def __init__(self) -> None:
        self.onevision = make_onevision()

    def __getattr__(self, name: str):
        return getattr(self.onevision, name)

    def __call__(self, input_ids, pixel_values_videos=None, **extra):
        extra.pop("output_hidden_states")
        ids, x = input_ids[0], self.onevision.get_input_embeddings()(input_ids[0])
        if pixel_values_videos is not None:
            x[ids == IMAGE] = video_features(self.onevision, pixel_values_videos[0], "grid", "bilinear")
        elif extra:
            x[ids == IMAGE] = torch.cat(self.onevision.get_image_features(**extra).pooler_output)
        return self.onevision(inputs_embeds=x[None], output_hidden_states=True)


def picture_rows(config) -> list[Row]:
    rng, size = np.random.default_rng(2), (60, 50)
    pixels = rng.normal(size=(1, 10, 3, WIDER, WIDER)).astype(np.float32)
    extra = {"pixel_values": list(pixels), "image_sizes": [list(size)], "batch_num_images": [1]}
    return [Row([5, *[IMAGE] * len(Views(config).picture(size)), 6, 7], extra), Row([8, 9, 10])]


def frame_rows(config) -> list[Row]:
    rng, rows = np.random.default_rng(0), [Row([8, 9, 10])]
    for count in (1, 3):
        words = rng.integers(3, 90, 7).tolist()
        frames = rng.normal(size=(count, 3, WIDER, WIDER)).astype(np.float32)
        ids = [*words[:2], *[IMAGE] * len(Views(config).video(count)), *words[2:]]
        rows.insert(0, Row(ids, {"pixel_values_videos": [frames]}))
    return rows


RECORDS = {
    "llava_next": Record(
        make=make_next, rows=next_rows, copies={"new": new_names}, unfit=NEXT_UNFIT,
        refused=fields(
            None, ("vision_feature_select_strategy", "full"), ("image_grid_pinpoints", [[336, 500]]),
            ("image_grid_pinpoints", [336]), ("vision_feature_layer", [-2, -1]), ("use_image_newline_parameter", False),
        )),
    "llava_next_mistral": Record(make=partial(make_next, "mistral"), rows=next_rows),
    "llava_next_video": Record(
        make=partial(make_next, video=True), rows=partial(next_rows, video=True),
        refused=fields(None, ("spatial_pool_mode", "conv"))),
    "llava_onevision": Record(
        make=make_onevision, rows=onevision_rows, copies={"new": new_names}, ties=True, attention=mean_attention,
        refused=(
            *fields(None, ("vision_feature_select_strategy", "default"), ("vision_aspect_ratio", "square")),
            *fields("vision_config", ("model_type", "clip_vision_model"), ("hidden_act", "gelu")),
        )),
    "llava_video": Record(
        make=FramesModel, rows=picture_rows, write=write_video, new=0,
        refused=(
            *fields(
                None, ("mm_newline_position", "before"), ("mm_spatial_pool_mode", "max"),
                ("mm_projector_type", "linear"), ("mm_patch_merge_type", "flat"), ("add_faster_video", True),
                ("image_aspect_ratio", "pad"), ("image_grid_pinpoints", "all"),
            ),
            *outer(({"mm_vision_tower": "some/other", "vision_config": {}}, "mm_vision_tower")),
        )),
    "llava_video_frames": Record(make=FramesModel, rows=frame_rows, write=write_video, new=0),
}  # fmt: skip


# What needs no torch.
TINY = {
    "llava_next": Tiny(
        raw=dict(text_config=tiny_text("mistral") | dict(sliding_window=None), vision_config=forms.TOWER,
            image_token_index=forms.IMAGE, image_grid_pinpoints=forms.PINPOINTS),
        picture=tiled,
        renames=forms.LLAVA_4,
        processors=(("llava_next", "LlavaNext", forms.CROPPED | dict(image_grid_pinpoints=forms.PINPOINTS)),),
        refused=(({"image_grid_pinpoints": [[28, 28]]}, "different checkpoints"),
            ({"size": {"shortest_edge": 14}, "crop_size": 14}, "tiles of 14 pixels")),
    ),
    "llava_next_video": Tiny(
        raw=dict(text_config=tiny_text(), vision_config=forms.TOWER, image_token_index=forms.IMAGE,
            video_token_index=forms.VIDEO, image_grid_pinpoints=forms.PINPOINTS),
        picture=tiled,
        renames=forms.LLAVA_4,
    ),
    "llava_onevision": Tiny(
        raw=dict(text_config=tiny_text("qwen2"), vision_config=forms.SIGLIP, image_token_index=forms.IMAGE,
            video_token_index=forms.VIDEO, image_grid_pinpoints=forms.PINPOINTS,
            vision_aspect_ratio="anyres_max_2"),
        picture=tiled,
        renames=forms.LLAVA_4,
        processors=(("llava_onevision", "LlavaOnevision",
            dict(image_grid_pinpoints=forms.PINPOINTS, size={"height": forms.SIDE, "width": forms.SIDE})),),
        prompt=forms.SYSTEM + forms.CHATML.format(image="[I]\n"),
    ),
    "llava_qwen": Tiny(
        raw=tiny_text("qwen2") | dict(vision_config=forms.SIGLIP, image_token_index=forms.IMAGE,
            image_grid_pinpoints=forms.PINPOINTS, image_aspect_ratio="anyres_max_2", mm_newline_position="grid"),
        picture=tiled,
        renames=forms.LLAVA_ORIGINAL,
        prompt=forms.SYSTEM + forms.CHATML.format(image="[I]\n"),
    ),
}  # fmt: skip
