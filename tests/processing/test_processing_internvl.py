"""InternVL's tilings, prompts and conversations; `test_every_processor.py` has its images."""

import json
import types

import numpy as np
import PIL.Image
import pytest
from tokenizers import processors

from tests.processing.conftest import byte_tokenizer, noise, spelled, write_files
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.internvl import CONVERSATIONS, tiling
from vlkv.processing import Processor, Video

SPECIAL = ["<s>", "<img>", "</img>", "<IMG_CONTEXT>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>"]
IMAGE = SPECIAL.index("<IMG_CONTEXT>")
SIDE, TOKENS = 28, 4
SETTINGS = {
    "image_processor_type": "GotOcr2ImageProcessorFast", "crop_size": None, "do_center_crop": None, "resample": 3,
    "size": {"height": SIDE, "width": SIDE}, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    "min_patches": 1, "max_patches": 12, "crop_to_patches": False,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% elif c.type == 'video' %}"
    "{{ '<video>\\n' }}{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLM = dict(
    model_type="qwen2", vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=5,
)  # fmt: skip
VISION = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=SIDE, patch_size=7
)
HF = dict(model_type="internvl", text_config=LLM, vision_config=VISION, image_token_id=IMAGE)
ORIGINAL = dict(
    model_type="internvl_chat", llm_config=LLM, vision_config=VISION, template="internlm2-chat", ps_version="v2",
    dynamic_image_size=True, use_thumbnail=True, max_dynamic_patch=12,
)  # fmt: skip


@pytest.fixture
def tokenizer():
    made = byte_tokenizer(SPECIAL)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


@pytest.fixture
def hf(tmp_path, tokenizer):
    write_files(tmp_path, tokenizer, preprocessor_config=SETTINGS, chat_template=TEMPLATE)
    return Processor.from_folder(tmp_path, config_from_hf(HF))


@pytest.fixture
def original(tmp_path, tokenizer):
    write_files(tmp_path, tokenizer, chat_template="not this one", preprocessor_config=SETTINGS)
    added = {name: i for i, name in enumerate(SPECIAL)}
    return lambda **changes: Processor.from_folder(tmp_path, config_from_hf({**ORIGINAL, **changes}, added=added))


def test_tiles_of_200_sizes_are_those_of_transformers():
    theirs = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(20), np.log(4000), (200, 2))).astype(int).tolist()
    sizes += [[side * i, side * j] for side in (224, 300, 317, 448, 896) for i in range(1, 5) for j in range(1, 5)]
    counts = theirs.GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    for width, height in sizes:
        for fewest, most in ((1, 12), (1, 6), (2, 4)):
            wanted = theirs.get_optimal_tiled_canvas((height, width), (448, 448), fewest, most)
            assert tiling(width, height, 448, fewest, most) == wanted
        columns, lines = tiling(width, height, 448, 1, 12)
        tiles = columns * lines + (columns * lines > 1)
        assert tiles == counts.get_number_of_image_patches(height, width, {})


def test_images_of_an_original_are_those_of_transformers_form(hf, original):
    for seed, (width, height) in enumerate([(60, 29), (5, 190), (SIDE, SIDE)]):
        ours, wanted = (pictures.read(noise(width, height, seed)) for pictures in (original().pictures, hf.pictures))
        np.testing.assert_array_equal(ours.arrays["pixel_values"], wanted.arrays["pixel_values"])
        assert ours.tokens == wanted.tokens


