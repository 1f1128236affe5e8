"""SmolVLM and Idefics3 against transformers in float32, and their processor."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import vlkv
from tests.families import common
from tests.families.common import (
    ParityTests,
    Row,
    answer,
    check_files,
    check_later_turn,
    check_refused,
    check_states,
    joined,
    raw_of,
)
from tests.parity.conftest import perturb, torch, transformers
from vlkv.errors import InputError

IMAGE = 99
KINDS = {  # pixels of a tile and of a patch, patches per side of a token, vision tokens of a tile
    "idefics3": (55, 2, 9, 9),  # 27 patches per side, as in SmolVLM-2.2B, and a leftover pixel
    "smolvlm": (28, 7, 2, 4),
}


def make(kind: str, **changes):
    """A two-block tower and a two-layer decoder with grouped heads."""
    side, patch, merge, _ = KINDS[kind]
    classes = {
        "idefics3": (transformers.Idefics3Config, transformers.Idefics3ForConditionalGeneration),
        "smolvlm": (transformers.SmolVLMConfig, transformers.SmolVLMForConditionalGeneration),
    }[kind]
    config = classes[0](
        text_config=dict(
            model_type="llama", vocab_size=120, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
            pad_token_id=0, rms_norm_eps=1e-5) | changes,
        vision_config=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                           image_size=side, patch_size=patch),
        image_token_id=IMAGE, scale_factor=merge, pad_token_id=0,
    )  # fmt: skip
    model = classes[1](config).eval()
    perturb(model, 0)
    return model


def make_rows(kind: str, seed: int = 0) -> list[Row]:
    """An image of three tiles and one of one tile; an image of one tile; no image."""
    side, _, _, tokens = KINDS[kind]
    rng, rows = np.random.default_rng(seed), []
    for pictures, words in (((3, 1), 12), ((1,), 13), ((), 9)):
        ids = rng.integers(3, 90, words).tolist()
        for tiles in pictures:
            ids[4:4] = [95, *([96, *[IMAGE] * tokens] * tiles), 95, 7]
        pixels = np.zeros((4, 3, side, side), np.float32)  # transformers pads rows with tiles of zeros
        pixels[: sum(pictures)] = rng.normal(size=(sum(pictures), 3, side, side))
        mask = np.broadcast_to(pixels.any(axis=(1, 2, 3))[:, None, None], (4, side, side)).astype(int)
        extra = {"pixel_values": [pixels], "pixel_attention_mask": [mask]} if pictures else {}
        rows.append(Row(ids, extra))
    return rows


@pytest.fixture(scope="module", params=list(KINDS))
def saved(request, tmp_path_factory):
    kind = request.param
    return common.save(make(kind), tmp_path_factory.mktemp(kind), make_rows(kind))


class TestParity(ParityTests):
    pass


@pytest.mark.full
def test_rows_without_any_image(saved):
    model, _, params, rows = saved
    rows = [Row(row.ids[-count:]) for row, count in zip(rows, (5, 7, 9), strict=True)]
    check_states(params, rows, [answer(model, row) for row in rows])


@pytest.mark.full
def test_a_later_turn_with_an_image(saved):
    """Two prompts in a row, each with an image, are one prompt."""
    kind = saved[2].config.family
    check_later_turn(saved[2], [make_rows(kind, 1)[1], make_rows(kind, 2)[0]])


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


def test_every_file_gives_the_same_parameters(saved, tmp_path):
    check_files(saved, tmp_path)


def test_the_attention_of_a_token_is_that_of_its_patches(saved):
    """It is in the order of the tokens: the embedding of a token follows the patches whose attention it gets."""
    _, _, params, rows = saved
    inputs = vlkv.Inputs.from_hf(joined(rows), params.config)
    given = np.asarray(jax.jit(lambda params, inputs: params.embed(inputs, (-1,)).attention)(params, inputs))
    for row, tiles in enumerate((4, 1)):
        each = given[row, 0][:, inputs.is_vision[row]].reshape(2, tiles, -1)
        np.testing.assert_allclose(each.sum(axis=-1), 1, atol=1e-5)
        assert each.std(axis=-1).min() > 1e-4


def test_tiles_that_do_not_fit(saved):
    _, _, params, rows = saved
    side, _, _, tokens = KINDS[params.config.family]
    batch = joined(rows)
    pixels = np.array(batch["pixel_values"])
    padding = pixels * (np.arange(4) < 3)[:, None, None, None]
    with pytest.raises(InputError, match=rf"{5 * tokens} image tokens, but 4 image\(s\) or tile\(s\) of {tokens}"):
        vlkv.Inputs.from_hf({**batch, "pixel_values": padding}, params.config)
    with pytest.raises(InputError, match=rf"expected \[images, 3, {side}, {side}\]"):
        vlkv.Inputs.from_hf({**batch, "pixel_values": pixels[..., :-2]}, params.config)
    with pytest.raises(InputError, match="0 image"):
        vlkv.Inputs.from_hf({**batch, "pixel_values": 0 * pixels}, params.config)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("vision_config", "hidden_act", "gelu"),
        ("vision_config", "model_type", "clip_vision_model"),
        ("vision_config", "num_channels", 1),
        ("vision_config", "image_size", [28, 14]),
        ("vision_config", "patch_size", 64),
        ("text_config", "model_type", "gemma"),
        (None, "scale_factor", 5),
        (None, "scale_factor", 0.5),
        (None, "image_token_id", "<image>"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(saved, part, field, value):
    check_refused(raw_of(saved[1]), {field: value}, field, part)
