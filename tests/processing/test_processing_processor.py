"""The whole processor: batches, image tokens, shapes that jit shares, and parity with transformers'."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from tests.models import SMALL, same
from tests.processing.conftest import noise
from vlkv.buckets import Buckets
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.processing import Processor
from vlkv.processing.arranging import arrange_entries

IMAGE, PER_IMAGE = 3, 16


def picture(seed=0, size=(40, 30)):
    return noise(*size, seed)


@pytest.fixture
def processor(make_folder, config):
    return Processor.from_folder(make_folder(), config)


def test_text_alone(processor):
    inputs = processor(None, ["what?", "who?"])
    assert inputs.pixels is None and inputs.max_vision == 0


def test_buckets_and_layout(make_folder, config):
    folder = make_folder()
    inputs = Processor.from_folder(folder, config, buckets=Buckets(text=(100,), images=(0, 4)))(picture(), "what?")
    assert (inputs.max_text, inputs.max_vision, len(inputs.pixels)) == (100, 64, 4)
    padded = Processor.from_folder(folder, config, layout="pad")(picture(), "what?")
    cut = Processor.from_folder(folder, config)(picture(), "what?")
    assert abs(padded.pixels - cut.pixels).max() > 0.1
    with pytest.raises(InputError, match="layout"):
        Processor.from_folder(folder, config, layout="stretch")


@pytest.mark.parametrize(("images", "text"), [
    (None, "<image> what?"),
    ("one", "<image> and <image>?"),
    ("one", "  "),
    ("one", ["a", "b"]),
    (["one"], ["a", "b"]),
    (None, []),
    ([None, "one"], ["<image> a", "b"]),
    ("one", ["a", 3]),
    (["one", None], "what?"),
    ("one", None),
])  # fmt: skip
def test_bad_calls(processor, images, text):
    def real(entry):
        if isinstance(entry, list):
            return [real(one) for one in entry]
        return picture() if entry == "one" else None

    with pytest.raises(InputError) as caught:
        processor(real(images), text)
    assert "\n" not in str(caught.value)


def test_image_tokens_hidden_in_the_text(make_folder, config):
    own = Processor.from_folder(make_folder(template=None, image_token="<|picture|>"), config)
    assert own(picture(), "<image> a").is_vision.sum() == PER_IMAGE
    with pytest.raises(InputError, match="picture"):
        own(picture(), "a <|picture|>")
    # the template itself may write one too many, or none; only the count of ids can tell
    twice = Processor.from_folder(make_folder(template="<image>{{ messages[0].content[0].type }}<image>"), config)
    with pytest.raises(InputError, match="2 image token"):
        twice(picture(), "a")


def test_a_prompt_beyond_the_limit(processor):
    with pytest.raises(InputError, match="limit is 2048"):
        processor(picture(), "a" * 2048)


def test_a_literal_mark_has_the_ids_of_ordinary_text(make_folder, config, tmp_path):
    """The reference has another image token, so that it takes `<image>` for text."""
    processor = Processor.from_folder(make_folder(), config)
    template = (tmp_path / "checkpoint" / "chat_template.jinja").read_text()
    reference = Processor.from_folder(
        make_folder(image_token="<|picture|>", template=template.replace("<image>", "<|picture|>")), config
    )
    for text in (r"where is \<image>?", r"\<image>\<image>", r"\<video> and \\<image>"):
        inputs, wanted = processor(picture(), text), reference(picture(), text)
        np.testing.assert_array_equal(inputs.tokens, wanted.tokens)
        assert inputs.is_vision.sum() == PER_IMAGE
        answer = processor.decode(inputs.tokens[0], int(inputs.valid.sum()))
        assert answer == f"USER: \n{text} ASSISTANT:".replace("\\<", "<")
    mixed = processor([picture(0), picture(1)], r"<image> is no \<image> but <image>")
    assert mixed.is_vision.sum() == 2 * PER_IMAGE
    before = processor.prompts.write("q", 1)
    fed = processor.extension([before], [processor.prompts.write("q", 1, then=[("<image>", r"what is \<image>?")])])
    assert processor.decode(fed.tokens[0], int(fed.valid.sum())) == " <image> USER: what is <image>? ASSISTANT:"


def test_copies(processor):
    """As a DataLoader makes them for its workers."""
    wanted = processor(picture(), r"what is \<image>?")
    for copied in (pickle.loads(pickle.dumps(processor)), copy.deepcopy(processor), copy.copy(processor)):
        inputs = pickle.loads(pickle.dumps(copied(picture(), r"what is \<image>?")))
        same(inputs, wanted)
    error = pickle.loads(pickle.dumps(InputError("x" * 999)))
    assert str(error) == str(InputError("x" * 999))


def test_folders_that_are_refused(make_folder, config, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        Processor.from_folder(tmp_path / "nowhere", config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"vlkv\.load_params"):
        Processor.from_folder(tmp_path / "empty", config)
    folder = make_folder()
    with pytest.raises(InputError, match="different checkpoints"):
        Processor.from_folder(folder, dataclasses.replace(config, image_token=900))
    larger = dataclasses.replace(config, vision=dataclasses.replace(config.vision, image_size=56))
    with pytest.raises(InputError, match="28 x 28"):
        Processor.from_folder(folder, larger)([picture(0), picture(1)], "a")
    (folder / "processor_config.json").unlink()
    with pytest.raises(InputError, match=r"preprocessor_config\.json"):
        Processor.from_folder(folder, config)


def test_unpadded_rows_from_another_processor(config):
    with pytest.raises(InputError, match="padding=True"):
        Inputs.from_hf({"input_ids": [[1, 2], [1]]}, config)


def test_bounds_are_those_of_the_row_with_most_squares():
    each, size = SMALL.per_picture, SMALL.vision.image_size
    tokens = np.zeros((2, 2 * each + 1), int)
    tokens[0, : 2 * each] = tokens[1, :each] = SMALL.image_token
    pixels = np.zeros((3, 3, size, size), np.float32)
    made = SMALL.arrange({"pixel_values": pixels}, tokens, np.ones(tokens.shape, bool), Buckets())
    assert made.max_images >= 2 and made.max_vision == made.max_images * each


def test_views_of_a_picture_are_counted_before_the_next_picture():
    tiles = np.array([(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 0, 0)])  # source, view, line and column
    alone = np.array([(3, 0, 0, 0), (4, 0, 0, 1)])
    tokens = np.full((1, 5), 9)
    fields, _ = arrange_entries(tokens, np.ones((1, 5), bool), {9: [tiles, alone]}, Buckets())
    assert fields["grid"][0, :, 0].tolist() == [0, 1, 2, 3, 3] and fields["max_images"] >= 4
