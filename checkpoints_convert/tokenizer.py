"""`tokenizer.json` from the tokenizer files that authors publish: sentencepiece, tiktoken, or a vocabulary and merges.

All three are byte-pair encodings, so one set of merges describes them; what differs is how text is cut before. A
sentencepiece conversion is compared with sentencepiece itself on a few lines of text before it is used.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from vlkv.errors import InputError
from vlkv.files import one_line, read_json

Token = TypeVar("Token", str, bytes)

# How Qwen's tokenizers, of every version, cut text into words (tokenization_qwen.py, PAT_STR).
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of pieces in sentencepiece_model.proto
_SAMPLES = (
    "A photo of 3 cats: what's on the left?\nAnswer in 1-2 words.",
    "  two  spaces\tand a tab, naïve façade, 図と写真, 😀",
    "def f(x):\n    return {'a': x[0], \"b\": 1e-5}\n",
)


def make(folder: Path, special: Sequence[str] = ()) -> tokenizers.Tokenizer | None:
    """The tokenizer of a checkpoint folder, or None if it has `tokenizer.json` already or no file that we know.

    Args:
        folder: with `tokenizer.model` (sentencepiece), a `.tiktoken` file, or `vocab.json` and `merges.txt`.
        special: the tokens whose ids follow those of a tiktoken file, which lists the ordinary tokens only.

    Raises:
        InputError: a damaged file, a kind that is not supported, or sentencepiece is not installed.
    """
    if (folder / "tokenizer.json").is_file():
        return None
    if (folder / "tokenizer.model").is_file():
        return _from_sentencepiece(folder)
    file = next(folder.glob("*.tiktoken"), None)
    if file is not None:
        return _from_tiktoken(file, special)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_merges(folder)
    return None


def _from_sentencepiece(folder: Path) -> tokenizers.Tokenizer:
    """As transformers' slow Llama tokenizer: each text between special tokens begins with the model's own prefix."""
    file = folder / "tokenizer.model"
    try:
        import sentencepiece  # noqa: PLC0415 (only needed here)
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # noqa: PLC0415
    except ImportError:
        raise InputError(f"{file}: is read with sentencepiece: pip install 'vlkv[convert]'") from None
    try:
        model = ModelProto.FromString(file.read_bytes())
        spoken = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
    except Exception as error:  # both packages raise plain kinds
        raise InputError(f"{file}: not a valid sentencepiece model ({one_line(error)[:200]})") from None
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise InputError(f"{file}: only byte-pair encodings are supported; save a tokenizer.json with transformers")
    added = _added(folder)
    pieces = [added[i].content if i in added else piece.piece for i, piece in enumerate(model.pieces)]
    ranks = {piece.piece: -piece.score for i, piece in enumerate(model.pieces)
             if piece.type == _NORMAL and i not in added}  # fmt: skip
    settings, vocab = model.trainer_spec, {name: i for i, name in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        models.BPE(vocab, _merges(ranks), unk_token=pieces[settings.unk_id], fuse_unk=True,
                   byte_fallback=settings.byte_fallback)
    )  # fmt: skip
    prefix = model.normalizer_spec.add_dummy_prefix
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(content=" ", left=1)] * prefix
    )
    own = {
        i: AddedToken(name, normalized=False, special=piece.type != _USER_DEFINED)
        for i, (name, piece) in enumerate(zip(pieces, model.pieces, strict=True))
        if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    _add(made, own | added, file)
    for text in _SAMPLES:
        if made.encode(text).ids != spoken.encode(text):
            raise InputError(f"{file}: a byte-pair encoding does not reproduce this model; "
                             "save a tokenizer.json with transformers")  # fmt: skip
    if (read_json(folder / "tokenizer_config.json") or {}).get("add_bos_token", True) and spoken.bos_id() >= 0:
        bos = pieces[spoken.bos_id()]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, spoken.bos_id())]
        )
    return made


def _from_tiktoken(file: Path, special: Sequence[str]) -> tokenizers.Tokenizer:
    """A file with a line for each token: its bytes in base64, and its id, which is its rank too."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise InputError(f"{file}: not a valid tiktoken file ({one_line(error)})") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not special:
        raise InputError(
            f"{file}: the ids of its special tokens are not known; save a tokenizer.json with transformers"
        )
    vocab = {_spelled(token): rank for token, rank in ranks.items()}
    merges = [(_spelled(left), _spelled(right)) for left, right in _merges(ranks)]
    made = _qwen(models.BPE(vocab, merges))
    after = enumerate(special, start=len(ranks))
    _add(made, {i: AddedToken(name, normalized=False, special=True) for i, name in after}, file)
    return made


def _from_merges(folder: Path) -> tokenizers.Tokenizer:
    """Qwen2's two files; other families that have such files cut words differently."""
    kind = (read_json(folder / "tokenizer_config.json") or {}).get("tokenizer_class")
    if kind not in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
        raise InputError(f"{folder / 'vocab.json'}: tokenizer_class={kind!r} is not supported without tokenizer.json; "
                         "save one with transformers")  # fmt: skip
    try:
        made = _qwen(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the package raises plain Exception
        raise InputError(f"{folder / 'vocab.json'}: not a valid vocabulary ({one_line(error)})") from None
    _add(made, _added(folder), folder / "vocab.json")
    return made


def _qwen(model: models.BPE) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    return made


def _merges(ranks: Mapping[Token, float]) -> list[tuple[Token, Token]]:
    """Every pair of tokens that joins to a token, in the order of what it makes, then of its parts."""
    pairs = [
        (token[:i], token[i:])
        for token in ranks
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    return sorted(pairs, key=lambda pair: (ranks[pair[0] + pair[1]], ranks[pair[0]], ranks[pair[1]]))


def _spelled(token: bytes) -> str:
    """Bytes as byte-level tokenizers write them: printable Latin-1 as itself, the rest from U+0100 on in order."""
    return "".join(_ALPHABET[byte] for byte in token)


def _alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(256)]


_ALPHABET = _alphabet()


def _added(folder: Path) -> dict[int, AddedToken]:
    """Tokens that the folder's settings add to the vocabulary, or spell anew, by their ids."""
    listed = (read_json(folder / "tokenizer_config.json") or {}).get("added_tokens_decoder")
    try:
        if listed:
            return {int(i): AddedToken(**{"normalized": False, **token, "content": token["content"]})
                    for i, token in listed.items()}  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is malformed "
                         f"({type(error).__name__}: {error})") from None  # fmt: skip
    older = read_json(folder / "added_tokens.json") or {}
    return {i: AddedToken(name, normalized=False, special=True) for name, i in older.items()}


def _add(tokenizer: tokenizers.Tokenizer, added: Mapping[int, AddedToken], file: Path) -> None:
    """Adds tokens in the order of their ids; raises InputError if one gets another id."""
    for i, token in sorted(added.items()):
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != i:
            raise InputError(f"{file}: {token.content} should have id {i}, but the ids before it are not all taken")
