"""Reads `tokenizer.json` as transformers 5.24 does, together with what the folder's other files say.

Some classes of transformers take only the vocabulary and the merges from `tokenizer.json`, and split text in their own
way; the field `legacy` and others change it. The other classes use the file as it is. Which class a folder gets depends
on `tokenizer_class` and on `model_type`. transformers distrusts the class of LLaVA and LLaVA-NeXT folders, for example,
and reads their files as they are: a file written by transformers 4 puts "▁" after each special token, as the authors'
training did. Tokens that only `tokenizer_config.json`, `special_tokens_map.json` or `added_tokens.json` declare are
added.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from checkpoints_convert.sources import TABLES
from vlkv.errors import InputError
from vlkv.files import read_json, read_text

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The patterns by which Qwen's tokenizers split text into words; that of Qwen3.5 keeps marks with their letters.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_WORDS = QWEN_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
LLAMA, QWEN2, QWEN3_5, GEMMA, AS_IT_IS = "LlamaTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "GemmaTokenizer", ""
# `model_type` -> the class that transformers expects.
_EXPECTED: dict[str, str] = {kind: name for name, kinds in TABLES["expected"].items() for kind in kinds}
_DISTRUSTED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")  # the expected class, whatever a folder names


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a folder with `tokenizer.json`.

    Raises:
        InputError: a malformed token, or one whose id does not follow those of the file.
        Exception: of the package tokenizers, if the file is not valid.
    """
    path = folder / "tokenizer.json"
    tokenizer, settings = tokenizers.Tokenizer.from_file(str(path)), special_settings(folder)
    kind = tokenizer_class(folder)
    if kind != AS_IT_IS and isinstance(tokenizer.model, models.BPE):
        raw = json.loads(path.read_text(encoding="utf-8"))
        if "added_tokens_decoder" not in settings:
            settings = {**settings, "added_tokens_decoder": {token.pop("id"): token for token in raw["added_tokens"]}}
        tokenizer = _rebuilt(raw["model"], kind, settings, tokenizer)
    _add_declared(tokenizer, settings, folder)
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return tokenizer


def special_settings(folder: Path) -> dict[str, Any]:
    """The fields of `tokenizer_config.json`, of older files that it replaces, and the special tokens of the class."""
    settings: dict[str, Any] = read_json(folder / "tokenizer_config.json") or {}
    if "added_tokens_decoder" not in settings:
        settings = {**settings, **(read_json(folder / "special_tokens_map.json") or {})}
        older = read_json(folder / "added_tokens.json")
        if older:
            extra = {str(_content(token)) for token in _extra(settings)} | set(map(str, _named(settings).values()))
            settings["added_tokens_decoder"] = {
                number: {"content": text, "special": text in extra, "normalized": text not in extra}
                for text, number in older.items()
            }
    return {**TABLES["special"].get(tokenizer_class(folder), {}), **settings}


def special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name, such as `bos_token` -> "<s>"."""
    return {name: text for name, token in _named(settings).items() if isinstance(text := _content(token), str)}


def tokenizer_class(folder: Path) -> str:
    """The class of transformers that splits text in its own way; AS_IT_IS: the file says how."""
    kind = (read_json(folder / "config.json") or {}).get("model_type")
    named = (read_json(folder / "tokenizer_config.json") or {}).get("tokenizer_class")
    expected = _EXPECTED.get(kind) if isinstance(kind, str) else None
    if isinstance(named, str):
        named = named.removesuffix("Fast")
        # Llama 3 splits text into bytes, which the class for Llama does not.
        if named == LLAMA and '"ByteLevel"' in (read_text(folder / "tokenizer.json") or ""):
            return AS_IT_IS
        if expected is None or (expected != AS_IT_IS and kind not in _DISTRUSTED):
            expected = named
    return expected if expected is not None and expected in TABLES["special"] else AS_IT_IS


def split_as(tokenizer: tokenizers.Tokenizer, kind: str, settings: Mapping[str, Any]) -> None:
    """Makes a byte-pair encoding split text before it, and join it after it, as a class of transformers does."""
    prefix = settings.get("add_prefix_space")
    if kind == LLAMA:
        prefix = True if prefix is None else bool(prefix)
        scheme = ("always" if settings.get("legacy") else "first") if prefix else "never"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    elif kind == GEMMA:
        prefix = False
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        words = Regex(QWEN_WORDS if kind == QWEN2 else _QWEN3_5_WORDS)
        split = pre_tokenizers.Split(words, behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        return
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * prefix)


def _rebuilt(
    model: dict[str, Any], kind: str, settings: Mapping[str, Any], old: tokenizers.Tokenizer
) -> tokenizers.Tokenizer:
    """A tokenizer of this class with the vocabulary, the merges and the post-processor of `old`."""
    merges: list[Any] = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    options: dict[str, Any] = {"fuse_unk": True, "byte_fallback": True} if kind in (LLAMA, GEMMA) else {}
    if kind == GEMMA:
        options["unk_token"] = str(_content(settings["unk_token"]))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, **options))
    split_as(tokenizer, kind, settings)
    if old.post_processor is not None:
        tokenizer.post_processor = old.post_processor
    return tokenizer


def _add_declared(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], folder: Path) -> None:
    """Adds the tokens that the settings declare, in the order of transformers."""
    listed = settings.get("added_tokens_decoder") or {}
    try:
        by_id = {int(i): _token(token, special=False) for i, token in listed.items()}
        flags = {token.content: token for token in by_id.values()}
        named = [flags.get(str(_content(token))) or _token(token) for token in _named(settings).values()]
        extra = [_token(token) for token in _extra(settings)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"a declared token is malformed ({type(error).__name__}: {error})"
        raise InputError(f"{folder / 'tokenizer_config.json'}: {reason}") from None
    present = tokenizer.get_added_tokens_decoder().values()
    known, same = {token.content for token in present}, set(map(repr, present))
    new = [token for _, token in sorted(by_id.items()) if repr(token) not in same]
    known |= {token.content for token in new}
    new += [token for token in (*named, *extra) if token.content not in known]
    names = {token.content for token in named}
    for token in new:
        token.special = token.special or token.content in names
    tokenizer.add_tokens(new)
    tokenizer.add_special_tokens([*named, *extra])
    for i, token in by_id.items():
        if tokenizer.token_to_id(token.content) != i:
            other = f"but the vocabulary gives it {tokenizer.token_to_id(token.content)}"
            raise InputError(
                f"{folder}: the token {token.content!r} has the id {i}, {other}; copy tokenizer.json again"
            )


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens with names: those that all models have, and those of this model, such as `image_token`."""
    tokens = {name: settings.get(name) for name in NAMED}
    tokens |= {name: token for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)}
    extra = settings.get("extra_special_tokens")
    tokens |= extra if isinstance(extra, Mapping) else {}
    return {name: token for name, token in tokens.items() if isinstance(token, str | Mapping)}


def _extra(settings: Mapping[str, Any]) -> Iterator[Any]:
    """The special tokens without names."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    return iter(extra if isinstance(extra, list) else ())


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _token(token: Any, *, special: bool = True) -> AddedToken:
    """A declared token, which is a text or an object with flags."""
    if not isinstance(token, Mapping):
        return AddedToken(token, special=True)
    flags = {name: value for name, value in token.items() if not name.startswith("__")}
    return AddedToken(**{**flags, "content": flags["content"], **({"special": True} if special else {})})
