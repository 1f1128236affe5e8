"""Gemma 4 against transformers in float32: layers that share keys and values, K = V, inputs per layer, experts, images.

Prompts are longer than the window. `KINDS` has a tiny model of each published form of decoder and tower.
"""

from __future__ import annotations

import functools
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

import vlkv
from tests.families import common
from tests.families.common import (
    NEW,
    Row,
    answer,
    check_answers,
    check_files,
    check_later_turn,
    check_neighbours,
    check_refused,
    check_states,
    every_stage,
    forward,
    joined,
    raw_of,
    read,
    save_file,
)
from tests.parity.conftest import perturb, torch, transformers
from vlkv.errors import InputError
from vlkv.families import config_from_hf

IMAGE, BEGIN, END, AUDIO, VIDEO = 118, 116, 117, 114, 115
PATCH, MERGE, WINDOW, MOST = 4, 2, 6, 12
SLIDING, FULL = "sliding_attention", "full_attention"
SERVER = dict(attention_k_eq_v=True, num_global_key_value_heads=1, use_bidirectional_attention="vision")
KINDS = {
    "e2b": dict(
        num_hidden_layers=7, layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_kv_shared_layers=3, hidden_size_per_layer_input=6, use_double_wide_mlp=True),
    "26b-a4b": dict(
        num_hidden_layers=5, layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL], enable_moe_block=True, num_experts=6,
        top_k_experts=2, moe_intermediate_size=12, **SERVER),
    "31b": dict(num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=0, **SERVER),
    # Combinations that are not published: K = V with shared layers and inputs per layer; and a decoder without windows.
    "mixed": dict(
        num_hidden_layers=6, layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=2,
        hidden_size_per_layer_input=6, **SERVER),
    "full": dict(num_hidden_layers=3, layer_types=[FULL] * 3, num_kv_shared_layers=1, use_double_wide_mlp=True),
}  # fmt: skip


def make(kind: str):
    """A two-block tower and a decoder; the head is tied in one kind, as in the published checkpoints."""
    small = kind in ("e2b", "full")
    config = transformers.Gemma4Config(
        text_config=dict(
            vocab_size=120, hidden_size=48, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, global_head_dim=16, sliding_window=WINDOW, max_position_embeddings=256, bos_token_id=1,
            eos_token_id=2, pad_token_id=0, vocab_size_per_layer_input=120, hidden_size_per_layer_input=0,
            final_logit_softcapping=20.0)
        | KINDS[kind],
        vision_config=dict(
            hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=12, patch_size=PATCH, pooling_kernel_size=MERGE, position_embedding_size=16,
            standardize=not small, use_clipped_linears=small),
        audio_config=None, image_token_id=IMAGE, boi_token_id=BEGIN, eoi_token_id=END, audio_token_id=AUDIO,
        video_token_id=VIDEO, tie_word_embeddings=kind == "31b", vision_soft_tokens_per_image=MOST,
    )  # fmt: skip
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    perturb(model, 0)
    # Attention without 1 / sqrt(H) is far from uniform, and norms enlarge small outputs, so layers would multiply the
    # rounding errors of both sides.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight") or ".post_" in name:
                parameter.mul_(0.5)
        # No answer contains these tokens, whose embeddings transformers replaces also while decoding.
        model.get_output_embeddings().weight[[AUDIO, VIDEO, IMAGE]] = 0.0
    bounds = dict(input_min=-1.0, input_max=1.2, output_min=-1.5, output_max=1.1)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[-1]
        if leaf in bounds:
            buffer.fill_(bounds[leaf])
        elif leaf in ("layer_scalar", "std_bias", "std_scale"):
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def picture(rng, lines: int, columns: int) -> dict:
    """An image as the processor returns it, padded to `MOST` tokens."""
    most, count = MOST * MERGE**2, lines * columns
    at = np.stack(np.meshgrid(np.arange(columns), np.arange(lines)), axis=-1).reshape(-1, 2)
    return {
        "pixel_values": [np.pad(rng.random((count, 3 * PATCH**2)), [(0, most - count), (0, 0)]).astype(np.float32)],
        "image_position_ids": [np.pad(at, [(0, most - count), (0, 0)], constant_values=-1)],
    }


