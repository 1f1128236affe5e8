"""Prompts with videos beside transformers' video processors, which need torchvision (extra `videos`)."""

import sys

import pytest

from tests.parity.conftest import torch, transformers
from tests.processing.conftest import byte_tokenizer, tiny_config
from vlkv.processing import Processor

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
