"""PaddleOCR-VL against transformers in float32: layers, logits, tokens, positions, and the processor."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import PIL.Image
import pytest
from safetensors.numpy import load_file

import vlkv
from tests.families import common
from tests.families.common import (
    ParityTests,
    Row,
    answer,
    check_files,
    check_later_turn,
    check_positions,
    check_refused,
    check_tied,
    raw_of,
    save_file,
    whole,
)
from tests.families.common_qwen import END, IMAGE, START
from tests.parity.conftest import perturb, torch, transformers
from tests.processing.conftest import make_tokenizer
from vlkv.processing import Processor, Video

PATCH, MERGE = 4, 2


def make(seed: int = 0, *, tied: bool = False, vocabulary: int = 120, image: int = IMAGE, marks=(START, END)):
    """A tower with three blocks and a table of 5 x 5 positions; heads of the decoder are wider than its width."""
    text = dict(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    vision = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, image_size=22,
                  patch_size=PATCH, spatial_merge_size=MERGE)  # fmt: skip
    config = transformers.PaddleOCRVLConfig(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=98, vision_start_token_id=marks[0],
        vision_end_token_id=marks[1], tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.PaddleOCRVLForConditionalGeneration(config).eval()
    perturb(model, seed)
    return model


def make_row(rng, pictures, words: int = 3) -> Row:
    """Text, and between it images with so many lines and columns of patches."""
    ids, extra = rng.integers(3, 90, words).tolist(), {}
    for lines, columns in pictures:
        ids += [START, *[IMAGE] * (lines * columns // MERGE**2), END, *rng.integers(3, 90, 4).tolist()]
        pixels = rng.normal(size=(lines * columns, 3, PATCH, PATCH)).astype(np.float32)
        extra.setdefault("pixel_values", []).extend(pixels)
        extra.setdefault("image_grid_thw", []).append([1, lines, columns])
    return Row(ids, {**extra, "mm_token_type_ids": [[int(token == IMAGE) for token in ids]]})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """More and fewer patches than the table, also only two in a line."""
    rng = np.random.default_rng(0)
    rows = [make_row(rng, [(4, 6), (10, 2)]), make_row(rng, [(6, 12)], 7), make_row(rng, [], 11)]
    return common.save(make(), tmp_path_factory.mktemp("paddleocr_vl"), rows)


class TestParity(ParityTests):
    pass


@pytest.mark.full
def test_a_later_turn_with_an_image(saved):
    """Logits are those of one prompt with both turns."""
    rng = np.random.default_rng(5)
    turns = [make_row(rng, [(4, 6)]), make_row(rng, [(2, 8)], 5)]
    check_later_turn(saved[2], turns, answer(saved[0], whole(*turns))[1][-1])


def test_every_name_on_disk_gives_the_same_parameters(saved, tmp_path):
    """Also those of the published checkpoint, which is flat and has tensors that are not used."""
    raw = raw_of(saved[1])
    flat = raw | raw.pop("text_config") | {"model_type": "paddleocr_vl", "tie_word_embeddings": False}
    rope = flat.pop("rope_parameters")
    flat |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": "default"}, "use_3d_rope": True}
    flat["vision_config"] |= {"model_type": "paddleocr_vl", "temporal_patch_size": 2, "tokens_per_second": 2}
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "config.json").write_text(json.dumps(flat))
    renames = {"model.projector.": "mlp_AR.", "model.visual.": "visual.", "model.language_model.": "model."}
    tensors = {}
    for key, x in load_file(saved[1] / "model.safetensors").items():
        old = next((key.replace(new, old) for new, old in renames.items() if key.startswith(new)), key)
        tensors[old] = torch.tensor(x)
    assert any(key.startswith("mlp_AR.") for key in tensors) and "model.embed_tokens.weight" in tensors
    tensors |= {f"visual.vision_model.{name}": torch.zeros(2) for name in
                ("head.probe", "head.mlp.fc1.weight", "embeddings.packing_position_embedding.weight")}  # fmt: skip
    save_file(tensors, tmp_path / "flat" / "model.safetensors")
    check_files(saved, tmp_path, "flat")


def test_a_head_that_is_the_embedding_table(saved, tmp_path):
    check_tied(make(tied=True), saved[2], tmp_path)


def test_positions_of_many_sizes(saved):
    """100 random images in random prompts: exactly transformers' rope index and its deltas."""
    model, _, params, *_ = saved
    rng = np.random.default_rng(1)
    for _ in range(25):
        pictures = [tuple(int(side) for side in 2 * rng.integers(1, 8, 2)) for _ in range(4)]
        row = make_row(rng, pictures, int(rng.integers(1, 6)))
        check_positions(model, params, row, make_row(rng, []))


