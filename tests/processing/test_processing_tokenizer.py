"""The tokenizer: text to ids and back, tokens that only other files declare, damaged files refused."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.processing.conftest import make_tokenizer
from vlkv.errors import InputError
from vlkv.processing.tokenizer import TextTokenizer

BOS, EOS = 1, 2


@pytest.fixture
def tokenizer(make_folder):
    return TextTokenizer.from_folder(make_folder())


def test_bos_once(tokenizer, make_folder):
    assert list(tokenizer.encode("<s>hi")) == list(tokenizer.encode("hi"))
    assert BOS not in tokenizer.encode("hi", add_special=False)
    assert list(tokenizer.encode("aab")) == [BOS, *tokenizer.encode("aab", add_special=False)]
    without = TextTokenizer.from_folder(make_folder(bos=False))
    assert list(without.encode("aab")) == list(tokenizer.encode("aab"))[1:]


def test_what_cannot_be_decoded(tokenizer):
    for tokens in (np.zeros((1, 2, 3), int), np.zeros(3), np.array(3), np.array([-1])):
        with pytest.raises(InputError):
            tokenizer.decode(tokens)
    with pytest.raises(InputError, match="length"):
        tokenizer.decode(np.zeros((2, 3), int), [1])


def test_settings_of_the_files(make_folder):
    """Training's cuts and padding are not applied; names of special tokens have several forms."""
    folder, saved = make_folder(), make_tokenizer()
    saved.enable_truncation(4)
    saved.enable_padding(length=64)
    saved.save(str(folder / "tokenizer.json"))
    raw = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None, "add_bos_token": True,
           "tokenizer_class": "LlamaTokenizer", "extra_special_tokens": {"image_token": "<image>"}}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(raw))
    made = TextTokenizer.from_folder(folder)
    assert len(made.encode("abcdefgh")) == 9
    assert made.special == {"bos_token": "<s>", "image_token": "<image>"}


def unigram():
    pieces = ["<unk>", "▁", "<", ">", "i", "m", "a", "g", "e", "▁a", "<image>"]
    model = models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.add_special_tokens([AddedToken("<image>", normalized=False)])
    return made


def wordlevel():
    made = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "image": 1, "<": 2, ">": 3, "a": 4}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<video>", "<image>"])
    return made


@pytest.mark.parametrize("make", [unigram, wordlevel])
def test_a_renamed_token_keeps_its_id_and_frees_its_text(make):
    plain = TextTokenizer(tokenizer=make(), special={})
    other = plain.renamed({"<image>": "[I]"})
    image = plain.tokenizer.token_to_id("<image>")
    assert image in plain.encode("a <image> a")
    np.testing.assert_array_equal(other.encode("a [I] a"), plain.encode("a <image> a"))
    assert len(other.encode("<image>")) > 1 and image not in other.encode("<image>")


def test_missing_and_damaged_files(make_folder):
    folder = make_folder()
    path = folder / "tokenizer.json"
    whole = path.read_bytes()
    for content in (b"", b"{}", b"[1]", whole[: len(whole) // 2], b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"tokenizer\.json: not a valid tokenizer") as caught:
            TextTokenizer.from_folder(folder)
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(InputError, match=r"vlkv\.load_params"):
        TextTokenizer.from_folder(folder)


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


@pytest.mark.parametrize("files", [
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
], ids=lambda files: " ".join(map(str, files[next(iter(files))]))[:40])  # fmt: skip
def test_declared_tokens(tmp_path, files):
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compare(tmp_path, files, CHAT + " e\u0301 12345")


def write_llama(folder):
    """A file of transformers 4, in which each text between special tokens begins with a prefix."""
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
