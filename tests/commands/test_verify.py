"""`vlkv verify` against transformers: it passes on whole checkpoints, and names the layer where a tensor is wrong."""

from __future__ import annotations

import json
from functools import partial

import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from tests.families.common_glm import make as make_glm
from tests.families.common_qwen import make as make_qwen
from tests.families.test_qwen2_vl_pictures import SETTINGS
from tests.families.test_qwen2_vl_pictures import write_folder as write_qwen_processor
from tests.families.test_smolvlm import make as make_smolvlm
from tests.parity.conftest import make_llava, make_text
from tests.processing.conftest import IMAGE, write_folder
from tests.processing.test_processing_glm import RAW as GLM
from tests.processing.test_processing_glm import write_folder as write_glm_processor
from tests.processing.test_processing_smolvlm import IMAGE as SMOLVLM_IMAGE
from tests.processing.test_processing_smolvlm import write_folder as write_smolvlm_processor
from vlkv import loading
from vlkv.cli import main
from vlkv.tools.commands import verify


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    model = make_llava(vocab_size=300, max_position_embeddings=512)
    model.config.image_token_id = IMAGE
    model.save_pretrained(folder)
    return write_folder(folder)


def passes(capsys, folder, prompts=("image", "text")) -> None:
    """Float32 agrees to rounding in all 32 tokens."""
    assert main(["verify", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {(row["prompt"], row["dtype"]): row for row in report["rows"]}
    assert report["passed"]
    assert set(found) == {(prompt, dtype) for prompt in prompts for dtype in ("float32", "bfloat16")}
    for (_, dtype), row in found.items():
        assert row["passed"] and row["logit_std"] > 0.5
        if dtype == "float32":
            assert row["tokens"] == row["of"] == 32 and row["logit_error"] < 1e-3


@pytest.mark.slow
def test_llava(llava, capsys):
    passes(capsys, llava)


@pytest.mark.full
def test_rules_of_the_folder_are_compared_and_sampling_is_not(llava, tmp_path, capsys, monkeypatch):
    for file in llava.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    settings = {"eos_token_id": 2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [5],
                "do_sample": True, "top_k": 3, "max_new_tokens": 7}  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    said = "do_sample=True, top_k=3, max_new_tokens=7 used only with sampling=vlkv.default_sampling"
    with pytest.warns(UserWarning, match=said):
        vlkv.load_params(tmp_path)
    monkeypatch.setattr(loading, "check_settings", lambda config: None)
    passes(capsys, tmp_path)
    monkeypatch.setattr(verify, "Greedy", partial(vlkv.Greedy, rules=vlkv.LogitRules()))
    assert main(["verify", str(tmp_path), "--dtype", "float32"]) == 2, "the rules change the tokens"


@pytest.mark.full
@pytest.mark.ci("qwen3_5")
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_qwen(tmp_path, capsys, kind):
    """Pictures of many sizes, and three axes of positions."""
    model = make_qwen(kind, vocab_size=300)
    model.config.image_token_id, model.config.video_token_id = 3, 260
    model.save_pretrained(tmp_path)
    write_qwen_processor(tmp_path, {**SETTINGS, "patch_size": 4, "min_pixels": 64, "max_pixels": 4096})
    passes(capsys, tmp_path)


@pytest.mark.full
@pytest.mark.ci("glm4v")
@pytest.mark.parametrize("kind", ["glm4v", "glm_ocr"])
def test_glm(tmp_path, capsys, kind):
    """Patches of another processor, and a rotation of other channel pairs."""
    model = make_glm(kind, vocab_size=300)
    model.config.image_token_id = GLM["image_token_id"]
    model.save_pretrained(tmp_path)
    write_glm_processor(tmp_path)
    passes(capsys, tmp_path)


@pytest.mark.full
def test_smolvlm(tmp_path, capsys):
    """Tiles in rows, as its processor in transformers returns them, without the arrays that only we have."""
    model = make_smolvlm("smolvlm", vocab_size=300)
    model.config.image_token_id = SMOLVLM_IMAGE
    model.save_pretrained(tmp_path)
    write_smolvlm_processor(tmp_path)
    passes(capsys, tmp_path)


@pytest.mark.full
def test_a_text_model(tmp_path, capsys):
    make_text("llama", vocab_size=300, max_position_embeddings=512).save_pretrained(tmp_path)
    write_folder(tmp_path)
    passes(capsys, tmp_path, prompts=("text",))
    assert main(["verify", str(tmp_path), "--image", "page.png"]) == 2
    assert "--image page.png: this model has no vision tower" in capsys.readouterr().err


def test_a_mark_in_the_question_is_for_the_prompt_with_an_image():
    processor = vlkv.load_processor("mini")
    batches = verify._batches(processor, None, "what <image> says?")
    assert (batches["image"]["input_ids"] == processor.config.image_token).sum() == processor.config.vision.tokens
    assert not (batches["text"]["input_ids"] == processor.config.image_token).any()


@pytest.mark.full
def test_the_demo_model(capsys):
    assert main(["verify", "mini"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("passes") == 4 and "DIFFERS" not in printed


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("language_model.model.layers.1.self_attn.{}_proj.weight", "decoder layer 1 or the last norm"),
        pytest.param("vision_tower.encoder.layers.0.self_attn.{}_proj.weight", "the vision tower or the projector",
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_two_swapped_tensors_are_found(llava, tmp_path, capsys, pattern, said):
    """Keys for values where their shapes agree: the copy loads, and answers something else."""
    for file in llava.iterdir():
        (tmp_path / file.name).symlink_to(file)
    tensors = load_file(llava / "model.safetensors")
    first, second = (next(key for key in tensors if key.endswith(pattern.format(x).split("model.")[-1])) for x in "kv")
    tensors[first], tensors[second] = tensors[second], tensors[first]
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    command = ["verify", str(tmp_path), "--reference", str(llava), "--dtype", "float32", "--tokens", "2", "--json"]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert not json.loads(printed.out)["passed"]
    assert f"differs from transformers: image, float32: first at {said}" in printed.err


def test_a_family_that_transformers_does_not_have(tmp_path, capsys):
    write_folder(tmp_path)
    raw = {"model_type": "internlm2", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
           "num_attention_heads": 2, "vocab_size": 300, "bias": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["verify", str(tmp_path)]) == 2
    assert "no class of its own for model_type internlm2" in capsys.readouterr().err
