"""Original LLaVA-Video checkpoints, against the published description written down here in torch.

transformers has no class for them: its towers and layers are used, the arrangement of the frames is this file's own.
"""

from __future__ import annotations

import json

import numpy as np
import PIL.Image
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import NEW, Row, check_answers, check_states
from tests.families.test_llava_onevision import GRID, PINPOINTS, SIDE, make
from tests.models import same
from tests.parity.conftest import torch
from tests.processing.conftest import make_tokenizer
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.llava_next.inputs import Views
from vlkv.processing import Processor, Video

TOKEN = 99
RAW = {
    "architectures": ["LlavaQwenForCausalLM"], "model_type": "llava", "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 120,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 2,
    "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": False,
    "image_aspect_ratio": "anyres_max_2", "image_grid_pinpoints": "(1x1),...,(3x3)", "image_token_index": TOKEN,
    "mm_newline_position": "grid", "mm_spatial_pool_mode": "bilinear", "mm_spatial_pool_stride": 2,
    "mm_projector_type": "mlp2x_gelu", "mm_patch_merge_type": "spatial_unpad", "text_config": {"model_type": "llama"},
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": 7,
    },
}  # fmt: skip


def save(model, folder) -> None:
    """Under the original names, with what the original files hold besides."""
    from safetensors.numpy import save_file

    names = {
        "model.language_model.": "model.", "model.image_newline": "model.image_newline",
        "model.multi_modal_projector.linear_1.": "model.mm_projector.0.",
        "model.multi_modal_projector.linear_2.": "model.mm_projector.2.",
        "model.vision_tower.": "model.vision_tower.vision_tower.vision_model.", "lm_head.": "lm_head.",
    }  # fmt: skip
    tensors = {}
    for key, value in model.state_dict().items():
        start = next(name for name in names if key.startswith(name))
        tensors[names[start] + key.removeprefix(start)] = value.numpy().copy()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(RAW))


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


def answer(model, row: Row, new: int = 0):
    """Hidden states and logits for one prompt, and its greedy tokens, one forward pass each."""
    ids = torch.tensor(row.ids)
    with torch.no_grad():
        x = model.get_input_embeddings()(ids)
        if "pixel_values_videos" in row.extra:
            frames = torch.tensor(np.concatenate(row.extra["pixel_values_videos"]))
            x[ids == TOKEN] = video_features(model, frames, "grid", "bilinear")
        elif row.extra:
            extra = {name: torch.tensor(np.asarray(value)) for name, value in row.extra.items()}
            x[ids == TOKEN] = torch.cat(model.get_image_features(**extra).pooler_output)
        out = model(inputs_embeds=x[None], output_hidden_states=True)
        tokens = []
        logits = out.logits
        for _ in range(new):
            tokens.append(int(logits[0, -1].argmax()))
            x = torch.cat([x, model.get_input_embeddings()(torch.tensor(tokens[-1:]))])
            logits = model(inputs_embeds=x[None]).logits
    return [state[0].numpy() for state in out.hidden_states], out.logits[0].numpy(), np.array(tokens)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava_video") / "original"
    model = make()
    save(model, folder)
    return model, folder, vlkv.load_params(folder)


def test_converted_once_more(saved, tmp_path):
    _, folder, params = saved
    convert(folder, tmp_path / "converted", progress=False)
    same(params, vlkv.load_params(tmp_path / "converted"))


def rows_with(config, *frames: int) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for count in frames:
        text = rng.integers(3, 90, 7).tolist()
        if not count:
            rows.append(Row(text))
            continue
        video = rng.normal(size=(count, 3, SIDE, SIDE)).astype(np.float32)
        ids = [*text[:2], *[TOKEN] * len(Views(config).video(count)), *text[2:]]
        rows.append(Row(ids, {"pixel_values_videos": [video]}))
    return rows


@pytest.mark.full
def test_videos_of_unequal_length(saved):
    model, _, params = saved
    rows = rows_with(params.config, 3, 1, 0)
    answers = [answer(model, row, NEW) for row in rows]
    inputs = check_states(params, rows, answers, ["right", "left", "right"])
    check_answers(params, rows, answers)
    grid = [[t, y, x] if x < 2 else [t, -1, -1] for t in range(3) for y in range(2) for x in range(3)]
    assert inputs.grid[0, 2:20].tolist() == grid


