"""What is special about Qwen2-VL to Qwen3.5, but images; `test_every_family.py` has the rest."""

import dataclasses
import json
import re

import jax
import numpy as np
import PIL.Image
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import joined, prefill
from tests.families.common_qwen import apart, make_rows, rewrite_experts
from tests.models import same
from tests.processing.conftest import make_tokenizer, write_files
from vlkv import policies
from vlkv.generation.step import feed
from vlkv.processing import Processor, Video

KINDS = ("qwen2_vl", "qwen2_5_vl")


@pytest.mark.full
def test_a_renumbered_prompt_goes_on_from_its_own_length(saved):
    """LightKV as published numbers what is left anew, alike on all axes; here the prompt ends with an image, too."""
    params, rows = saved("qwen2_vl").params, make_rows(((6, ("image", 1, 8, 8)), (30,)))
    rows[0].ids[-1] = 7  # no longer a mark
    policy = policies.LightKV(layers=(1,), windows=(1,), rho=0.5, variant="released")
    cache, logits = prefill(params, vlkv.Inputs.from_hf(joined(rows), params.config), policy, new_tokens=4)
    assert np.isfinite(logits).all()
    length = np.asarray(cache.counts[:, :, 0])
    assert length.tolist() == [[8 + 16, 30], [8 + 8, 30]]
    np.testing.assert_array_equal(cache.next_position, length[1][:, None].repeat(3, axis=1))


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_a_long_video_comes_after_its_last_frame(saved, kind):
    """The rule of the paper and of transformers 4, written out; transformers 5.23 would put it among the frames."""
    config = saved(kind).params.config
    inputs = vlkv.Inputs.from_hf(joined(make_rows(((1, ("video", 6, 4, 4), 2),), seconds=kind == "qwen2_5_vl")), config)
    step = 1.4 if kind == "qwen2_5_vl" else 1
    frame = np.trunc(np.arange(6) * step).astype(int).repeat(4)
    square = np.tile([[0, 0], [0, 1], [1, 0], [1, 1]], (6, 1))
    last = 2 + frame[-1]
    want = [[0] * 3, [1] * 3, *(2 + np.column_stack([frame, square])), *([last + i] * 3 for i in (1, 2, 3))]
    np.testing.assert_array_equal(inputs.positions[0, : len(want)], want)
    assert inputs.max_images >= 6, "each frame is an image to a policy"
    assert inputs.grid[0, 2:26, 0].tolist() == np.arange(6).repeat(4).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_whole_seconds(saved, kind):
    config = saved(kind).params.config
    whole = dataclasses.replace(config, vision=dataclasses.replace(config.vision, whole_seconds=True))
    batch = joined(make_rows(((1, ("video", 3, 4, 4), 2),))) | {"second_per_grid_ts": [1.6]}
    frames = [vlkv.Inputs.from_hf(batch, c).positions[0, 2:14:4, 0].tolist() for c in (config, whole)]
    assert frames == ([[2, 5, 8], [2, 4, 6]] if kind == "qwen2_5_vl" else [[2, 3, 4]] * 2)


def test_seconds_of_other_videos_are_refused(saved):
    batch = joined(make_rows(((2, ("video", 1, 4, 6), 3),), seconds=True)) | {"second_per_grid_ts": [1.0, 2.0]}
    with pytest.raises(vlkv.InputError, match="second_per_grid_ts"):
        vlkv.Inputs.from_hf(batch, saved("qwen2_5_vl").params.config)


KIND = "qwen3_vl_moe"


def test_single_experts_become_one_tensor_in_orbax(saved, tmp_path):
    rewrite_experts(apart, saved(KIND), tmp_path / "apart")
    made = convert(tmp_path / "apart", tmp_path / "orbax", format="orbax", progress=False)
    same(saved(KIND).params, vlkv.load_params(made))


def test_an_expert_that_is_missing_is_named(saved, tmp_path):
    lost = "layers.2.mlp.experts.4.up"

    def less(key, x):
        return {name: part for name, part in apart(key, x).items() if lost not in name}

    rewrite_experts(less, saved(KIND), tmp_path / "apart")
    with pytest.raises(vlkv.InputError, match=r"missing key .*layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
        vlkv.load_params(tmp_path / "apart")
    rewrite_experts(lambda key, x: {key: x[:, :-1]}, saved(KIND), tmp_path / "short")
    with pytest.raises(vlkv.InputError, match=r"experts\.\w+ has shape"):
        vlkv.load_params(tmp_path / "short")


embed = jax.jit(lambda params, inputs: params.embed(inputs))

TURNS = make_rows(((4, ("image", 1, 4, 6), 3), (2, ("image", 1, 6, 2), 5)))


@pytest.mark.full
def test_features_of_a_later_image_with_a_decode_state(saved):
    """One scan over the tokens is as many calls with one token."""
    params = saved("qwen3_vl").params
    first, second = (vlkv.Inputs.from_hf(joined([row]), params.config) for row in TURNS)
    cache, _ = prefill(params, first, policies.H2O(keep=0.9), new_tokens=24)
    embedded, positions = embed(params, second), cache.next_position[:, None] + second.positions
    run_feed = jax.jit(feed)
    _, together = run_feed(params.decoder, cache, embedded.x, positions, second.valid, embedded.added)
    for i in np.flatnonzero(second.valid[0]):
        one = slice(i, i + 1)
        cache, x = run_feed(params.decoder, cache, embedded.x[:, one], positions[:, one], second.valid[:, one],
                            embedded.added[:, :, one])  # fmt: skip
        np.testing.assert_allclose(together[:, one], x, atol=1e-4)


SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 262144}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
VIDEO_SETTINGS = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 16, "temporal_patch_size": 2,
                  "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 200_000}}  # fmt: skip


