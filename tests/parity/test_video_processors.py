"""Prompts with videos beside transformers' video processors, which need torchvision (extra `videos`)."""

import sys

import numpy as np
import pytest

import vlkv
from tests.parity.conftest import torch, transformers
from tests.processing.conftest import byte_tokenizer, noise, tiny_config
from vlkv.processing import Processor, Video

COMMON = ["<pad>", "<s>", "</s>", "<|im_start|>"]
QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]  # image, video, marks around them
GLM = ["<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_image|>", "<|end_of_image|>"]
SMOL = ["<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TEMPLATE = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- for c in m.content %}{{ "BEGINVIDEOEND" if c.type == "video" else c.text }}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
NATIVE = dict(patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 256})
EDGE = dict(size={"longest_edge": 42}, max_image_size={"longest_edge": 42})
SAMPLED = dict(video_sampling={"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 42}}, fps=1, num_frames=64)
# Family -> its tokens; the beginning of the names of its processors of prompts, images and videos; settings of both.
FAMILIES = {
    "qwen2_5_vl": (QWEN, "Qwen2_5_VL", "Qwen2VL", "Qwen2VL", NATIVE, NATIVE),
    "qwen3_vl": (QWEN, "Qwen3VL", "Qwen2VL", "Qwen3VL", NATIVE, NATIVE),
    "glm4v": (GLM, "Glm4v", "Glm4v", "Glm4v", NATIVE, NATIVE),
    "glm46v": (GLM, "Glm46V", "Glm46V", "Glm46V", NATIVE, NATIVE),
    "smolvlm": (SMOL, "SmolVLM", "SmolVLM", "SmolVLM", EDGE, EDGE | SAMPLED),
}


@pytest.fixture(scope="module")
def torchvision():
    """torchvision; if it was built for another torch, without its compiled ops, which videos do not need."""
    try:
        return pytest.importorskip("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return pytest.importorskip("torchvision"), library


@pytest.fixture(params=FAMILIES)
def processors(request, torchvision, tmp_path):
    family = request.param
    pytest.importorskip("num2words")
    special, whole, image, video, of_image, of_video = FAMILIES[family]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(COMMON + special), pad_token="<pad>", eos_token="</s>",
        extra_special_tokens={"image_token": special[0], "video_token": special[1]},
    )  # fmt: skip
    template = TEMPLATE.replace("BEGINVIDEOEND", f"{special[2]}{special[1]}{special[3]}")
    theirs = getattr(transformers, f"{whole}Processor")(
        getattr(transformers, f"{image}ImageProcessor")(**of_image), tokenizer,
        video_processor=getattr(transformers, f"{video}VideoProcessor")(**of_video), chat_template=template,
        **({"image_seq_len": 9} if family == "smolvlm" else {}),
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    ids = {f"{name}_token_id": len(COMMON) + i for i, name in enumerate(("image", "video", "video_start", "video_end"))}
    return theirs, Processor.from_folder(tmp_path, tiny_config(family, **ids))


@pytest.mark.full
def test_prompts_with_videos_are_those_of_transformers(processors):
    theirs, ours = processors
    for count, fps in ((2, 2.0), (5, 0.3), (8, 29.97), (3, 1.5)):
        frames = [noise(60, 44, seed) for seed in range(count)]
        content = [{"type": "video"}, {"type": "text", "text": "what?"}]
        text = theirs.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        times = dict(total_num_frames=count, fps=fps, duration=count / fps, frames_indices=list(range(count)))
        batch = theirs(text=[text], videos=[np.stack(frames)], video_metadata=[times], do_sample_frames=False,
                       return_tensors="pt")  # fmt: skip
        inputs = ours(Video(frames=frames, fps=fps), "what?")
        wanted, valid = batch["input_ids"][0].numpy(), np.asarray(inputs.valid[0])
        marks = [ours.config.image_token, ours.config.video_token or ours.config.image_token]
        is_vision, ids = np.asarray(inputs.is_vision[0])[valid], np.asarray(inputs.tokens[0])[valid]
        np.testing.assert_array_equal(np.where(np.isin(wanted, marks), -1, wanted), np.where(is_vision, -1, ids))
        if "video_grid_thw" in batch:
            again = vlkv.Inputs.from_hf(dict(batch), ours.config, ours.buckets)
            np.testing.assert_array_equal(inputs.positions, again.positions)
            np.testing.assert_allclose(inputs.pixels, again.pixels, atol=0.05)
