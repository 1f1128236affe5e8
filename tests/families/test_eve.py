"""EVE: its patch layer written here in torch, picture by picture, its decoder as transformers' Llama."""

from __future__ import annotations

import json
import math

import numpy as np
import PIL.Image
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import ParityTests, Row, joined, save_file
from tests.models import same
from tests.parity.conftest import VOCABULARY, perturb, text_config, torch, transformers
from tests.processing.conftest import make_tokenizer
from vlkv.errors import InputError
from vlkv.families import config_from_hf

IMAGE, WIDTH, HEADS, SQUARE = VOCABULARY, 32, 8, 140
SHAPES = [(2, 3), (5, 1), (1, 4)]  # windows of 28 pixels


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False))
        self.kv = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False))
        self.proj = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, query, x):
        """One query each [N, 1, D] for sets of patches [N, P, D]."""
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in (self.q(query), *self.kv(x).chunk(2, dim=-1)))
        read = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=WIDTH**-0.5)
        return query + self.proj(read.transpose(1, 2).flatten(2))


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embedding = torch.nn.Conv2d(3, WIDTH, 14, 14, bias=False)
        self.class_embedding = torch.nn.Parameter(torch.zeros(WIDTH))
        self.split_embedding = torch.nn.Parameter(torch.zeros(WIDTH))
        self.local_attention, self.global_attention = Reader(), Reader()

    def forward(self, pixels):
        """One picture [4, S, S] to its tokens."""
        seen = torch.nonzero(torch.nn.functional.avg_pool2d(pixels[3:], 14)[0])
        (top, left), (bottom, right) = seen[0], seen[-1] + 1
        x = self.patch_embedding(pixels[None, :3])[0, :, top:bottom, left:right]
        lines, columns = x.shape[1] // 2, x.shape[2] // 2
        sets = [x[:, 2 * y : 2 * y + 2, 2 * z : 2 * z + 2].flatten(1).T for y in range(lines) for z in range(columns)]
        sets = torch.stack(sets)
        windows = self.local_attention(sets.mean(1, keepdim=True), sets)[:, 0]
        first = self.global_attention(self.class_embedding[None, None], windows[None])[0]
        rows = [torch.cat([row, self.split_embedding[None]]) for row in windows.split(columns)]
        return torch.cat([first, *rows])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.llama = transformers.LlamaForCausalLM(text_config())
        self.tower = Tower()
        self.projector = torch.nn.Sequential(torch.nn.Linear(WIDTH, 48), torch.nn.GELU(), torch.nn.Linear(48, 48))

    def get_output_embeddings(self):
        return self.llama.get_output_embeddings()

    def embed(self, ids, pixels):
        x = self.llama.get_input_embeddings()(ids.clamp(max=VOCABULARY - 1))
        if pixels is not None:
            x[ids == IMAGE] = torch.cat([self.projector(self.tower(picture)) for picture in pixels])
        return x

    def forward(self, input_ids, pixel_values=None, **options):
        return self.llama(inputs_embeds=self.embed(input_ids, pixel_values), **options)

    def generate(self, input_ids, pixel_values=None, **options):
        x = self.embed(input_ids, pixel_values)
        return torch.cat([input_ids, self.llama.generate(inputs_embeds=x, **options)], dim=1)

    def tensors(self) -> dict:
        made = dict(self.llama.state_dict())
        made |= {f"model.mm_projector.{key}": value for key, value in self.projector.state_dict().items()}
        made |= {f"model.vision_tower.{key}": value for key, value in self.tower.state_dict().items()}
        made["model.vision_tower_compressor.input_layer.bias"] = torch.zeros(3)
        return {key: value.clone() for key, value in made.items()}


def config_of(model: Model | None = None, **changes) -> dict:
    raw = {} if model is None else model.llama.config.to_dict()
    return raw | {
        "model_type": "eve", "mm_vision_tower": "openai/eve-patch14-anypixel-672", "mm_hidden_size": WIDTH,
        "mm_projector_type": "mlp2x_gelu", "mm_use_im_start_end": False, **changes,
    }  # fmt: skip


def tokens_of(lines: int, columns: int) -> int:
    return 1 + lines * (columns + 1)


