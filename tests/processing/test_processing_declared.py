"""Tokens and settings that only the files beside `tokenizer.json` declare, beside transformers' AutoTokenizer."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from vlkv.errors import InputError
from vlkv.processing.tokenizer import TextTokenizer

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
END = dict(content="<|im_end|>", special=True, lstrip=False, rstrip=True, normalized=False, single_word=False)
CHAT = "hi <|im_end|> there <extra> x<s>"


def compare(folder, files, text):
    auto = pytest.importorskip("transformers").AutoTokenizer
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields))
    theirs = auto.from_pretrained(folder)(text)["input_ids"]
    assert TextTokenizer.from_folder(folder).encode(text).tolist() == theirs
    return theirs


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": FAST | {"added_tokens_decoder": {"257": END}}},
        {"tokenizer_config.json": FAST, "added_tokens.json": {"<|im_end|>": 257}},
        {"tokenizer_config.json": FAST | {"eos_token": "<|im_end|>"}},
        {"tokenizer_config.json": FAST | {"additional_special_tokens": ["<extra>"]}},
        {"tokenizer_config.json": FAST | {"extra_special_tokens": {"image_token": "<extra>"}}},
        {"tokenizer_config.json": FAST, "special_tokens_map.json": {"eos_token": END}},
        {"tokenizer_config.json": FAST | {"image_token": "<extra>", "pad_token": "<|im_end|>"}},
        {"tokenizer_config.json": FAST | {"split_special_tokens": True}},
        {"tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast", "added_tokens_decoder": {"256": END}}},
        {"tokenizer_config.json": FAST, "config.json": {"model_type": "qwen2"}},
    ],
    ids=lambda files: " ".join(map(str, files[next(iter(files))]))[:40],
)
def test_declared_tokens(tmp_path, files):
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compare(tmp_path, files, CHAT + " e\u0301 12345")


def write_llama(folder):
    """As transformers 4 writes it: each text between special tokens begins with a prefix."""
    words = [*"<>?:\n", "▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, "▁a"]
    model = models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=[("▁", "a")], byte_fallback=True,
                       fuse_unk=True, unk_token="<unk>")  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize("kind", [None, "llama", "llava", "llava_next_video"])
def test_llama(tmp_path, legacy, kind):
    """LLaVA folders are read as they are; other folders follow `legacy`."""
    write_llama(tmp_path)
    config = {"tokenizer_class": "LlamaTokenizer"} | ({} if legacy is None else {"legacy": legacy})
    files = {"tokenizer_config.json": config} | ({} if kind is None else {"config.json": {"model_type": kind}})
    compare(tmp_path, files, "USER: <image>\na b</s>And a?")


def test_a_declared_token_with_another_id(tmp_path):
    write_llama(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(FAST | {"added_tokens_decoder": {"999": END}}))
    with pytest.raises(InputError, match="has the id 999, but"):
        TextTokenizer.from_folder(tmp_path)
