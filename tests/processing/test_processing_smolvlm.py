"""SmolVLM's prompts and videos beside transformers' processor; `test_every_processor.py` has its images."""

import types

import numpy as np
import pytest

import vlkv
from tests.parity.conftest import torch, transformers
from tests.processing.conftest import byte_tokenizer, noise, spelled, write_files
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.smolvlm import in_words
from vlkv.processing import Processor, Video
from vlkv.processing.arranging import cells
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


def test_a_conversation(processor, theirs):
    """The marks of each picture in the template's text; a tile shows a part of the view of the whole at the end."""
    inputs = processor([[noise(60, 29), noise(28, 30)], []], ["look <image> and <image> what?", "hi"])
    wide, tall = (processor.pictures.read(noise(*size)).text for size in ((60, 29), (28, 30)))
    assert spelled(processor, inputs) == (
        f"<|im_start|>User: look {wide} and {tall} what?<end_of_utterance>\nAssistant:"
    )
    assert spelled(processor, inputs, 1) == "<|im_start|>User: hi<end_of_utterance>\nAssistant:"
    assert spelled(processor, processor(noise(60, 29), "what?")).startswith(
        "<|im_start|>User:<fake_token_around_image>"
    )
    assert inputs.is_vision.sum(axis=1).tolist() == [(2 * 4 + 1 + 4 * 4 + 1) * TOKENS, 0]
    tile, shown = inputs.tiles[0][inputs.is_vision[0]].reshape(-1, TOKENS, 2).transpose(2, 0, 1)
    assert (tile[:, 0] == np.arange(26)).all() and (shown[:8] == -1).all()
    np.testing.assert_array_equal(shown[8], cells(2, 2, 4).ravel())
    np.testing.assert_array_equal(shown[25], 9 + cells(2, 4, 4).ravel())


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


def test_videos_are_written_in_transformers_format_whatever_the_folders_template(tmp_path, theirs):
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}own {{ m.content[0].type }}{% endfor %}")
    template = Processor.from_folder(tmp_path, config_from_hf(RAW)).prompts.template
    wanted = ChatTemplate.from_text(theirs.text.DEFAULT_CHAT_TEMPLATE, "transformers")
    image, video = ([{"role": "user", "content": [{"type": kind}]}] for kind in ("image", "video"))
    assert template.render(image, {}) == "own image"
    assert template.render(video, {"bos_token": "<s>"}) == wanted.render(video, {})


def test_a_page_for_granite_docling(tmp_path):
    """Roles between marks, the tiles of a page in place of the image, and an answer whose markup is special tokens.

    As in the published folder, the tokenizer has one token more than the embedding table.
    """
    roles = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
    start, end, stop = roles
    tokens = byte_tokenizer(special := [*roles, "<doctag>", "<text>", "</text>", "</doctag>", *SPECIAL])
    extra = tokens.get_vocab_size()
    tokens.add_special_tokens(["<end_of_page>"])
    template = (
        f"{{% for m in messages %}}{start}{{{{ m.role }}}}{end}{{% for c in m.content %}}"
        "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
        f"{stop}\n{{% endfor %}}{{% if add_generation_prompt %}}{start}assistant{end}{{% endif %}}"
    )
    settings = SETTINGS | {"image_processor_type": "Idefics3ImageProcessor"}
    write_files(tmp_path, tokens, preprocessor_config={k: v for k, v in settings.items() if k != "video_sampling"})
    (tmp_path / "chat_template.jinja").write_text(template)
    raw = RAW | dict(model_type="idefics3", image_token_id=special.index("<image>"), eos_token_id=special.index(stop),
                     text_config=RAW["text_config"] | dict(vocab_size=extra))  # fmt: skip
    processor = Processor.from_folder(tmp_path, config_from_hf(raw))
    inputs = processor(noise(112, 112), "Convert this page to docling.")
    page = processor.pictures.read(noise(112, 112)).text
    assert page.startswith("<fake_token_around_image><row_1_col_1><image>") and page.count("<row_") == 16
    assert spelled(processor, inputs) == (
        f"{start}user{end}{page}Convert this page to docling.{stop}\n{start}assistant{end}"
    )
    answer = "<doctag><text><loc_1>Hi</text></doctag>"
    ids = processor.tokenizer.encode(answer + stop + "later")
    assert processor.decode(ids) == "<loc_1>Hi"
    assert processor.decode(ids, skip_special_tokens=False) == answer
    assert processor.decode(np.stack([ids, ids]), [3, 99], skip_special_tokens=False) == ["<doctag><text><", answer]
    assert "".join(processor.pieces(ids, skip_special_tokens=False)) == answer


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


def test_positions_of_published_grids_are_those_of_transformers():
    """Line i of n patches has line i of the table; transformers looks it up by i / n in float32."""
    module = pytest.importorskip("transformers.models.idefics3.modeling_idefics3")
    grids = {config.vision.grid for name, config in vlkv.presets.items() if name.startswith(("smolvlm", "idefics3"))}
    assert grids == {26, 27, 32}
    for grid in grids:
        config = transformers.Idefics3VisionConfig(hidden_size=2, image_size=grid, patch_size=1)
        made = module.Idefics3VisionEmbeddings(config)
        with torch.no_grad():
            made.patch_embedding.weight[:], made.patch_embedding.bias[:] = 0, 0
            made.position_embedding.weight[:] = torch.arange(grid**2)[:, None]
            positions = made(torch.ones(1, 3, grid, grid), torch.ones(1, grid, grid, dtype=bool))[0, :, 0]
        np.testing.assert_array_equal(positions, np.arange(grid**2))
