"""Makes `tokenizer.json` from other tokenizer files: sentencepiece, tiktoken, or a vocabulary and merges.

All three are byte-pair encodings, which are described by merges; they differ in how text is split before. A tokenizer
from sentencepiece is compared with sentencepiece on a few lines of text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from checkpoints_convert.tokenizer_classes import QWEN2, split_as
from vlkv.errors import InputError
from vlkv.files import one_line, read_json

Token = TypeVar("Token", str, bytes)

_REMEDY = "save a tokenizer.json with transformers"
_CLASSES = QWEN2, f"{QWEN2}Fast"  # classes of transformers that split words by `QWEN_WORDS`
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of pieces in sentencepiece_model.proto
_SAMPLES = (
    "A photo of 3 cats: what's on the left?\nAnswer in 1-2 words.",
    "  two  spaces\tand a tab, naïve façade, 図と写真, 😀",
    "def f(x):\n    return {'a': x[0], \"b\": 1e-5}\n",
)


def make(folder: Path, special: Sequence[str] = ()) -> tokenizers.Tokenizer | None:
    """The tokenizer of a checkpoint folder; None if it has `tokenizer.json` or no supported file.

    `special`: special tokens, whose ids follow those in a tiktoken file. Raises InputError for a damaged or unsupported
    file, or if sentencepiece is not installed.
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
    """Like transformers' slow Llama tokenizer: each text between special tokens starts with the model's prefix.

    `read_tokenizer` then applies the settings of the folder, such as `"legacy": false`.
    """
    file = folder / "tokenizer.model"
    try:
        import sentencepiece  # noqa: PLC0415 (only needed here)
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # noqa: PLC0415
    except ImportError:
        raise InputError(f"{file}: needs sentencepiece: pip install 'vlkv[convert]'") from None
    try:
        model = ModelProto.FromString(file.read_bytes())
        reference = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
    except Exception as error:  # both packages raise many kinds of errors
        raise InputError(f"{file}: not a valid sentencepiece model ({one_line(error)[:200]})") from None
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise InputError(f"{file}: only byte-pair encodings are supported; {_REMEDY}")
    added = _added(folder)
    pieces = [added[i].content if i in added else piece.piece for i, piece in enumerate(model.pieces)]
    normal = [piece for i, piece in enumerate(model.pieces) if piece.type == _NORMAL and i not in added]
    merges = merges_of({piece.piece: -piece.score for piece in normal})
    spec, vocab = model.trainer_spec, {name: i for i, name in enumerate(pieces)}
    settings = read_json(folder / "tokenizer_config.json") or {}
    unknown = {"unk_token": pieces[spec.unk_id], "fuse_unk": True, "byte_fallback": spec.byte_fallback}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, **unknown))
    prefix = model.normalizer_spec.add_dummy_prefix
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(content=" ", left=1)] * prefix
    )
    special_pieces = {
        i: AddedToken(name, normalized=False, special=piece.type != _USER_DEFINED)
        for i, (name, piece) in enumerate(zip(pieces, model.pieces, strict=True))
        if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    _add(tokenizer, special_pieces | added, file)
    for text in _SAMPLES:
        if tokenizer.encode(text).ids != reference.encode(text):
            raise InputError(f"{file}: a byte-pair encoding does not reproduce this model; {_REMEDY}")
    if settings.get("add_bos_token", True) and reference.bos_id() >= 0:
        begin_with(tokenizer, pieces[reference.bos_id()], reference.bos_id())
    return tokenizer


def begin_with(tokenizer: tokenizers.Tokenizer, bos: str, number: int) -> None:
    """Makes every text begin with the token `bos`, whose id is `number`."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
    )


def _from_tiktoken(file: Path, special: Sequence[str]) -> tokenizers.Tokenizer:
    """From a file with one line per token: its bytes in base64, and its id, which is also its rank."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise InputError(f"{file}: not a valid tiktoken file ({one_line(error)})") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not special:
        raise InputError(f"{file}: the ids of its special tokens are not known; {_REMEDY}")
    vocab = {_spelled(token): rank for token, rank in ranks.items()}
    merges = [(_spelled(left), _spelled(right)) for left, right in merges_of(ranks)]
    tokenizer = _byte_level(models.BPE(vocab, merges))
    after = enumerate(special, start=len(ranks))
    _add(tokenizer, {i: AddedToken(name, normalized=False, special=True) for i, name in after}, file)
    return tokenizer


def _from_merges(folder: Path) -> tokenizers.Tokenizer:
    """From `vocab.json` and `merges.txt` of classes with `QWEN_WORDS`; other classes split words differently."""
    file, kind = folder / "vocab.json", (read_json(folder / "tokenizer_config.json") or {}).get("tokenizer_class")
    if kind not in _CLASSES:
        raise InputError(f"{file}: tokenizer_class={kind!r} is not supported without tokenizer.json; {_REMEDY}")
    try:
        tokenizer = _byte_level(models.BPE.from_file(str(file), str(folder / "merges.txt")))
    except Exception as error:  # the package raises plain Exception
        raise InputError(f"{file}: not a valid vocabulary ({one_line(error)})") from None
    _add(tokenizer, _added(folder), file)
    return tokenizer


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    split_as(tokenizer, QWEN2, {})
    return tokenizer


def merges_of(ranks: Mapping[Token, float]) -> list[tuple[Token, Token]]:
    """All pairs of tokens whose concatenation is a token, in the order of the ranks of result and parts."""
    pairs = [
        (token[:i], token[i:])
        for token in ranks
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    return sorted(pairs, key=lambda pair: (ranks[pair[0] + pair[1]], ranks[pair[0]], ranks[pair[1]]))


def _spelled(token: bytes) -> str:
    """Bytes as text of byte-level tokenizers: printable Latin-1 unchanged, other bytes from U+0100 on in order."""
    return "".join(_ALPHABET[byte] for byte in token)


def _alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(256)]


_ALPHABET = _alphabet()


def _added(folder: Path) -> dict[int, AddedToken]:
    """Tokens that the folder's settings add to the vocabulary or rename, by id."""
    file = folder / "tokenizer_config.json"
    listed = (read_json(file) or {}).get("added_tokens_decoder")
    try:
        if listed:
            tokens = {i: {"normalized": False, **token, "content": token["content"]} for i, token in listed.items()}
            return {int(i): AddedToken(**token) for i, token in tokens.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{file}: added_tokens_decoder is malformed ({reason})") from None
    older = read_json(folder / "added_tokens.json") or {}
    return {i: AddedToken(name, normalized=False, special=True) for name, i in older.items()}


def _add(tokenizer: tokenizers.Tokenizer, added: Mapping[int, AddedToken], file: Path) -> None:
    """Adds tokens in the order of their ids; raises InputError if one gets another id."""
    for i, token in sorted(added.items()):
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != i:
            raise InputError(f"{file}: {token.content} should have id {i}, but smaller ids are missing")
