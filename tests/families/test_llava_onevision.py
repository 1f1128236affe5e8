"""LLaVA-OneVision against transformers, on a tiny random checkpoint."""

from __future__ import annotations

import copy
import json

import jax
import numpy as np
import PIL.Image
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import ParityTests, Row, joined
from tests.models import same
from tests.parity.conftest import perturb, text_config, torch, transformers
from tests.processing.conftest import make_tokenizer, write_folder
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.llava_next.inputs import Views
from vlkv.processing import Processor, Video

IMAGE, VIDEO, SIDE, GRID = 99, 98, 22, 3  # 3 x 3 patches of 7 pixels a tile, and one pixel over
PINPOINTS = [[SIDE * y, SIDE * x] for y in range(1, 4) for x in range(1, 4)]


def make(tied: bool = False):
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=SIDE, patch_size=7,
        vision_use_head=False,
    )  # fmt: skip
    config = transformers.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text_config("qwen2", max_position_embeddings=512, tie_word_embeddings=tied),
        image_token_index=IMAGE, video_token_index=VIDEO, image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip
    model = transformers.LlavaOnevisionForConditionalGeneration(config).eval()
    perturb(model)
    return model


def tiles(size) -> int:
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    return image_size_to_num_patches(list(size), PINPOINTS, SIDE)


def prompts(config) -> list[Row]:
    """One large picture (resized after stitching), two pictures (a tile each), none, a video."""
    rng = np.random.default_rng(0)

    def pixels(*shape):
        return rng.normal(size=(*shape, 3, SIDE, SIDE)).astype(np.float32)

    text = rng.integers(3, 90, (4, 6)).tolist()
    large, small = (60, 50), (9, 30)
    most = tiles(large)
    pair = np.zeros((2, most, 3, SIDE, SIDE), np.float32)
    pair[:, :1] = pixels(2, 1)
    one = {"pixel_values": list(pixels(1, most)), "image_sizes": [list(large)], "batch_num_images": [1]}
    two = {"pixel_values": list(pair), "image_sizes": [list(small), list(large)], "batch_num_images": [2]}
    return [
        Row([7, *[IMAGE] * len(Views(config).picture(large)), *text[0]], one),
        Row([*[IMAGE] * 10, 8, 9, *[IMAGE] * 10, *text[1]], two),
        Row(text[2]),
        Row([5, *[VIDEO] * len(Views(config).video(3)), *text[3]], {"pixel_values_videos": list(pixels(1, 3))}),
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava_onevision")
    model = make()
    model.save_pretrained(folder)
    params = vlkv.load_params(folder)
    return model, folder, params, prompts(params.config)


class TestParity(ParityTests):
    pass


def test_new_and_old_names_and_tied_embeddings(saved, tmp_path):
    model, _, params, _ = saved
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    convert(tmp_path / "new", tmp_path / "converted", progress=False)
    for name in ("new", "converted"):
        same(params, vlkv.load_params(tmp_path / name))
    make(tied=True).save_pretrained(tmp_path / "tied")
    assert vlkv.load_params(tmp_path / "tied").config.decoder.tied


def test_taps_of_the_resized_picture(saved):
    assert vlkv.Inputs.from_hf(joined(saved[3]), saved[2].config).layout["taps"].shape == (64, 4)


def test_a_tower_without_a_class_token_gives_the_mean_attention_received(saved):
    """Of transformers' tower, in the last block; newlines receive nothing."""
    model, _, params, rows = saved
    inputs = vlkv.Inputs.from_hf(joined(rows), params.config)
    ours = jax.jit(lambda params, inputs: params.embed(inputs, (-1,)).attention)(params, inputs)
    tower = copy.deepcopy(model.model.vision_tower)
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        given = tower(torch.tensor(inputs.pixels), output_attentions=True).attentions[-1].mean(2).numpy()  # [I, N, V]
    flat = given.swapaxes(1, 2).reshape(-1, given.shape[1])
    plain = (inputs.vision_index >= 0) & (inputs.vision_index < len(flat))
    newline = inputs.is_vision & (inputs.grid[..., 1] < 0)
    assert plain.any() and newline.any()
    received = np.asarray(ours)[:, 0].swapaxes(1, 2)
    np.testing.assert_allclose(received[plain], flat[inputs.vision_index[plain]], atol=1e-6)
    assert (received[newline] == 0).all()


def test_grid_by_hand(saved):
    params, rows = saved[2], saved[3]
    inputs = vlkv.Inputs.from_hf(joined(rows), params.config)
    square = [[y, x] for y in range(3) for x in range(3)]
    assert inputs.grid[1][inputs.is_vision[1]].tolist() == [
        *([0, *place] for place in square), [0, -1, -1], *([1, *place] for place in square), [1, -1, -1]
    ]  # fmt: skip
    frames = [[frame, y, x] for frame in range(3) for y in range(2) for x in range(2)]
    assert inputs.grid[3][inputs.is_vision[3]].tolist() == [*frames, [2, -1, -1]]
    # 60 x 50 pixels show on 9 x 7 of 9 x 9 patches, the root of 63 / 18 times too many a side: 4 x 3 are left.
    assert inputs.grid[0][inputs.is_vision[0]][9:].tolist() == [
        [1, y, x] if x < 3 else [1, -1, -1] for y in range(4) for x in range(4)
    ]
    assert inputs.max_images == 3


def processors():
    pil = pytest.importorskip("transformers.models.llava_onevision.image_processing_pil_llava_onevision")
    raw = dict(image_processor_type="LlavaOnevisionImageProcessor", size={"height": SIDE, "width": SIDE},
               image_grid_pinpoints=PINPOINTS, image_mean=[0.5] * 3, image_std=[0.5] * 3)  # fmt: skip
    return pil.LlavaOnevisionImageProcessorPil(**raw), raw


def test_sizes_and_pixels_are_those_of_the_pil_processor(saved, tmp_path):
    """Counts of 200 sizes, and the layout and the pixels of some, alone and among others."""
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    model, _, params, _ = saved
    reference, raw = processors()
    counter = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    counter.image_processor, counter.num_image_tokens, counter.vision_aspect_ratio = reference, 9, "anyres_max_2"
    rng = np.random.default_rng(1)
    sizes = [tuple(map(int, size)) for size in np.exp(rng.uniform(0, 6, (192, 2))).astype(int)]
    sizes += [(1, 400), (400, 1), (22, 22), (66, 66), (67, 67), (44, 23), (23, 44), (1, 1)]
    ours = [len(Views(params.config).picture(size)) for size in sizes]
    assert ours == [counter._get_number_of_features(*size, SIDE, SIDE) for size in sizes]

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(raw))
    pictures = params.config.open_pictures(tmp_path, "checkpoint")
    for size in sizes[:6] + sizes[-6:]:
        image = PIL.Image.fromarray(rng.integers(0, 256, (*size, 3)).astype(np.uint8))
        for images in (1, 2):
            read = pictures.read(image, images=images)
            wanted = reference([[image] * images], return_tensors="np")
            assert read.arrays["image_sizes"].tolist() == wanted["image_sizes"][0].tolist() == list(size)
            np.testing.assert_allclose(read.arrays["pixel_values"], wanted["pixel_values"][0], atol=1e-5, rtol=0)
            check_layout(model, params.config, size, images, read.tokens)
    video = pictures.read(Video(frames=[image, image]))
    assert video.tokens == 2 * 4 + 1
    np.testing.assert_allclose(video.arrays["pixel_values_videos"][0], pictures.read(image).arrays["pixel_values"][0])