def test_pictures(saved):
    model, _, params = saved
    rng, size = np.random.default_rng(2), (60, 50)
    count = len(Views(params.config).picture(size))
    pixels = rng.normal(size=(1, 10, 3, SIDE, SIDE)).astype(np.float32)
    extra = {"pixel_values": list(pixels), "image_sizes": [list(size)], "batch_num_images": [1]}
    rows = [Row([5, *[TOKEN] * count, 6, 7], extra), Row([8, 9, 10])]
    check_states(params, rows, [answer(model, row) for row in rows])


@pytest.mark.parametrize("mode", ["bilinear", "average"])
@pytest.mark.parametrize("newline", ["grid", "frame", "one_token", "no_token"])
def test_every_arrangement_of_frames(saved, newline, mode):
    """The sums that the layout asks for, of the projected patches, are the reference's embeddings."""
    model = saved[0]
    raw = {**RAW, "mm_newline_position": newline, "mm_spatial_pool_mode": mode}
    config = config_from_hf(raw)
    frames = np.random.default_rng(3).normal(size=(2, 3, SIDE, SIDE)).astype(np.float32)
    count = len(Views(config).video(2))
    inputs = vlkv.Inputs.from_hf({"input_ids": [[TOKEN] * count], "pixel_values_videos": [frames]}, config)
    net = model.model
    with torch.no_grad():
        wanted = video_features(model, torch.tensor(frames), newline, mode).numpy()
        tower = net.vision_tower(torch.tensor(inputs.pixels), output_hidden_states=True)
        patches = net.multi_modal_projector(tower.hidden_states[-1]).flatten(0, 1).numpy()
    mixed = (patches[inputs.layout["taps"]] * inputs.layout["weights"][..., None]).sum(axis=1)
    embeddings = np.concatenate([patches, mixed, net.image_newline.detach().numpy()[None]])
    assert len(wanted) == count
    np.testing.assert_allclose(embeddings[inputs.vision_index[0, :count]], wanted, atol=1e-4)


def test_processor_of_an_original_folder(saved, tmp_path):
    """No image settings: SigLIP's own. One token for a picture and a video."""
    config = config_from_hf({**RAW, "vocab_size": 300, "image_token_index": 3})
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    processor = Processor.from_folder(tmp_path, config)
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3)).astype(np.uint8))
    inputs = processor(Video(frames=[image, image]), "<video>What is seen?")
    assert inputs.is_vision.sum() == 2 * 2 * 3
    frame = np.asarray(image.resize((SIDE, SIDE), resample=PIL.Image.Resampling.BICUBIC), np.float32)
    np.testing.assert_allclose(inputs.pixels[1], frame.transpose(2, 0, 1) / 127.5 - 1, atol=1e-5)
    pair = processor([[image, image], [image], []], ["Which?", "Where?", "Why?"])
    alone = len(Views(config).picture((40, 30)))
    assert pair.is_vision.sum(axis=1).tolist() == [2 * (GRID**2 + 1), alone, 0]
    with pytest.raises(InputError, match="same token"):
        processor([image, Video(frames=[image])], ["Which?", "Where?"])


def test_published_counts_and_settings():
    """210 tokens a frame; pinpoints as a range or as pairs (width, height)."""
    raw = {**RAW, "mm_vision_tower": "google/siglip-so400m-patch14-384", "vision_config": {"model_type": "clip"},
           "image_aspect_ratio": "anyres_max_9", "image_grid_pinpoints": [[768, 384], [384, 384]]}  # fmt: skip
    config = config_from_hf(raw)
    assert len(Views(config).video(64)) == 64 * 210
    assert config.wiring.pinpoints == ((384, 768), (384, 384))
    assert config.stop == (2,)
    tiny = config_from_hf(RAW).wiring.pinpoints
    assert sorted(tiny) == sorted(map(tuple, PINPOINTS))


@pytest.mark.parametrize(
    "change",
    [
        {"mm_newline_position": "before"}, {"mm_spatial_pool_mode": "max"}, {"mm_projector_type": "linear"},
        {"mm_patch_merge_type": "flat"}, {"add_faster_video": True}, {"image_aspect_ratio": "pad"},
        {"image_grid_pinpoints": "all"}, {"mm_vision_tower": "some/other", "vision_config": {}},
    ],
)  # fmt: skip
def test_settings_that_are_refused(change):
    with pytest.raises(InputError, match=next(iter(change))):
        config_from_hf({**RAW, **change})
