"""`vlkv convert` of every family in both formats, and of authors' folders (references: their own tokenizers)."""

import base64
import json
import os
import re
import string
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import pre_tokenizers

import vlkv
from checkpoints_convert import converting
from checkpoints_convert.__main__ import convert
from checkpoints_convert.byte_pairs import make
from checkpoints_convert.entry import HEAD, make_entries
from checkpoints_convert.sources import INDEX
from tests.families import forms, tiny
from tests.models import same
from vlkv.errors import InputError
from vlkv.families import FAMILIES
from vlkv.families.folders import describe
from vlkv.families.qwen_vl import SPECIAL

DECODER, MOE = forms.DECODER, forms.EXPERTS | dict(mlp_only_layers=[])
TEXT = {
    "llama": {}, "mistral": dict(sliding_window=None), "qwen2": {}, "qwen3": dict(head_dim=8),
    "phi3": dict(sliding_window=None), "internlm2": dict(bias=True), "qwen3_moe": dict(head_dim=8) | MOE,
    "gemma3_text": tiny.RAW["gemma3"]["text_config"] | dict(tie_word_embeddings=True),
    "gemma4_text": tiny.RAW["gemma4"]["text_config"] | MOE | dict(
        tie_word_embeddings=True, use_double_wide_mlp=True, enable_moe_block=True, top_k_experts=2),
    **{f"{kind}_text": tiny.RAW[kind]["text_config"] for kind in ("qwen3_5", "qwen3_5_moe")},
}  # fmt: skip
RENAMES = {kind: entry.renames for kind, entry in tiny.TINY.items()} | {"internlm2": ((r"^lm_head\.", "output."),)}
CASES: dict[str, tuple[dict[str, Any], tuple[tuple[str, str], ...]]] = {
    name: ((tiny.RAW.get(name) or DECODER | TEXT[name]) | {"model_type": name}, RENAMES.get(name, ()))
    for name in FAMILIES
}
CHAT = CASES["internvl_chat"][0]
CHAT["vision_config"] = forms.INTERN | dict(qkv_bias=False, qk_normalization=True, norm_type="rms_norm")
CASES["internvl_chat with phi3"] = (
    CHAT | dict(llm_config=DECODER | TEXT["phi3"] | dict(model_type="phi3"), template="phi3-chat",
                added_tokens={"<IMG_CONTEXT>": 7, "<|end|>": 9},
                vision_config=forms.INTERN | dict(qkv_bias=True, qk_normalization=False, norm_type="layer_norm")),
    ((r"^lm_head\.", "language_model.lm_head."),),
)  # fmt: skip


