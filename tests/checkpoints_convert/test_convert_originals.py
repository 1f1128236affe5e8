"""`vlkv convert` of folders in their authors' form: pickle weights, and tokenizers of sentencepiece and tiktoken.

References: transformers, sentencepiece's and tiktoken's own encoders, and safetensors of the same weights.
"""

from __future__ import annotations

import base64
import json
import os
import re
import string

import numpy as np
import PIL.Image
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

import vlkv
from checkpoints_convert.__main__ import convert
from checkpoints_convert.byte_pairs import make
from tests import programs
from tests.checkpoints_convert.test_convert_families import CASES
from tests.checkpoints_convert.test_convert_families import write as write_family
from tests.models import same
from vlkv.errors import InputError
from vlkv.families.qwen_vl.config import SPECIAL

TEXTS = ["What is on the left?\n", "  two spaces, a\ttab", "naïve façade 図 😀", "it's 2024, isn't it? x=[1,2];", "a"]
AUTHORS = (  # transformers' names of a LLaVA -> its authors' names
    (r"^model\.language_model\.|^language_model\.model\.", "model."),
    (r"^language_model\.lm_head", "lm_head"),
    (r"^(model\.)?vision_tower\.(vision_model\.)?", "model.vision_tower.vision_tower.vision_model."),
    (r"^(model\.)?multi_modal_projector\.linear_1\.", "model.mm_projector.0."),
    (r"^(model\.)?multi_modal_projector\.linear_2\.", "model.mm_projector.2."),
)


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
    """The folder's safetensors become pickles under the same names."""
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
    write_family(tmp_path / "source", raw, renames)
    wanted = vlkv.load_params(tmp_path / "source")
    repickle(tmp_path / "source")
    with pytest.raises(InputError, match=r"only pickle weights .* `vlkv convert` reads them safely"):
        vlkv.load_params(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "made", progress=False)
    same(vlkv.load_params(tmp_path / "made"), wanted)
    assert not (tmp_path / "made" / "pytorch_model.bin.index.json").exists()


@pytest.mark.full
def test_llava_in_its_authors_form_is_transformers_llava(tmp_path):
    """One command from pickles and sentencepiece to answers: logits within 1e-4, prompts as sentencepiece has them."""
    from tests.parity.conftest import IMAGE_TOKEN, make_llava, torch

    sentencepiece = pytest.importorskip("sentencepiece")
    model = make_llava(vocab_size=420)
    model.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for pattern, name in AUTHORS:
        tensors = {re.sub(pattern, name, key): x for key, x in tensors.items()}
    source = tmp_path / "source"
    source.mkdir()
    pickled(tensors, source)
    write_sentencepiece(source)
    tower = {"mm_vision_tower": "openai/tower", "vision_config": model.config.vision_config.to_dict()}
    raw = {**model.config.text_config.to_dict(), "model_type": "llava", "mm_hidden_size": 32, **tower,
           "mm_projector_type": "mlp2x_gelu", "image_aspect_ratio": "pad"}  # fmt: skip
    (source / "config.json").write_text(json.dumps(raw))
    params, processor = vlkv.load(convert(source, tmp_path / "made", progress=False))

    inputs = processor(PIL.Image.fromarray(np.arange(3 * 28 * 28, dtype=np.uint8).reshape(28, 28, 3)), TEXTS[0])
    ids = np.asarray(inputs.tokens[0, inputs.valid[0]])
    is_image = np.asarray(inputs.is_vision[0, inputs.valid[0]])
    spoken = sentencepiece.SentencePieceProcessor(model_file=str(source / "tokenizer.model"))
    before, after = processor.prompts.write(TEXTS[0], 1, 0).split(processor.prompts.image_token)
    assert ids[~is_image].tolist() == [1, *spoken.encode(before), *spoken.encode(after)]
    with torch.no_grad():
        theirs = model(
            input_ids=torch.from_numpy(np.where(is_image, IMAGE_TOKEN, ids)[None].astype(np.int64)),
            pixel_values=torch.from_numpy(np.asarray(inputs.pixels)),
        ).logits[0]
    ours = programs.forward(params, inputs)[0, np.asarray(inputs.valid[0])]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


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
    """Against tiktoken with the pattern and the special tokens of the authors' code."""
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
    """As InternVL2-1B has them, against transformers' Qwen2 tokenizer."""
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
    write_family(tmp_path / "source", *CASES["llama"])
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