def test_patches_of_another_shape_are_refused(saved):
    row = make_row(np.random.default_rng(0), [(4, 6)])
    batch = {"input_ids": [row.ids], "attention_mask": np.ones((1, len(row.ids))), **row.extra}
    batch["pixel_values"] = np.reshape(batch["pixel_values"], (24, -1))
    with pytest.raises(vlkv.InputError, match=r"shape \(24, 48\), expected \[24, 3, 4, 4\] from image_grid_thw"):
        vlkv.Inputs.from_hf(batch, saved[2].config)


ROPE = {"rope_theta": 1e4, "rope_type": "default"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": ROPE}, "mrope_section is missing"),
        ({"rope_parameters": ROPE | {"mrope_section": [4, 4]}}, "three whole numbers"),
        ({"model_type": "ernie4_5"}, "text_config.model_type='ernie4_5'"),
        ({"use_bias": True}, "use_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"vision": {"hidden_act": "silu"}}, "vision_config.hidden_act"),
        ({"vision": {"num_attention_heads": 3}}, "32 channels must be 3 heads"),
        ({"vision": {"image_size": 3}}, "image_size=3 is less than patch_size=4"),
        ({"vision": {"spatial_merge_size": 0}}, "spatial_merge_size=0"),
        ({"vision": {"layer_norm_eps": "small"}}, "layer_norm_eps='small'"),
        ({"vision": {"rope_parameters": {"rope_type": "linear"}}}, "rope_type='linear'"),
        ({"vision": {"rope_parameters": 3}}, "rope_parameters=3 must be an object"),
    ],
    ids=str,
)
def test_a_config_that_is_not_honoured(saved, change, message):
    check_refused(raw_of(saved[1]), change, message)


# --- the processor ----------------------------------------------------------------------------------------------------

SETTINGS = {
    "image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 14, "temporal_patch_size": 1, "merge_size": 2,
    "size": {"shortest_edge": 8 * 28 * 28, "longest_edge": 40 * 28 * 28}, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}  # fmt: skip


def write_processor(folder, settings=SETTINGS) -> None:
    """A tokenizer with tokens like those of the published checkpoint, and settings of images; no chat template."""
    tokenizer = make_tokenizer("<|IMAGE_PLACEHOLDER|>", bos=False)
    tokenizer.add_special_tokens(["<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_END|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


@pytest.fixture
def processor(tmp_path) -> Processor:
    write_processor(tmp_path)
    return Processor.from_folder(tmp_path, dataclasses.replace(vlkv.presets["paddleocr-vl-0.9b"], image_token=3))


def random_image(rng) -> PIL.Image.Image:
    """Also with a side that is shorter than a token."""
    height, width = (int(side) for side in np.exp(rng.uniform(2, 6.3, 2)))
    return PIL.Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8))


def test_patches_are_those_of_the_checkpoints_processor(processor):
    """200 images of random sizes, and their numbers of tokens."""
    module = pytest.importorskip("transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl")
    theirs = module.PaddleOCRVLImageProcessorPil(
        **{name: value for name, value in SETTINGS.items() if name != "image_processor_type"}
    )
    rng = np.random.default_rng(0)
    images = [random_image(rng) for _ in range(200)]
    assert min(min(image.size) for image in images) < 28 and max(max(image.size) for image in images) > 400
    for image in images:
        read = processor.pictures.read(image)
        wanted = theirs([image], return_tensors="np")
        np.testing.assert_array_equal(read.arrays["image_grid_thw"], wanted["image_grid_thw"][0])
        np.testing.assert_allclose(read.arrays["pixel_values"], wanted["pixel_values"], atol=1e-5)
        assert read.tokens == wanted["image_grid_thw"].prod() // 4


MARK = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"