def write(folder: Path, raw: dict[str, Any], renames) -> dict[str, np.ndarray]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": "bfloat16"}))
    (folder / "added_tokens.json").write_text(json.dumps(raw.get("added_tokens", {})))
    table = describe(folder)
    entries = make_entries(table.names, table.shapes())
    tied = raw.get("tie_word_embeddings", False)
    shapes = {entry.key: entry.shape for entry in entries if not (tied and entry.path == HEAD)}
    rng = np.random.default_rng(0)
    tensors = {key: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for key, shape in shapes.items()}
    old = {key: key for key in tensors}
    for pattern, replacement in renames:
        old = {key: re.sub(pattern, replacement, name) for key, name in old.items()}
    weight_map = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(old.values())}
    for file in sorted(set(weight_map.values())):
        save_file({old[key]: x for key, x in tensors.items() if weight_map[old[key]] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def bits(arrays) -> np.ndarray:
    """Of all numbers, in order of size: what no renaming, splitting or reshaping changes."""
    return np.sort(np.concatenate([np.asarray(x).reshape(-1).view(np.uint16) for x in arrays]))


@pytest.mark.default("mobilevlm", "internvl_chat", "qwen2_vl", "qwen3_moe", "glm_ocr")
@pytest.mark.parametrize("name", CASES)
def test_what_was_converted_holds_the_same_bits(tmp_path, monkeypatch, name):
    raw, renames = CASES[name]
    tensors = write(tmp_path / "source", raw, renames)
    third = sum(x.nbytes for x in tensors.values()) // 3
    monkeypatch.setattr(converting, "SHARD_BYTES", third)
    monkeypatch.setattr(converting, "PIECE_BYTES", third)
    wanted = vlkv.load_params(tmp_path / "source")
    assert wanted.config.family == name.split(" ")[0]
    np.testing.assert_array_equal(bits(jax.tree.leaves(wanted)), bits(tensors.values()))
    for kind in converting.FORMATS:
        out = convert(tmp_path / "source", tmp_path / kind, format=kind, progress=False)
        converting.verify(out)
        made = vlkv.load_params(out)
        assert made.config == wanted.config
        assert jax.tree.structure(made) == jax.tree.structure(wanted)
        for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
            assert ours.dtype == theirs.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(np.asarray(ours).view(np.uint16), np.asarray(theirs).view(np.uint16))
    files = sorted((tmp_path / "safetensors").glob("model*.safetensors"))
    assert len(files) > 1 and len(list((tmp_path / "orbax").glob("params-*"))) > 1
    found: dict[str, np.ndarray] = {}
    for file in files:
        with safe_open(file, framework="np") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    assert found.keys() == tensors.keys(), "today's names"
    for key, array in tensors.items():
        np.testing.assert_array_equal(found[key].view(np.uint16), array.view(np.uint16))


TEXTS = ["What is on the left?\n", "  two spaces, a\ttab", "naïve façade 図 😀", "it's 2024, isn't it? x=[1,2];", "a"]


def pickled(tensors, folder) -> None:
    """In two shards with their index, as authors publish them."""
    torch, weight_map = pytest.importorskip("torch"), {}
    for shard in range(2):
        part = {key: tensors[key] for key in sorted(tensors)[shard::2]}
        part = {key: torch.from_numpy(np.array(x, np.float32)).to(torch.bfloat16 if x.dtype.itemsize == 2 else None)
                for key, x in part.items()}  # fmt: skip
        torch.save(part, folder / f"pytorch_model-{shard}.bin")
        weight_map |= dict.fromkeys(part, f"pytorch_model-{shard}.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def repickle(folder):
    files = list(folder.glob("*.safetensors"))
    pickled({key: x for file in files for key, x in load_file(file).items()}, folder)
    for file in [*files, folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)


def write_sentencepiece(folder, prefix=True) -> None:
    """A byte-pair encoding with Llama's settings, trained on a few lines."""
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [" ".join(string.ascii_letters), string.punctuation + string.digits] + 20 * [
        "What is on the left of the photo? Answer in words.", "def f(x): return {'a': x[0]}", "two  spaces, naïve",
    ]  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "tokenizer"), vocab_size=420, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        add_dummy_prefix=prefix, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()


@pytest.mark.default("eve")
@pytest.mark.parametrize("name", ["mobilevlm", "qwen", "eve"])
def test_pickled_weights_load_like_the_same_weights_in_safetensors(tmp_path, name):
    raw, renames = CASES[name]
    write(tmp_path / "source", raw, renames)
    wanted = vlkv.load_params(tmp_path / "source")
    repickle(tmp_path / "source")
    with pytest.raises(InputError, match=r"only pickle weights .* `vlkv convert` reads them safely"):
        vlkv.load_params(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "made", progress=False)
    same(vlkv.load_params(tmp_path / "made"), wanted)
    assert not (tmp_path / "made" / "pytorch_model.bin.index.json").exists()


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path, prefix):
    """Llama's and InternLM2's models; added tokens may respell a piece, or come after the last."""
    sentencepiece = pytest.importorskip("sentencepiece")
    write_sentencepiece(tmp_path, prefix)
    spoken = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    added = {419: {"content": "<|im_end|>", "special": True}, 420: {"content": "<IMG_CONTEXT>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    made = make(tmp_path)
    for text in TEXTS:
        assert made.encode(text).ids == [1, *spoken.encode(text)]
        assert made.decode(made.encode(text).ids) == spoken.decode(spoken.encode(text))
    ids = made.encode(f"{TEXTS[0]}<IMG_CONTEXT>{TEXTS[1]}<|im_end|>").ids
    assert ids == [1, *spoken.encode(TEXTS[0]), 420, *spoken.encode(TEXTS[1]), 419]
    for change, says in (({"421": {"content": "<x>"}}, "<x> should have id 421"), ({"0": {}}, "tokenizer_config")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": change}))
        with pytest.raises(InputError, match=says):
            make(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(InputError, match="not a valid sentencepiece model"):
        make(tmp_path)


def test_qwens_tiktoken_file(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    merged = [b"he", b"th", b"the", b" t", b" the", b"is", b" is", b"on", "ï".encode(), b"  ", b"le", b"ft", b"left"]
    ranks = {token: i for i, token in enumerate([bytes([i]) for i in range(256)] + merged)}
    lines = [base64.b64encode(token) + f" {rank}".encode() for token, rank in ranks.items()]
    (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(lines))
    special = {token: len(ranks) + i for i, token in enumerate(SPECIAL)}
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
               r"|\s+(?!\S)|\s+")  # fmt: skip
    theirs = tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    ours = make(tmp_path, SPECIAL)
    for text in [*TEXTS, "<|im_start|>user\nPicture 1: <img><imgpad></img>\nthe left<|im_end|>"]:
        assert ours.encode(text).ids == theirs.encode(text, allowed_special="all")
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert special["<img>"] - len(ranks) == 151857 - 151643  # image_start_id and the ordinary tokens of Qwen-VL
    with pytest.raises(InputError, match="special tokens are not known"):
        make(tmp_path)
    (tmp_path / "qwen.tiktoken").write_text("no tokens")
    with pytest.raises(InputError, match="not a valid tiktoken file"):
        make(tmp_path, SPECIAL)


@pytest.mark.full
def test_a_vocabulary_and_its_merges(tmp_path):
    """Files of the kind that InternVL2-1B publishes, against transformers' Qwen2 tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ the", "l e", "f t", "le ft", "i s"]
    vocab = {token: i for i, token in enumerate([*letters, *(pair.replace(" ", "") for pair in merges)])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    added = {name: len(vocab) + i for i, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
    decoder = {str(i): {"content": name, "special": True} for name, i in added.items()}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.Qwen2Tokenizer.from_pretrained(tmp_path), make(tmp_path)
    for text in [*TEXTS, "<|im_start|>user\nthe left<|im_end|>"]:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(InputError, match="GPT2Tokenizer"):
        make(tmp_path)


class Harmful:
    """What it would run if it were opened without care."""

    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_pickles_that_are_refused(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "source", *CASES["llama"])
    repickle(tmp_path / "source")
    file = tmp_path / "source" / "pytorch_model-0.bin"
    whole = file.read_bytes()

    def refused(says: str) -> None:
        with pytest.raises(InputError, match=says):
            convert(tmp_path / "source", tmp_path / "made", progress=False)
        assert not (tmp_path / "harmed").exists() and not (tmp_path / "made").exists()

    torch.save({"x": Harmful()}, file)
    refused(r"pytorch_model-0\.bin: refused: .*could run code: \S+\.mkdir")
    torch.save({"x": torch.zeros(2)}, file, _use_new_zipfile_serialization=False)
    refused("before torch 1.6")
    torch.save([torch.zeros(2)], file)
    refused("not a state dict")
    file.write_bytes(whole[: len(whole) // 2])
    refused("damaged")
