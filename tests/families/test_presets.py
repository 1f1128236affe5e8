"""Presets have as many parameters as were published."""

from pathlib import Path

import pytest

import vlkv
from vlkv import families
from vlkv.tools.planning import arithmetic

ROWS = [line.split() for line in Path(__file__).with_name("published.txt").read_text().splitlines() if line[0] != "#"]
PUBLISHED = {name: int(parameters) for name, parameters, *_ in ROWS}
# Published, but never run: CLIP's last block and the norm behind it, SigLIP's norm.
UNUSED = {**dict.fromkeys(("llava", "llava_next", "llava_next_video", "mobilevlm"), 12_598_272),
          **dict.fromkeys(("llava_onevision", "llava_qwen"), 2304)}  # fmt: skip


@pytest.mark.default(
    "llava-1.5-7b", "llava-next-mistral", "llava-onevision-0.5b", "llava-video", "qwen2-vl-2b", "qwen2.5-vl-3b",
    "qwen3-vl-2b", "qwen3.5-0.8b", "glm-4.1v", "glm-ocr", "internvl2-1b", "internvl2-4b", "internvl3-1b",
    "internvl3.5-1b", "smolvlm-256m", "idefics3", "mobilevlm-v2-1.7b", "paddleocr", "[qwen-vl]", "eve-7b]",
    "llama-3.2-1b", "[mistral-7b]", "qwen3-0.6b", "gemma-3-270m", "gemma4-e2b",
)  # fmt: skip
@pytest.mark.parametrize("name", vlkv.presets)
def test_parameters_are_as_many_as_published(name):
    stored, _ = arithmetic.parameters(vlkv.presets[name])
    assert stored == PUBLISHED[name] - UNUSED.get(families.model_type(vlkv.presets.raw[name]), 0)


BILLIONS = {
    "qwen3-30b-a3b": 3.3,
    "qwen3-vl-30b-a3b": 3.9,
    "qwen3-8b": 8.2,
    "gemma4-26b-a4b": 4.4,
    "qwen3.5-35b-a3b": 3.9,
}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_active_parameters(name, billions):
    """Billions of active parameters in the models' names. The towers have 0.5 billion more."""
    stored, active = arithmetic.parameters(vlkv.presets[name])
    assert stored == PUBLISHED[name]
    assert active / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.full
@pytest.mark.ci(
    "llava-next", "llava-onevision-0.5b", "qwen2-vl", "qwen2.5-vl", "qwen3-vl-2b", "qwen3.5-0.8b", "qwen3.5-35b",
    "glm-ocr", "internvl3-1b", "smolvlm-256m", "paddleocr", "gemma4-e4b", "gemma4-26b", "qwen3-30b",
)  # fmt: skip
@pytest.mark.parametrize("name", [name for name, _, *counted in ROWS if counted])
def test_transformers_counts_as_many(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    raw = dict(vlkv.presets.raw[name])
    auto = transformers.AutoModelForImageTextToText if "vision_config" in raw else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.for_model(raw.pop("model_type"), **raw))
    saved = set(model.state_dict())  # Gemma 4 also saves buffers, such as the factor of each layer
    buffers = sum(buffer.numel() for key, buffer in model.named_buffers() if key in saved)
    assert sum(parameter.numel() for parameter in model.parameters()) + buffers == PUBLISHED[name]


def test_tokens_of_internvl():
    """256 of each tile, marked by a token within the vocabulary, as is the one that ends an answer."""
    for config in (vlkv.presets[name] for name in vlkv.presets if name.startswith("internvl")):
        assert config.per_picture == 256
        assert all(0 <= token < config.decoder.vocab_size for token in (config.image_token, *config.stop))


def test_a_preset_that_is_not_there():
    with pytest.raises(vlkv.InputError, match=r"no preset 'llava-1\.5-70b': did you mean llava-1\.5-7b\?"):
        vlkv.presets["llava-1.5-70b"]
    assert "llava-1.5-7b" in vlkv.presets and "gpt" not in vlkv.presets
