"""`vlkv verify` against transformers: it passes on whole checkpoints, and names the layer where a tensor is wrong."""

import json
import types

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from tests.processing.conftest import IMAGE, write_folder
from vlkv.cli import main
from vlkv.tools.commands import verify


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
