"""SmolVLM's prompts and videos beside transformers' processor; `test_every_processor.py` has its images."""

import types

import numpy as np
import pytest

import vlkv
from tests.processing.conftest import byte_tokenizer, noise, spelled, write_files
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.smolvlm import in_words
from vlkv.processing import Processor, Video
from vlkv.processing.templates import ChatTemplate

MARKS = [f"<row_{line}_col_{column}>" for line in range(1, 7) for column in range(1, 7)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>",
           "<end_of_utterance>", *MARKS]  # fmt: skip
IMAGE = SPECIAL.index("<image>")
SIDE, TOKENS = 28, 4
SETTINGS = {
    "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True, "resample": 1,
    "size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": SIDE}},
}  # fmt: skip
RAW = dict(
    model_type="smolvlm", image_token_id=IMAGE,
    text_config=dict(model_type="llama", vocab_size=300, hidden_size=48, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=4096),
    vision_config=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                       image_size=SIDE, patch_size=7),
)  # fmt: skip


def write_folder(folder):
    return write_files(folder, byte_tokenizer(SPECIAL), preprocessor_config=SETTINGS)


@pytest.fixture
def processor(tmp_path):
    return Processor.from_folder(write_folder(tmp_path), config_from_hf(RAW))


@pytest.fixture(scope="module")
def theirs():
    pil = pytest.importorskip("transformers.models.smolvlm.image_processing_pil_smolvlm")
    text = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    like = types.SimpleNamespace(
        fake_image_token="<fake_token_around_image>", image_token="<image>", global_image_token="<global-img>",
        image_seq_len=TOKENS)  # fmt: skip
    return types.SimpleNamespace(pil=pil.SmolVLMImageProcessorPil, text=text, like=like)


def test_transformers_batches_have_tiles_of_padding(processor, theirs):
    ours = processor([[noise(60, 29), noise(28, 30)], []], ["look <image> and <image> what?", "hi"])
    lengths = ours.valid.sum(axis=1)
    reader = theirs.pil(size=SETTINGS["size"], max_image_size=SETTINGS["max_image_size"])
    pixels = reader([[noise(60, 29), noise(28, 30)], [noise(28, 28)]], return_tensors="np")
    for part in pixels.values():
        part[1] = 0  # a row without images
    batch = {"input_ids": ours.tokens[:, : lengths[0]], "attention_mask": ours.valid[:, : lengths[0]], **pixels}
    made = vlkv.Inputs.from_hf(batch, processor.config)
    for field in ("tokens", "valid", "vision_index", "grid", "positions", "pixels"):
        np.testing.assert_array_equal(getattr(made, field), getattr(ours, field))
    batch["pixel_attention_mask"][0, 3, 20:] = 0
    with pytest.raises(InputError, match="pixel_attention_mask: part of a tile is padding"):
        vlkv.Inputs.from_hf(batch, processor.config)


@pytest.mark.parametrize(("frames", "fps"), [(3, 2.0), (7, 0.1), (12, 2.5)])
def test_a_video_is_described_as_by_transformers(processor, theirs, monkeypatch, frames, fps):
    video = Video(frames=[noise(60, 40, seed) for seed in range(frames)], fps=fps)
    words = {3: "three", 7: "seven", 12: "twelve"}
    monkeypatch.setattr(theirs.text, "num2words", words.get)
    times = types.SimpleNamespace(fps=fps, duration=frames / fps, timestamps=[i / fps for i in range(frames)])
    wanted = theirs.text.SmolVLMProcessor.replace_video_token(
        theirs.like, {"pixel_values": np.zeros((1, frames)), "video_metadata": [times]}, 0)  # fmt: skip
    inputs = processor([video, noise(28, 28)], "look <video> and <image> what?")
    image = processor.pictures.read(noise(28, 28)).text
    said = f"<|im_start|>User: look {wanted} and {image} what?<end_of_utterance>\nAssistant:"
    assert spelled(processor, inputs) == said
    numbers = inputs.frame[inputs.is_vision]
    np.testing.assert_array_equal(numbers[: frames * TOKENS], np.repeat(range(frames), TOKENS))
    assert (numbers[frames * TOKENS :] == -1).all(), "tiles of an image are no frames"
    # transformers gives `size` precedence over `video_size`, and resizes twice.
    reader = theirs.pil(size=SETTINGS["size"], max_image_size=SETTINGS["max_image_size"], do_image_splitting=False)
    pixels = reader([list(video.frames)], return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(inputs.pixels[:frames], pixels)


def test_the_format_of_folders_without_a_template_is_that_of_transformers(processor, theirs):
    wanted = ChatTemplate.from_text(theirs.text.DEFAULT_CHAT_TEMPLATE, "transformers")
    text, image, video = {"type": "text", "text": "what?"}, {"type": "image"}, {"type": "video"}
    for items in ([image, text], [text, image, image], [video, text], [text], "what?"):
        messages = [{"role": "user", "content": items}, {"role": "assistant", "content": [text]}] * 2
        assert processor.prompts.template.render(messages, {}) == wanted.render(messages, {})


def test_numbers_in_words():
    said = {1: "one", 10: "ten", 19: "nineteen", 20: "twenty", 64: "sixty-four", 100: "one hundred",
            207: "two hundred and seven", 999: "nine hundred and ninety-nine"}  # fmt: skip
    assert {number: in_words(number) for number in said} == said
    with pytest.raises(InputError, match="at most 999"):
        in_words(1000)


def test_a_template_without_images_is_refused(processor, tmp_path):
    template = (
        "{% for m in messages %}{% for c in m.content if c.type != 'image' %}{{ c.text }}{% endfor %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match="0 image token"):
        Processor.from_folder(tmp_path, processor.config)(noise(28, 28), "what?")