def test_prompts_of_transformers_form(hf):
    """The marks of transformers' processor, around as many image tokens; a video's frames are one tile each."""
    theirs = pytest.importorskip("transformers.models.internvl.processing_internvl").InternVLProcessor
    like = types.SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>", image_seq_length=TOKENS
    )
    video = Video(frames=[noise(40, 30, seed) for seed in range(3)])
    inputs = hf([[noise(60, 29), noise(28, 28), video], []], ["look <video>\nand <image>\nand <image>\nwhat?", "hi"])
    frames = theirs.replace_video_token(like, {"pixel_values_videos": [np.zeros((3, 1))]}, 0)
    pictures = [theirs.replace_image_token(like, {"num_patches": [3, 1]}, i) for i in range(2)]
    assert spelled(hf, inputs) == (
        f"<s><|im_start|>user\nlook {frames}\nand {pictures[0]}\nand {pictures[1]}\nwhat?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert spelled(hf, inputs, 1) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert inputs.is_vision.sum(axis=1).tolist() == [7 * TOKENS, 0]
    numbers = np.repeat([0, 1, 2, -1, -1, -1, -1], TOKENS)
    np.testing.assert_array_equal(inputs.frame[inputs.is_vision], numbers, "of frames; tiles have none")
    changed = inputs.with_ends([1, 1], [np.array([7, 8])] * 2)
    np.testing.assert_array_equal(changed.frame[changed.is_vision], numbers)
    assert (inputs.frame[~inputs.is_vision] == -1).all() and hf(noise(60, 29), "what?").frame is None
    frame = hf.pictures.read(Video(frames=video.frames[:1])).arrays["pixel_values"][0]
    np.testing.assert_array_equal(inputs.pixels[0], frame, "pixels in the order of the prompt, not of the call")


def test_a_later_turn_with_an_image_and_a_video(hf):
    """What is added to a cache are the ids that follow in the whole conversation, and only the new tiles."""
    first, second, video = noise(60, 29), noise(28, 60), Video(frames=[noise(40, 30, seed) for seed in range(3)])
    question = "<video> and <image>, which?"
    before, shown = hf.prompts.write("what?", 1), hf.in_order(question, [second, video])
    after = hf.prompts.write("what?", 1, then=[("yes", question, 1, 1)])
    fed = hf.extension([before], [after], [shown])
    pictures = [first, video, second]
    whole = hf._ids(after, pictures, [hf.pictures.read(picture) for picture in pictures])
    np.testing.assert_array_equal(fed.tokens[fed.valid], whole[hf(first, "what?").valid.sum() :])
    tiles = [hf.pictures.read(picture).arrays["pixel_values"] for picture in pictures[1:]]
    np.testing.assert_array_equal(fed.pixels[: sum(map(len, tiles))], np.concatenate(tiles))
    with pytest.raises(InputError, match=r"1 <image> mark\(s\) for 0"):
        hf.prompts.write("what?", 1, then=[("yes", question, 0, 1)])


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
def test_conversations_of_the_authors(original, name):
    """System turn, question, answer: an opening and the separator for each. The folder's own template is not used."""
    processor = original(template=name)
    inputs = processor(noise(28, 28), "what?")
    c = CONVERSATIONS[name]
    tiles = "<img>" + "<IMG_CONTEXT>" * TOKENS + "</img>"
    wanted = "<s>" + c["system"] + c["separator"] + c["user"] + tiles + "\nwhat?" + c["separator"] + c["assistant"]
    assert spelled(processor, inputs) == wanted
    assert processor.config.stop == (SPECIAL.index("<|end|>" if name == "phi3-chat" else "<|im_end|>"),)
    assert "InternVL" in wanted and ("\n<|im_start|>user\n" in wanted) == (name == "internvl2_5")


def test_settings_of_an_original(original):
    image = noise(60, 29)
    assert original()(image, "a").is_vision.sum() == 3 * TOKENS
    assert original(use_thumbnail=False)(image, "a").is_vision.sum() == 2 * TOKENS
    assert original(dynamic_image_size=False)(image, "a").is_vision.sum() == TOKENS
    assert original(min_dynamic_patch=3)(image, "a").is_vision.sum() > 3 * TOKENS


def test_what_is_refused(hf, original, tmp_path):
    with pytest.raises(InputError, match="<IMG_CONTEXT>"):
        hf(noise(28, 28), "what is <IMG_CONTEXT>?")
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(InputError, match=r"only tokenizer\.model: `vlkv convert` converts it"):
        original()


def test_a_video_has_the_settings_of_the_video_processor(tmp_path, hf):
    own = {"video_processor_type": "InternVLVideoProcessor", "size": {"height": SIDE, "width": SIDE},
           "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}  # fmt: skip
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    pictures = config_from_hf(HF).open_pictures(tmp_path, "checkpoint")
    grey = PIL.Image.new("RGB", (SIDE, SIDE), (51, 51, 51))
    frame = pictures.read(Video([grey])).arrays["pixel_values"][0, :, 0, 0]
    np.testing.assert_allclose(frame, (0.2 - np.array([0.1, 0.2, 0.3])) / [0.4, 0.5, 0.6], atol=1e-6)
    image = pictures.read(grey).arrays["pixel_values"]
    np.testing.assert_array_equal(image, hf.pictures.read(grey).arrays["pixel_values"])
    np.testing.assert_array_equal(hf.pictures.read(Video([grey])).arrays["pixel_values"], image)
    for change, says in (({"size": {"height": 14, "width": 14}}, "different checkpoints"),
                         ({"do_resize": False}, "do_resize=False"),
                         ({"do_normalize": "no"}, "must be true or false"),
                         ({"video_processor_type": "OtherVideoProcessor"}, "not supported")):  # fmt: skip
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**own, **change}))
        with pytest.raises(InputError, match=says):
            config_from_hf(HF).open_pictures(tmp_path, "checkpoint")