def prompts() -> list[Row]:
    """One picture, two, none; the pictures lie somewhere on their squares."""
    rng = np.random.default_rng(0)

    def prompt(shapes, text: int) -> Row:
        ids, pictures = rng.integers(3, 90, text).tolist(), []
        for at, (lines, columns) in enumerate(shapes):
            place = at * 2 + 1 + sum(tokens_of(*shape) for shape in shapes[:at])
            ids[place:place] = [IMAGE] * tokens_of(lines, columns)
            picture = rng.normal(size=(4, SQUARE, SQUARE)).astype(np.float32)
            top, left = (SQUARE // 28 - lines) // 2 * 28, (SQUARE // 28 - columns) // 2 * 28
            picture[3] = 0
            picture[3, top : top + 28 * lines, left : left + 28 * columns] = 1
            pictures.append(picture)
        return Row(ids, {"pixel_values": pictures} if shapes else {})

    return [prompt(SHAPES[:1], 9), prompt(SHAPES[1:], 12), prompt([], 7)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eve")
    model = Model().eval()
    perturb(model)
    (folder / "config.json").write_text(json.dumps(config_of(model)))
    save_file(model.tensors(), folder / "model.safetensors")
    return model, folder, vlkv.load_params(folder), prompts()


class TestParity(ParityTests):
    pass


def test_grid_by_hand(saved):
    inputs = vlkv.Inputs.from_hf(joined(saved[3]), saved[2].config)
    own = inputs.grid[0][inputs.is_vision[0]].tolist()
    assert own == [[0, -1, -1], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, -1, -1], [0, 1, 0], [0, 1, 1], [0, 1, 2],
                   [0, -1, -1]]  # fmt: skip
    second = inputs.grid[1][inputs.is_vision[1]]
    assert second[:, 0].tolist() == [0] * 11 + [1] * 6
    assert second[11:].tolist() == [[1, -1, -1], *[[1, 0, x] for x in range(4)], [1, -1, -1]]


def test_conversion_keeps_every_parameter(saved, tmp_path):
    _, folder, params, _ = saved
    convert(folder, tmp_path / "made", progress=False)
    same(params, vlkv.load_params(tmp_path / "made"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_vision_tower": "openai/eve-anyratio-res800-patch16"}, "mm_vision_tower='openai/eve-anyratio"),
        ({"mm_projector_type": "linear"}, "mm_projector_type='linear'"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end=True"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        config_from_hf(config_of(**changes))


def test_image_tokens_and_pictures_that_do_not_match_are_refused(saved):
    row = saved[3][0]
    with pytest.raises(InputError, match="8 image tokens, but 1 image"):
        vlkv.Inputs.from_hf({"input_ids": [row.ids[:1] + row.ids[2:]], **row.extra}, saved[2].config)
    torn = [picture.copy() for picture in row.extra["pixel_values"]]
    torn[0][3, 60, 60] = 0
    with pytest.raises(InputError, match="rectangle of whole windows"):
        vlkv.Inputs.from_hf({"input_ids": [row.ids], "pixel_values": torn}, saved[2].config)


@pytest.mark.parametrize("longest", [672, 1344])
def test_sizes_as_the_authors_code_computes_them(tmp_path, longest):
    """Its lengths are counted at the teacher's 336 pixels, then multiplied."""
    config = config_from_hf(config_of(mm_vision_tower=f"openai/eve-patch14-anypixel-{longest}"))
    pictures = config.open_pictures(tmp_path, "checkpoint")
    ratio = longest // 336
    for width, height in np.random.default_rng(0).integers(1, 1500, (200, 2)).tolist():
        if width > height:
            wanted = 336, math.ceil(336 * height / width / 14) * 14
        else:
            wanted = math.ceil(336 * width / height / 14) * 14, 336
        assert pictures.vision.target(width, height) == (wanted[0] * ratio, wanted[1] * ratio)


def test_a_picture_and_its_prompt(tmp_path):
    make_tokenizer("<pad>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(config_of(Model(), vocab_size=260, max_position_embeddings=2048)))
    processor = vlkv.load_processor(tmp_path)
    rng = np.random.default_rng(0)
    picture = PIL.Image.fromarray(rng.integers(0, 256, (60, 200, 3), dtype=np.uint8))
    pixels = processor.pictures.read(picture).arrays["pixel_values"][0]
    lines = math.ceil(24 * 60 / 200)
    shown = np.asarray(picture.resize((672, 28 * lines))) / 255  # bicubic, as PIL resizes by itself
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    top = (24 - lines) // 2 * 28
    wanted = ((shown - mean) / std).transpose(2, 0, 1)
    np.testing.assert_allclose(pixels[:3, top : top + 28 * lines], wanted, atol=1e-5)
    assert pixels[3].sum() == 672 * 28 * lines and pixels[3, top : top + 28 * lines].all()
    inputs = processor([picture, picture], "What are these?")
    assert inputs.is_vision.sum() == 2 * tokens_of(lines, 24)
    text = inputs.tokens[0][inputs.valid[0] & ~inputs.is_vision[0]].tolist()
    assert processor.decode(text) == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: \n\nWhat are these? ASSISTANT:"
    )
