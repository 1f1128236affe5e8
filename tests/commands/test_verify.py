"""`vlkv verify` against transformers: it passes on whole checkpoints, and names the layer where a tensor is wrong."""

import json
import types
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from tests.processing.conftest import IMAGE, write_folder
from vlkv import loading
from vlkv.cli import main
from vlkv.tools.commands import verify


def qwen3_5(folder):
    """Pictures of many sizes, and three axes of positions."""
    from tests.families.common_qwen import make
    from tests.families.test_qwen2_vl_pictures import SETTINGS
    from tests.families.test_qwen2_vl_pictures import write_folder as write

    write(folder, {**SETTINGS, "patch_size": 4, "min_pixels": 64, "max_pixels": 4096})
    model = make("qwen3_5", vocab_size=300)
    model.config.video_token_id = 260
    return model, 3


def glm4v(folder):
    """Patches of another processor, and a rotation of other channel pairs."""
    from tests.families.common_glm import make
    from tests.processing.test_processing_glm import RAW
    from tests.processing.test_processing_glm import write_folder as write

    write(folder)
    return make("glm4v", vocab_size=300), RAW["image_token_id"]


def smolvlm(folder):
    """Tiles in rows, as its processor in transformers returns them, without the arrays that only we have."""
    from tests.families.common_patches import make_smolvlm
    from tests.processing.test_processing_smolvlm import IMAGE as image
    from tests.processing.test_processing_smolvlm import write_folder as write

    write(folder)
    return make_smolvlm("smolvlm", vocab_size=300), image


@pytest.mark.full
@pytest.mark.ci("qwen3_5")
@pytest.mark.parametrize("write", [qwen3_5, glm4v, smolvlm], ids=lambda write: write.__name__)
def test_families(tmp_path, capsys, write):
    """Float32 agrees to rounding in all 32 tokens."""
    model, model.config.image_token_id = write(tmp_path)
    model.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {(row["prompt"], row["dtype"]): row for row in report["rows"]}
    assert report["passed"]
    assert set(found) == {(prompt, dtype) for prompt in ("image", "text") for dtype in ("float32", "bfloat16")}
    for (_, dtype), row in found.items():
        assert row["passed"] and row["logit_std"] > 0.5
        assert dtype == "bfloat16" or (row["tokens"] == row["of"] == 32 and row["logit_error"] < 1e-3)


@pytest.mark.full
def test_a_text_model(tmp_path, capsys):
    from tests.parity.conftest import make_text

    make_text("llama", vocab_size=300, max_position_embeddings=512).save_pretrained(tmp_path)
    write_folder(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("passes") == 2 and "32/32" in printed and "DIFFERS" not in printed
    assert main(["verify", str(tmp_path), "--image", "page.png"]) == 2
    assert "--image page.png: this model has no vision tower" in capsys.readouterr().err


@pytest.mark.full
def test_rules_of_the_folder_are_compared_and_sampling_is_not(tmp_path, capsys, monkeypatch):
    from tests.parity.conftest import make_text

    make_text("llama", vocab_size=300, max_position_embeddings=512).save_pretrained(tmp_path)
    write_folder(tmp_path)
    settings = {"eos_token_id": 2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [5],
                "do_sample": True, "top_k": 3, "max_new_tokens": 7}  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match="do_sample=True, top_k=3, max_new_tokens=7 used only with"):
        vlkv.load_params(tmp_path)
    monkeypatch.setattr(loading, "check_settings", lambda config: None)
    assert main(["verify", str(tmp_path), "--dtype", "float32"]) == 0
    monkeypatch.setattr(verify, "Greedy", partial(vlkv.Greedy, rules=vlkv.LogitRules()))
    assert main(["verify", str(tmp_path), "--dtype", "float32"]) == 2, "the rules change the tokens"


def test_a_mark_in_the_question_is_for_the_prompt_with_an_image():
    processor = vlkv.load_processor("mini")
    batches = verify._batches(processor, None, "what <image> says?")
    assert (batches["image"]["input_ids"] == processor.config.image_token).sum() == processor.config.vision.tokens
    assert not (batches["text"]["input_ids"] == processor.config.image_token).any()


LAYER, TOWER = "model.layers.1.self_attn.{}_proj.weight", "vision_tower.encoder.layers.0.self_attn.{}_proj.weight"


@pytest.mark.default("decoder")
@pytest.mark.parametrize(
    ("pattern", "said"),
    [(LAYER, "decoder layer 1 or the last norm"), (TOWER, "the vision tower or the projector")],
)
def test_two_swapped_tensors_are_found(tmp_path, capsys, monkeypatch, pattern, said):
    """Keys for values where their shapes agree: the copy loads, and answers something else."""
    from tests.parity.conftest import make_llava

    model, whole, batches = make_llava(vocab_size=300, max_position_embeddings=512), tmp_path / "whole", verify._batches
    model.config.image_token_id = IMAGE
    model.save_pretrained(write_folder(whole))
    folder, file = write_folder(tmp_path / "swapped"), "model.safetensors"
    (folder / "config.json").symlink_to(whole / "config.json")
    tensors = load_file(whole / file)
    first, second = (next(key for key in tensors if key.endswith(pattern.format(x))) for x in "kv")
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, folder / file, {"format": "pt"})
    monkeypatch.setattr(verify, "_batches", lambda *args: {"image": batches(*args)["image"]})
    command = ["verify", str(folder), "--reference", str(whole), "--dtype", "float32", "--tokens", "2", "--json"]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert not json.loads(printed.out)["passed"]
    assert f"differs from transformers: image, float32: first at {said}" in printed.err


def test_the_first_difference_by_hand(monkeypatch):
    """Two tokens, of which the second is vision, and three layers; a state differs where its number is 1."""
    weight = np.zeros(1, np.float32)
    decoder = types.SimpleNamespace(layers=[None] * 3, embedding=types.SimpleNamespace(weight=weight))
    params, both = types.SimpleNamespace(decoder=decoder), np.array([[True, True]])
    inputs = types.SimpleNamespace(valid=both, is_vision=np.array([[False, True]]))
    theirs = np.random.default_rng(0).normal(size=(4, 2, 8)).astype(np.float32)
    wanted = verify.Answer(logits=theirs[0], hidden=tuple(theirs), tokens=[], steps=theirs[0])
    for places, said in (
        ([(0, 0), (0, 1)], "the embedding of text"), ([(0, 1), (1, 0)], "the vision tower or the projector"),
        ([(1, 0), (2, 0)], "decoder layer 0"), ([(2, 1)], "decoder layer 1"),
        ([(3, 0)], "decoder layer 2 or the last norm"), ([], "the output head, or while decoding"),
    ):  # fmt: skip
        ours = theirs.copy()
        for place in places:
            ours[place] += 1
        monkeypatch.setattr(verify, "_states", lambda *_, ours=ours: list(ours[:, None]))
        assert verify.first_difference(params, inputs, wanted) == f"first at {said}"


def test_a_family_that_transformers_does_not_have(tmp_path, capsys):
    write_folder(tmp_path)
    raw = {"model_type": "internlm2", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
           "num_attention_heads": 2, "vocab_size": 300, "bias": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["verify", str(tmp_path)]) == 2
    assert "no class of its own for model_type internlm2" in capsys.readouterr().err
