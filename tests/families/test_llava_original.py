"""LLaVA-1.5 and MobileVLM-V2 as their authors publish them: the tower and decoder of transformers, joined here."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families.common import ParityTests, Row, check_neighbours, joined, save_file
from tests.models import same
from tests.parity.conftest import VOCABULARY, perturb, text_config, torch, transformers
from tests.processing.conftest import make_tokenizer
from vlkv import policies
from vlkv.errors import InputError
from vlkv.families import config_from_hf

IMAGE = VOCABULARY  # behind the last token
TOWER = "clip-vit-tiny"
KINDS = ["llava", "mobilevlm"]


class Ldp(torch.nn.Module):
    """LDPv2, as Sec. 3.2 of the paper draws it."""

    def __init__(self, width_in, width):
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.mlp = torch.nn.Sequential(
            torch.nn.Linear(width_in, width), torch.nn.GELU(), torch.nn.Linear(width, width)
        )
        self.pool = torch.nn.AdaptiveAvgPool2d((12, 12))
        self.peg = torch.nn.Module()
        self.peg.peg = torch.nn.Sequential(torch.nn.Conv2d(width, width, 3, 1, 1, groups=width))

    def forward(self, x):
        square = self.mlp.mlp(x).transpose(1, 2).unflatten(2, (24, 24))
        pooled = self.pool(square)
        return (self.peg.peg(pooled) + pooled).flatten(2).transpose(1, 2)


class Model(torch.nn.Module):
    """With the names of the published checkpoints."""

    def __init__(self, kind: str):
        super().__init__()
        grid = 24 if kind == "mobilevlm" else 4
        vision = transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=2 * grid,
            patch_size=2,
        )  # fmt: skip
        self.llama = transformers.LlamaForCausalLM(text_config(max_position_embeddings=1024))
        self.tower = transformers.CLIPVisionModel(vision)
        self.projector = (
            Ldp(16, 48)
            if kind == "mobilevlm"
            else torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.GELU(), torch.nn.Linear(48, 48))
        )
        self.tokens = 144 if kind == "mobilevlm" else 16

    def get_output_embeddings(self):
        return self.llama.get_output_embeddings()

    def embed(self, ids, pixels):
        x = self.llama.get_input_embeddings()(ids.clamp(max=VOCABULARY - 1))
        if pixels is not None:
            features = self.tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
            x[ids == IMAGE] = self.projector(features).flatten(0, 1)
        return x

    def forward(self, input_ids, pixel_values=None, **options):
        return self.llama(inputs_embeds=self.embed(input_ids, pixel_values), **options)

    def generate(self, input_ids, pixel_values=None, **options):
        x = self.embed(input_ids, pixel_values)
        return torch.cat([input_ids, self.llama.generate(inputs_embeds=x, **options)], dim=1)

    def tensors(self, *, tower: bool = True) -> dict:
        """As the authors name them; in a checkpoint of transformers 4 the CLIP tower has one level more."""
        made = dict(self.llama.state_dict())
        made |= {f"model.mm_projector.{key}": value for key, value in self.projector.state_dict().items()}
        if tower:
            made |= {f"model.vision_tower.vision_tower.{key}": value for key, value in self.tower_tensors().items()}
        return {key: value.clone() for key, value in made.items()}

    def tower_tensors(self) -> dict:
        found = self.tower.state_dict()
        return {key if key.startswith("vision_model.") else f"vision_model.{key}": v for key, v in found.items()}


def write(model: Model, kind: str, folder, *, tower: str = "inside", **changes) -> None:
    folder.mkdir(exist_ok=True)
    raw = model.llama.config.to_dict()
    raw |= {
        "model_type": kind, "mm_vision_tower": f"somewhere/{TOWER}", "mm_hidden_size": 16,
        "mm_projector_type": {"llava": "mlp2x_gelu", "llava_llama": "mlp2x_gelu"}.get(kind, "ldpnetv2"),
        "mm_vision_select_layer": -2, "mm_vision_select_feature": "patch", "image_aspect_ratio": "pad",
        "mm_use_im_start_end": False, "mm_use_im_patch_token": False, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(model.tensors(tower=tower == "inside"), folder / "model.safetensors")
    (folder / TOWER).mkdir(exist_ok=True)
    (folder / TOWER / "config.json").write_text(json.dumps({"vision_config": model.tower.config.to_dict()}))
    if tower == "beside":
        tensors = {key: value.clone() for key, value in model.tower_tensors().items()}
        save_file({**tensors, "text_projection.weight": torch.zeros(3)}, folder / TOWER / "model.safetensors")


def prompts(model: Model) -> list[Row]:
    """One picture, two, none."""
    rng = np.random.default_rng(0)
    side = model.tower.config.image_size

    def prompt(images: int, text: int) -> Row:
        ids = rng.integers(3, 90, text).tolist()
        for at in range(images):
            ids[2 * at + 1 : 2 * at + 1] = [IMAGE] * model.tokens
        pixels = rng.normal(size=(images, 3, side, side)).astype(np.float32)
        return Row(ids, {"pixel_values": list(pixels)} if images else {})

    return [prompt(1, 9), prompt(2, 12), prompt(0, 7)]


@pytest.fixture(scope="module", params=KINDS)
def saved(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param)
    model = Model(request.param).eval()
    perturb(model)
    write(model, request.param, folder)
    return model, folder, vlkv.load_params(folder), prompts(model)


class TestParity(ParityTests):
    pass


@pytest.mark.full
def test_a_row_is_answered_alike_by_a_policy_of_the_tower(saved):
    check_neighbours(saved[2], saved[3], policies.HiRED(keep=0.5))


@pytest.mark.full
def test_class_attention_of_a_pooled_token_is_the_mean_over_its_patches(tmp_path):
    model = Model("mobilevlm").eval()
    perturb(model)
    row = prompts(model)[0]
    tower = transformers.CLIPVisionModel._from_config(model.tower.config, attn_implementation="eager").eval()
    tower.load_state_dict(model.tower.state_dict())
    with torch.no_grad():
        given = tower(torch.tensor(np.stack(row.extra["pixel_values"])), output_attentions=True).attentions[1]
    pooled = given[0, :, 0, 1:].unflatten(1, (12, 2, 12, 2)).mean((2, 4)).flatten(1).numpy()  # [N, 144]
    write(model, "mobilevlm", tmp_path)
    params, is_vision = vlkv.load_params(tmp_path), np.asarray(row.ids) == IMAGE
    inputs = vlkv.Inputs.from_hf(joined([row]), params.config)
    rows = params.embed(jax.tree.map(jnp.asarray, inputs), (1,)).attention
    np.testing.assert_allclose(np.asarray(rows)[0, 0, :, : len(is_vision)][:, is_vision], pooled, atol=1e-6)


@pytest.mark.parametrize("tower", ["inside", "beside"])
def test_the_tower_may_lie_in_a_folder_of_its_name_and_conversion_brings_it_in(saved, tmp_path, tower):
    model, _, params, _ = saved
    kind = "llava_llama" if params.config.family == "llava_llama" else "mobilevlm"
    write(model, kind, tmp_path / "source", tower=tower)
    same(params, vlkv.load_params(tmp_path / "source"))
    convert(tmp_path / "source", tmp_path / "made", progress=False)
    shutil.rmtree(tmp_path / "source")
    again = vlkv.load_params(tmp_path / "made")
    same(params, again)
    assert again.config == params.config


def test_an_adapter_as_the_authors_publish_it(tmp_path):
    """Their config, an adapter of the text model, and what they trained besides: the projector."""
    model, base, source = Model("llava").eval(), tmp_path / "vicuna", tmp_path / "source"
    perturb(model)
    model.llama.save_pretrained(base)
    write(model, "llava", source, tower="beside")
    (source / "model.safetensors").unlink()
    part, a, b = "model.layers.1.self_attn.o_proj", torch.randn(4, 48), torch.randn(48, 4)
    adapter = {f"base_model.model.{part}.lora_{side}.weight": x for side, x in (("A", a), ("B", b))}
    torch.save(adapter, source / "adapter_model.bin")
    projector = {f"model.mm_projector.{key}": value + 1 for key, value in model.projector.state_dict().items()}
    trained = {f"base_model.model.{key}": value for key, value in projector.items()}
    torch.save(trained, source / "non_lora_trainables.bin")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(base)}
    (source / "adapter_config.json").write_text(json.dumps(config))
    made = vlkv.load_params(convert(source, tmp_path / "made", progress=False))

    weights = model.tensors() | projector
    weights[f"{part}.weight"] += 2 * (b @ a)
    write(model, "llava", tmp_path / "merged")
    save_file(weights, tmp_path / "merged" / "model.safetensors")
    merged = vlkv.load_params(tmp_path / "merged")
    assert made.config == merged.config
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), made, merged)


def test_a_missing_tower_is_refused_with_a_remedy(saved, tmp_path):
    model = saved[0]
    write(model, saved[2].config.family, tmp_path, tower="nowhere")
    shutil.rmtree(tmp_path / TOWER)
    with pytest.raises(InputError, match=f"'somewhere/{TOWER}' is not known .*: put its config.json into a folder"):
        vlkv.load_params(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "vision_config": model.tower.config.to_dict()}))
    with pytest.raises(InputError, match=f"contains no vision tower: put the folder {TOWER} "):
        vlkv.load_params(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_projector_type": "linear"}, "mm_projector_type='linear'"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end=True"),
        ({"image_aspect_ratio": "anyres"}, "image_aspect_ratio='anyres'"),
        ({"mm_patch_merge_type": "spatial_unpad"}, "mm_patch_merge_type='spatial_unpad'"),
        ({"mm_vision_select_feature": "cls"}, "mm_vision_select_feature='cls'"),
        ({"mm_hidden_size": 20}, "mm_hidden_size=20"),
        ({"mm_vision_tower": "google/.."}, "mm_vision_tower='google/..' is not the name of a tower"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_that_is_not_honoured_is_refused_by_name(saved, tmp_path, changes, message):
    write(saved[0], "llava", tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        vlkv.load_params(tmp_path)


def test_published_towers_are_known_by_name():
    config = config_from_hf(
        dict(model_type="mobilevlm", mm_vision_tower="openai/clip-vit-large-patch14-336", mm_projector_type="ldpnetv2",
             vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16)
    )  # fmt: skip
    assert (config.vision.grid, config.vision.blocks, config.side, config.image_token) == (24, 23, 12, 32000)


@pytest.fixture(scope="module")
def processor(saved, tmp_path_factory):
    model, _, params, _ = saved
    folder = tmp_path_factory.mktemp("processor")
    write(model, params.config.family, folder, vocab_size=259)
    tokenizer = make_tokenizer("<pad>")
    tokenizer.save(str(folder / "tokenizer.json"))
    return vlkv.load_processor(folder), tokenizer


def test_the_prompt_is_vicunas_with_a_token_that_no_text_has(processor):
    """The pieces around the picture are written each on its own, as the authors' own code does."""
    ours, tokenizer = processor
    picture = PIL.Image.new("RGB", (50, 30), (200, 10, 10))
    inputs = ours(picture, "What is this?")
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: "
    )
    before = tokenizer.encode(system).ids
    after = tokenizer.encode("\nWhat is this? ASSISTANT:", add_special_tokens=False).ids
    tokens = ours.pictures.tokens
    length = len(before) + tokens + len(after)
    assert inputs.valid.sum() == length
    assert inputs.tokens[0, : len(before)].tolist() == before
    assert inputs.tokens[0, len(before) + tokens : length].tolist() == after
    assert np.flatnonzero(inputs.is_vision[0]).tolist() == list(range(len(before), len(before) + tokens))
    side = round(tokens**0.5)
    assert inputs.grid[0, len(before) + side + 1].tolist() == [0, 1, 1]


def test_pictures_are_padded_as_the_config_says(processor):
    """By transformers' processor on PIL, after the padding of the authors' code: the mean colour, the half rounded."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    ours, _ = processor
    side = ours.pictures.side
    theirs = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    rng = np.random.default_rng(0)
    for width, height in rng.integers(5, 90, (10, 2)).tolist():
        picture = PIL.Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        most = max(width, height)
        square = np.empty((most, most, 3), np.uint8)
        square[:] = np.trunc(np.array(theirs.image_mean) * 255)
        top, left = (most - height) // 2, (most - width) // 2
        square[top : top + height, left : left + width] = np.asarray(picture)
        wanted = theirs(PIL.Image.fromarray(square), return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(ours.pictures.read(picture).arrays["pixel_values"][0], wanted, atol=1e-5)
