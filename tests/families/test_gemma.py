"""What is special about Gemma 3 and Gemma 4. `test_every_family.py` has the rest."""

from functools import partial

import jax
import numpy as np
import pytest

import vlkv
from tests.families.common import joined, raw_of
from tests.families.common_gemma import AUDIO, IMAGE, VIDEO, gemma3_rows, picture, write_unused
from vlkv import policies
from vlkv.errors import InputError
from vlkv.families import config_from_hf


def test_tokens_that_are_processed_one_by_one_cannot_contain_an_image(saved):
    params = saved("gemma3").params
    first, second = (
        vlkv.Inputs.from_hf(joined([row]), params.config) for row in (gemma3_rows(1)[1], gemma3_rows(2)[0])
    )
    prefill = partial(vlkv.prefill, policy=policies.H2O(keep=0.5), new_tokens=60)
    cache, _ = jax.eval_shape(prefill, params, first)
    with pytest.raises(InputError, match="image tokens of this model attend to each other in both directions"):
        jax.eval_shape(vlkv.extend, params, cache, second)


def test_a_tensor_that_is_neither_used_nor_known_is_refused(saved, tmp_path):
    write_unused(
        saved("gemma4-e2b"), tmp_path / "more", **{"model.language_model.layers.0.self_attn.k_norm.bias": (8,)}
    )
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.k_norm\.bias"):
        vlkv.load_params(tmp_path / "more")


def test_the_published_form_of_the_heads(saved):
    """The published files name the heads of layers with full attention; those of transformers 5.24 list layers."""
    _, folder, params, _ = saved("gemma4-26b-a4b")
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


@pytest.mark.parametrize(("name", "value", "says"), [
    ("input_features", np.zeros((1, 4, 128)), "audio is not supported, only text and images"),
    ("pixel_values_videos", np.zeros((1, 1, 16, 48)), "video is not supported, only text and images"),
])  # fmt: skip
def test_audio_and_video_are_refused_by_name(saved, name, value, says):
    config = saved("gemma4-26b-a4b").params.config
    for batch in ({"input_ids": [[3, 4]], name: value}, {"input_ids": [[3, AUDIO if "audio" in says else VIDEO]]}):
        with pytest.raises(InputError, match=says) as error:
            vlkv.Inputs.from_hf(batch, config)
        assert len(str(error.value)) <= 200


def test_images_without_text_between_them_are_refused(saved):
    """Their tokens would be one block, in which they attend to each other."""
    config, rng = saved("gemma4-26b-a4b").params.config, np.random.default_rng(0)
    one, other = picture(rng, 6, 6), picture(rng, 4, 4)
    batch = {name: one[name] + other[name] for name in one} | {"input_ids": [[3, *[IMAGE] * 13, 4]]}
    with pytest.raises(InputError, match="13 image tokens without text between them"):
        vlkv.Inputs.from_hf(batch, config)