def make_theirs(folder):
    """transformers' processor of a folder."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"}
    )
    return transformers.PaddleOCRVLProcessor(
        transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"), tokenizer
    )


@pytest.mark.full
def test_a_chat_with_an_image_in_its_second_turn(tmp_path):
    """Each answer is that of transformers' model to the whole conversation, with the tokens of the answers so far."""
    model = make(vocabulary=263, image=3, marks=(261, 262))
    model.save_pretrained(tmp_path)
    write_processor(tmp_path, SETTINGS | {"patch_size": PATCH, "size": {"shortest_edge": 384, "longest_edge": 1280}})
    params, processor = vlkv.load(tmp_path)
    theirs, rng, new = make_theirs(tmp_path), np.random.default_rng(3), 6
    first, second, third = (rng.integers(0, 256, (*shape, 3), np.uint8) for shape in ((24, 32), (20, 50), (40, 16)))
    chat = vlkv.Chat(params, processor, first, sampling=vlkv.Greedy(max_new_tokens=new))
    turns = [
        ("OCR:", [first], f"<|begin_of_sentence|>User: {MARK}OCR:\nAssistant: "),
        ("<image><image>Table Recognition:", [second, third],
         f"</s>User: {MARK}{MARK}Table Recognition:\nAssistant: "),
        ("And?", [], "</s>User: And?\nAssistant: "),
    ]  # fmt: skip
    row = Row([], {"pixel_values": np.zeros((0, 3, PATCH, PATCH)), "image_grid_thw": np.zeros((0, 3), int)})
    for number, (question, images, text) in enumerate(turns):
        made = theirs(images=images or None, text=text, return_tensors="np")
        row.ids.extend(made["input_ids"][0].tolist())
        for name in row.extra if images else ():
            row.extra[name] = np.concatenate([row.extra[name], made[name]])
        kinds = {"mm_token_type_ids": [[int(token == 3) for token in row.ids]]}
        extra = {**row.extra, "pixel_values": np.float32(row.extra["pixel_values"])}
        tokens = answer(model, Row(row.ids, extra | kinds), new)[2].tolist()
        assert not {0, 1, 2, 3} & set(tokens), "text only"
        assert chat.ask(question, image=images if number else None) == processor.decode(np.array(tokens))
        row.ids.extend(tokens)
    assert int(chat.cache.used[0]) == len(row.ids) - len(theirs(images=[first], text=turns[0][2])["input_ids"][0])


def test_images_of_the_first_question_belong_to_the_chat(processor):
    chat = vlkv.Chat(vlkv.families.abstract(processor.config), processor)
    with pytest.raises(vlkv.InputError, match=r"first question to Chat\(params, processor, image\)"):
        chat.ask("OCR:", image=np.zeros((40, 40, 3), np.uint8))


def test_ids_are_those_of_the_checkpoints_processor(processor, tmp_path):
    """Several images in a prompt, in the family's own format."""
    theirs, rng = make_theirs(tmp_path), np.random.default_rng(2)
    images = [random_image(rng) for _ in range(2)]
    inputs = processor([images], ["OCR:"])
    text = f"<|begin_of_sentence|>User: {MARK}{MARK}OCR:\nAssistant: "
    wanted = theirs(images=images, text=text)["input_ids"][0]
    np.testing.assert_array_equal(inputs.tokens[0][inputs.valid[0]], wanted)
    assert inputs.is_vision.sum() == (np.asarray(wanted) == 3).sum()


def test_the_authors_settings(tmp_path):
    """Their names of the processor and of the limits."""
    pixels = {"min_pixels": 147384, "max_pixels": 2822400}
    write_processor(tmp_path, SETTINGS | pixels | {"image_processor_type": "SiglipImageProcessor", "size": pixels})
    settings = vlkv.presets["paddleocr-vl-0.9b"].read_settings(tmp_path, "checkpoint", ("image",))["image"]
    assert (settings.least, settings.most, settings.pixels.size) == (147384, 2822400, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "PaddleOCRVLImageProcessor, SiglipImageProcessor"),
        ({"temporal_patch_size": 2}, "temporal_patch_size=2, but the tower"),
        ({"do_resize": False}, "do_resize=False"),
        ({"size": {"height": 384, "width": 384}}, "shortest_edge and longest_edge"),
    ],
    ids=str,
)
def test_settings_that_are_not_honoured(tmp_path, change, message):
    write_processor(tmp_path, SETTINGS | change)
    with pytest.raises(vlkv.InputError, match=message):
        vlkv.presets["paddleocr-vl-0.9b"].open_pictures(tmp_path, "checkpoint")


def test_an_image_that_is_too_long_and_a_video_are_refused(processor):
    with pytest.raises(vlkv.InputError, match="too long and thin"):
        processor(np.zeros((40, 28 * 300, 3), np.uint8), "OCR:")
    with pytest.raises(vlkv.InputError, match="does not support videos"):
        processor(Video(np.zeros((2, 40, 40, 3), np.uint8)), "OCR:")