TEMPLATE = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>' }}
{%- for item in message['content'] if item['type'] != 'text' %}{{ '<' + item['type'] + '>' }}{% endfor %}
{%- for item in message['content'] if item['type'] == 'text' %}{{ item['text'] }}{% endfor %}
{% endfor %}
"""


def test_processor_of_a_folder(tmp_path):
    """How many pictures a prompt has decides what becomes of each; videos of unequal length share a batch."""
    folder = write_folder(tmp_path, template=TEMPLATE)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<video>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"image_processor": processors()[1], "video_processor": {
        "video_processor_type": "LlavaOnevisionVideoProcessor", "size": {"height": SIDE, "width": SIDE},
    }}  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(settings))
    raw = make().config.to_dict()
    raw["text_config"]["vocab_size"] = 300
    raw |= {"image_token_index": 3, "video_token_index": tokenizer.token_to_id("<video>")}
    config = config_from_hf(raw)
    processor = Processor.from_folder(folder, config)
    image = PIL.Image.new("RGB", (50, 60), (255, 0, 0))
    videos = [Video(frames=[image] * frames) for frames in (1, 3)]
    inputs = processor([[image, image], image, [videos[0], image], videos[1], None], ["What is it?"] * 5)
    alone, among = len(Views(config).picture((60, 50))), 10
    wanted = [2 * among, alone, 4 + 1 + alone, 12 + 1, 0]
    assert inputs.is_vision.sum(axis=1).tolist() == wanted
    assert inputs.grid[2, :, 0].max() == 2, "two views of the picture and a frame"
    numbers = [row[row >= 0].tolist() for row in inputs.frame]
    assert numbers == [[], [], [0] * 5, [0] * 4 + [1] * 4 + [2] * 5, []], "with the newline at the end"


def check_layout(model, config, size, images, count) -> None:
    """transformers' own packing of known patches, against the weighted sums that the layout asks for."""
    number = tiles(size) if images == 1 else 1
    patches = torch.tensor(np.random.default_rng(0).normal(size=(number, 9, 2)))
    packed, _ = model.model.pack_image_features(
        [patches] * images, [list(size)] * images, torch.tensor([50.0, 60.0]), "anyres_max_2"
    )
    pixels = np.zeros((images, number, 3, SIDE, SIDE), np.float32)
    batch = {"input_ids": [[IMAGE] * (count * images)], "pixel_values": pixels, "image_sizes": [size] * images,
             "batch_num_images": [images]}  # fmt: skip
    inputs = vlkv.Inputs.from_hf(batch, config)
    rows = np.zeros((inputs.pixels.shape[0] * 9, 2))
    rows[: images * number * 9] = np.concatenate([patches.reshape(-1, 2).numpy()] * images)
    mixed = (rows[inputs.layout["taps"]] * inputs.layout["weights"][..., None]).sum(axis=1)
    rows = np.concatenate([rows, mixed, [[50.0, 60.0]]])
    ours = rows[inputs.vision_index[0, : count * images]]
    np.testing.assert_allclose(ours, np.concatenate([one.numpy() for one in packed]), atol=1e-5)


def test_published_counts():
    """With the published settings 640 x 480 pixels make 2929 tokens, and a frame 196."""
    config = config_from_hf({"model_type": "llava_onevision"})
    assert len(Views(config).picture((480, 640))) == 2929
    assert len(Views(config).picture((480, 640), alone=False)) == 730
    assert len(Views(config).video(8)) == 8 * 196 + 1
    assert config.vision.width == 1152


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
        ({"vision_aspect_ratio": "square"}, "vision_aspect_ratio"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type"),
        ({"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act"),
    ],
)
def test_settings_that_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        config_from_hf({"model_type": "llava_onevision", **change})