def make_rows(seed: int = 0) -> list[Row]:
    """Two images of different shapes; one image; none. All are longer than the window, also the text after the image.

    The second image has more tokens than the window.
    """
    rng, rows = np.random.default_rng(seed), []
    for shapes, words in ((((4, 2), (2, 6)), 12), (((6, 6),), 17), ((), 15)):
        ids, extra = rng.integers(3, 110, words).tolist(), {}
        for lines, columns in shapes:
            ids[2:2] = [BEGIN, *[IMAGE] * (lines * columns // MERGE**2), END, 5]
        for lines, columns in reversed(shapes):
            for name, values in picture(rng, lines, columns).items():
                extra.setdefault(name, []).extend(values)
        rows.append(Row(ids, {"mm_token_type_ids": [[int(token == IMAGE) for token in ids]], **extra}))
    return rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Models by kind, each made once: with its folder, our parameters, and rows."""
    folder = tmp_path_factory.mktemp("gemma4")
    return functools.cache(lambda kind: common.save(make(kind), folder / kind, make_rows()))


@pytest.mark.default("e2b", "26b-a4b")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_logits_of_a_batch(saved, kind):
    model, _, params, rows = saved(kind)
    inputs = check_states(params, rows, [answer(model, row) for row in rows], ["left", "right", "left"])
    np.testing.assert_allclose(forward(params, inputs), read(params, inputs)[1], atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_images(saved, kind):
    model, _, params, rows = saved(kind)
    rows = [Row(rows[2].ids), Row(rows[2].ids[:9])]
    check_states(params, rows, [answer(model, row) for row in rows], "left")


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])  # transformers' `generate` fails on it
def test_greedy_tokens(saved, kind):
    """The last layers decode with the entries of earlier ones."""
    model, _, params, rows = saved(kind)
    answers = [answer(model, row, NEW) for row in rows]
    check_answers(params, rows, answers, "left")
    tied = kind == "31b"  # then a random model repeats the last token
    assert tied or min(len(set(tokens.tolist())) for _, _, tokens in answers) > 2


@pytest.mark.full
@pytest.mark.parametrize("kind", ["e2b", "26b-a4b"])
def test_a_row_is_answered_alike_whatever_its_neighbours(saved, kind):
    """With a policy of all stages, which reduces the prompt before the layers that use keys of earlier ones."""
    check_neighbours(saved(kind)[2], make_rows(), every_stage())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["e2b", "26b-a4b", "mixed"])
def test_a_later_turn_with_images(saved, kind):
    """In layers with a window the images of a later turn see both ways, in the others only earlier tokens."""
    check_later_turn(saved(kind)[2], [make_rows(1)[1], make_rows(2)[0]], atol=2e-4)


@pytest.mark.full
def test_full_attention_is_causal_within_an_image(saved):
    """A model whose layers all see both ways gives other logits, and one whose layers are all causal too."""
    _, _, params, rows = saved("26b-a4b")
    inputs, config = vlkv.Inputs.from_hf(joined(rows[:1]), params.config), params.config
    assert (config.decoder.image_block, config.decoder.image_block_slides) == (MOST, True)
    logits = np.asarray(read(params, inputs)[1])
    for changes in ({"image_block_slides": False}, {"image_block": 0}):
        other = nnx.clone(params)
        for name, value in changes.items():
            setattr(other.decoder, name, value)
        assert np.abs(np.asarray(read(other, inputs)[1]) - logits).max() > 0.1


def test_every_file_gives_the_same_parameters(saved, tmp_path):
    """Also in several files, converted, and with tensors that are not used: of audio, and keys of shared layers."""
    model, folder, *_ = saved("e2b")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    unused = {"model.audio_tower.output_proj.weight": (3, 2), "model.embed_audio.embedding_projection.weight": (3, 2),
              "model.language_model.layers.5.self_attn.k_proj.weight": (16, 48),
              "model.language_model.layers.6.self_attn.k_norm.weight": (16,)}  # fmt: skip
    shutil.copytree(folder, tmp_path / "unused")
    more = {name: torch.ones(shape) for name, shape in unused.items()}
    save_file(state | more, tmp_path / "unused" / "model.safetensors", {"format": "pt"})
    check_files(saved("e2b"), tmp_path, "unused")
    save_file(state | {"model.language_model.layers.0.self_attn.k_norm.bias": torch.ones(8)},
              tmp_path / "unused" / "model.safetensors", {"format": "pt"})  # fmt: skip
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.k_norm\.bias"):
        vlkv.load_params(tmp_path / "unused")


def test_the_published_form_of_the_heads(saved):
    """The published files name the heads of layers with full attention; those of transformers 5.24 list layers."""
    _, folder, params, _ = saved("26b-a4b")
    raw = raw_of(folder)
    text = raw["text_config"]
    own = text.pop("per_layer_config")
    assert set(own) == {"1", "4"}
    text |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert config_from_hf(raw) == params.config
    text["attention_k_eq_v"] = False  # then the field for key heads is not used, as in transformers
    assert config_from_hf(raw).decoder.kv_heads == 2
    text["per_layer_config"] = {"1": {"head_dim": 16}}
    with pytest.raises(InputError, match="per_layer_config must have head_dim and num_key_value_heads"):
        config_from_hf(raw)


def test_the_attention_of_a_token_is_the_sum_over_its_patches(saved):
    """It is in the order of the tokens, and the attention of an image sums to one."""
    _, _, params, rows = saved("26b-a4b")
    inputs = vlkv.Inputs.from_hf(joined(rows), params.config)
    given = np.asarray(jax.jit(lambda params, inputs: params.embed(inputs, (-1,)).attention)(params, inputs))
    for row, images in enumerate((2, 1)):
        image = inputs.grid[row, :, 0]
        for number in range(images):
            each = given[row, 0][:, image == number]
            np.testing.assert_allclose(each.sum(axis=-1), 1, atol=1e-5)
            assert each.std(axis=-1).min() > 1e-4


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("input_features", np.zeros((1, 4, 128)), "audio is not supported, only text and images"),
        ("pixel_values_videos", np.zeros((1, 1, 16, 48)), "video is not supported, only text and images"),
    ],
)
def test_audio_and_video_are_refused_by_name(saved, name, value, says):
    config = saved("26b-a4b")[2].config
    for batch in ({"input_ids": [[3, 4]], name: value}, {"input_ids": [[3, AUDIO if "audio" in says else VIDEO]]}):
        with pytest.raises(InputError, match=says) as error:
            vlkv.Inputs.from_hf(batch, config)
        assert len(str(error.value)) <= 200


def test_images_without_text_between_them_are_refused(saved):
    """Their tokens would be one block, in which they attend to each other."""
    config, rng = saved("26b-a4b")[2].config, np.random.default_rng(0)
    one, other = picture(rng, 6, 6), picture(rng, 4, 4)
    batch = {name: one[name] + other[name] for name in one} | {"input_ids": [[3, *[IMAGE] * 13, 4]]}
    with pytest.raises(InputError, match="13 image tokens without text between them"):
        vlkv.Inputs.from_hf(batch, config)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        (None, "vision_soft_tokens_per_image", 0),
        (None, "image_token_id", "<image>"),
        ("vision_config", "hidden_activation", "silu"),
        ("vision_config", "head_dim", 8),
        ("vision_config", "num_key_value_heads", 1),
        ("vision_config", "model_type", "siglip_vision_model"),
        ("text_config", "model_type", "gemma2"),
        ("text_config", "use_bidirectional_attention", "all"),
        ("text_config", "num_kv_shared_layers", 6),
        ("text_config", "layer_types", ["chunked_attention"] * 7),
        ("text_config", "hidden_size_per_layer_input", -1),
        ("text_config", "hidden_activation", "silu"),
        ("text_config", "final_logit_softcapping", "x"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(saved, part, field, value):
    check_refused(raw_of(saved("e2b")[1]), {field: value}, field, part)
