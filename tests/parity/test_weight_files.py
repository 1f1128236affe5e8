"""Which files and which output head a folder's model has, against transformers on the same folder."""

import copy
import json

import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests.families import tiny
from tests.families.common_internvl import SMALL_VIT, make_internvl
from tests.parity.conftest import Later, make_llava, make_text, torch, transformers
from vlkv.families import config_from_hf
from vlkv.families.folders import describe

files = Later("safetensors.torch")
HEAD = "lm_head.weight"
TIES = (True, False, None)


def theirs(folder):
    auto = transformers.AutoModelForCausalLM if "text" in folder.name else transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(folder)
    return [module.weight.detach().numpy() for module in (model.get_input_embeddings(), model.get_output_embeddings())]


def ours(params):
    table = params.decoder.embedding.weight
    return [np.asarray(table), np.asarray(table if params.decoder.head is None else params.decoder.head.weight)]


def same(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("pickles", [False, True])
def test_a_single_file_is_preferred_to_an_index(tmp_path, pickles):
    """A model that is saved again as one file leaves the old shards and their index."""
    model, folder = make_text("llama"), tmp_path / "text"
    old = copy.deepcopy(model)
    with torch.no_grad():
        old.lm_head.weight.mul_(-1)
    model.save_pretrained(folder)
    if pickles:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        torch.save(old.state_dict(), folder / "old.bin")
        (folder / "model.safetensors").unlink()
        index = {"weight_map": dict.fromkeys(old.state_dict(), "old.bin")}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        old.save_pretrained(tmp_path / "old", max_shard_size="50KB")
        for file in (tmp_path / "old").glob("model*"):
            file.rename(folder / file.name)
        assert (folder / "model.safetensors.index.json").exists()
        same(ours(vlkv.load_params(folder)), theirs(folder))
    convert(folder, tmp_path / "out", progress=False)
    same(ours(vlkv.load_params(tmp_path / "out")), theirs(folder))
    np.testing.assert_array_equal(theirs(folder)[1], model.lm_head.weight.detach().numpy())


@pytest.mark.parametrize("family", [
    "llava", "llava_next", "llava_next_video", "llava_onevision", "internvl", "qwen2_vl", "qwen2_5_vl",
    "idefics3", "smolvlm", "llama", "mistral", "qwen2", "phi3", "gemma3", "qwen3_vl_moe", "qwen3_5",
])  # fmt: skip
def test_whether_a_config_ties_the_head(family):
    raw = {**tiny.RAW.get(family, tiny.DECODER), "model_type": family, "sliding_window": None}
    raw.pop("tie_word_embeddings", None)
    for outer in TIES:
        for inner in TIES if "text_config" in raw else (None,):
            made = copy.deepcopy(raw)
            for part, value in ((made, outer), (made.get("text_config", {}), inner)):
                part.pop("tie_word_embeddings", None)
                part.update({} if value is None else {"tie_word_embeddings": value})
            reference = transformers.CONFIG_MAPPING[family].from_dict(copy.deepcopy(made)).tie_word_embeddings
            assert config_from_hf(made).decoder.tied == reference, (outer, inner)


@pytest.mark.parametrize("family", ["llava_llama", "llava_qwen", "mobilevlm", "internvl_chat", "qwen", "eve"])
def test_the_authors_configs(family):
    raw = {**copy.deepcopy(tiny.RAW[family]), "model_type": family}
    part = raw.get("llm_config", raw)
    for value in TIES:
        part.pop("tie_word_embeddings", None)
        part.update({} if value is None else {"tie_word_embeddings": value})
        assert config_from_hf(raw).decoder.tied == bool(value)


MAKERS = {"llava": make_llava, "text": lambda tied: make_text("qwen2", tie_word_embeddings=tied),
          "internvl": lambda tied: make_internvl("qwen2", SMALL_VIT, tied=tied)}  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_an_untied_model_without_its_head_is_refused(tmp_path, kind):
    folder = tmp_path / kind
    MAKERS[kind](tied=False).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = files.load_file(file)
    head = next(key for key in weights if key.endswith(HEAD))
    files.save_file({key: x for key, x in weights.items() if key != head}, file)
    for read in (vlkv.load_params, lambda source: convert(source, tmp_path / "out", progress=False)):
        with pytest.raises(vlkv.InputError, match=r"missing key lm_head[.]weight, the output head"):
            read(folder)
    assert sorted(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("head", ["other", "none", "only"])
def test_a_tied_model_with_and_without_a_head(tmp_path, kind, head):
    """transformers uses a head that differs, and ties in both directions."""
    folder = tmp_path / kind
    MAKERS[kind](tied=True).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = files.load_file(file)
    table = next(key for key in weights if key.endswith("embed_tokens.weight"))
    name = "language_model.lm_head.weight" if table.startswith("language_model.") else HEAD
    values = weights[table].clone()
    weights |= {name: 2 * values if head == "other" else values}
    weights.pop({"other": "", "none": name, "only": table}[head], None)
    files.save_file(weights, file, metadata={"format": "pt"})
    same(ours(vlkv.load_params(folder)), theirs(folder))
    assert describe(folder).tied and vlkv.load_params(folder).config.decoder.tied == (head != "other")
    convert(folder, tmp_path / f"{kind} out", progress=False)
    same(ours(vlkv.load_params(tmp_path / f"{kind} out")), theirs(folder))
    same(theirs(tmp_path / f"{kind} out"), theirs(folder))


def test_a_converted_folder_without_its_head_is_refused(tmp_path):
    make_text("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "text")
    convert(tmp_path / "text", tmp_path / "out", format="orbax", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(vlkv.InputError, match=r"decoder[.]head[.]weight has shape None, config.json says"):
        vlkv.load_params(tmp_path / "out")