@pytest.fixture
def processor(tmp_path) -> Processor:
    """With tokens like those of the published checkpoints, and the form of their prompts."""
    tokenizer = make_tokenizer("<|image_pad|>", bos=False)
    tokenizer.add_special_tokens(["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    template = (
        "{% for m in messages %}<|user|>{% for item in m.content %}"
        "{% if item.type == 'text' %}{{ item.text }}{% else %}"
        "<|vision_start|><|{{ item.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}<|assistant|>"
    )
    write_files(tmp_path, tokenizer, tokenizer_config={"eos_token": "</s>"}, chat_template=template,
                preprocessor_config=SETTINGS, video_preprocessor_config=VIDEO_SETTINGS)  # fmt: skip
    config = dataclasses.replace(vlkv.presets["qwen3-vl-2b"], image_token=3, video_token=260)
    return Processor.from_folder(tmp_path, config)


def frames_of(count: int, height: int = 64, width: int = 96):
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3)).astype(np.uint8)


def test_sizes_of_videos_are_those_of_transformers(processor):
    """Their limits apply to all frames together."""
    theirs = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl").smart_resize
    rng = np.random.default_rng(0)
    for _ in range(300):
        count, (height, width) = int(rng.integers(2, 20)), (int(side) for side in np.exp(rng.uniform(2.5, 7, 2)))
        wanted = theirs(count, height, width, 2, 32, 4096, 200_000)
        assert processor.pictures._scaled(height, width, "video", count) == wanted


def test_the_text_of_a_prompt_with_videos_and_an_image(processor):
    """The prompt text of transformers 5.24: before each pair of frames their mean time, and marks around the video."""
    image = PIL.Image.fromarray(frames_of(1, 300, 300)[0])
    videos = [Video(list(frames_of(5)), fps=2.0), Video(list(frames_of(2, 32, 64)), fps=24.0)]
    inputs = processor([[videos[0], image, videos[1]]], ["one <video> two <image> three <video>?"])
    ids = inputs.tokens[0][inputs.valid[0]]
    text = processor.tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    text = text.replace("<|vision_start|>", "[").replace("<|vision_end|>", "]")
    text = text.replace("<|video_pad|>", "V").replace("<|image_pad|>", "I")
    tokens = 6  # of a frame of 64 x 96 pixels
    assert re.sub("V+|I+", lambda run: f"{run[0][0]}{len(run[0])}", text) == (
        f"<|user|>one [<0.2 seconds>[V{tokens}]<1.2 seconds>[V{tokens}]<2.0 seconds>[V{tokens}]] two [I81] three "
        "[<0.0 seconds>[V2]]?<|assistant|>"
    )
    assert inputs.grid[0][inputs.is_vision[0], 0].max() == 4, "an image and four pairs of frames"
    numbers = inputs.frame[0][inputs.is_vision[0]].tolist()
    assert numbers == [*np.arange(3).repeat(tokens), *[-1] * 81, 0, 0], "of a pair in its video"


def test_patches_of_a_video_are_its_frames(processor):
    frames = frames_of(3)
    read = processor.pictures.read(Video(list(frames), fps=1.0))
    assert read.arrays["video_grid_thw"].tolist() == [2, 4, 6] and set(read.arrays) == {
        "pixel_values_videos", "video_grid_thw"}  # fmt: skip
    patches = read.arrays["pixel_values_videos"].reshape(2, 2, 3, 2, 2, 3, 2, 16, 16)
    for i, frame in enumerate([*frames, frames[-1]]):
        block = (frame[16:32, 80:96] / 255 - 0.5) / 0.5  # second line, last column of patches
        np.testing.assert_allclose(patches[i // 2, 0, 2, 1, 1, :, i % 2], block.transpose(2, 0, 1), atol=1e-6)


def test_times_of_frames_are_those_of_transformers(processor):
    theirs = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor
    indices = [0, 43, 85, 128, 171, 213, 256]
    video = Video(list(frames_of(7)), times=[i / 10 for i in indices])
    said = re.findall(r"<([0-9.]+) seconds>", processor.pictures.video(video).text)
    assert said == [f"{time:.1f}" for time in theirs._calculate_timestamps(None, list(indices), 10.0, 2)]


@pytest.mark.parametrize(("files", "limits"), [
    ({"preprocessor_config.json": SETTINGS | {"image_processor_type": "Qwen2VLImageProcessor"}}, None),
    ({"processor_config.json": {"image_processor": SETTINGS}}, None),
    ({"preprocessor_config.json": SETTINGS, "video_preprocessor_config.json": {}}, (128 * 32**2, 768 * 32**2)),
])  # fmt: skip
def test_settings_for_videos(processor, tmp_path, files, limits):
    """Those of images are not used, as in transformers; a class of its own has defaults of its own."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / name).unlink()
    for name, fields in files.items():
        (tmp_path / name).write_text(json.dumps(fields))
    pictures = processor.config.open_pictures(tmp_path, "checkpoint")
    if limits is None:
        with pytest.raises(vlkv.InputError, match="no settings for videos"):
            pictures.video(Video(list(frames_of(2))))
    else:
        assert (pictures.settings["video"].least, pictures.settings["video"].most) == limits


def test_a_video_of_one_frame_is_refused(processor):
    with pytest.raises(vlkv.InputError, match="at least 2 frames: give a single frame as an image"):
        processor(Video(list(frames_of(1))), "what?")
