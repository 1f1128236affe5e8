"""Weights in orbax's format, with our own names and shapes, in pieces that are separate orbax checkpoints.

On a mesh, each device reads only its shard, rounded up to chunks. `vlkv_manifest.json` maps parameters to pieces. A
piece is a flat dictionary from paths of parameters, such as `decoder.layers.0.query.weight`, to arrays, and can be
restored by orbax without vlkv.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.checkpoint import Checkpoint
from checkpoints_convert.entry import HEAD, Table
from checkpoints_convert.sources import MANIFEST
from vlkv.errors import InputError
from vlkv.files import one_line, read_json, require_json

_CHUNK_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A checked folder of pieces."""

    folder: Path
    weights: dict[str, tuple[str, str]]  # path of a parameter -> its piece and dtype


def is_pieces(folder: Path) -> bool:
    """Whether the manifest of a folder says that its weights are in orbax's format."""
    return (read_json(folder / MANIFEST) or {}).get("storage") == "orbax"


def write(
    checkpoint: Checkpoint, paths: list[str], piece: Path, dtype: np.dtype | None, done: Callable[[], Any]
) -> int:
    """Writes the parameters `paths` atomically as one piece; returns their bytes. Calls `done` after each parameter."""
    import orbax.checkpoint as ocp  # noqa: PLC0415 (takes a second, and is rarely needed)

    wanted, arrays = checkpoint.table.shapes(), {}
    for path in paths:
        arrays[path] = checkpoint.read(path, dtype or checkpoint.stored_dtype(path)).reshape(wanted[path])
        done()
    save = ocp.args.PyTreeSave(arrays, {path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in arrays})
    with _quiet():
        # One folder per array, without compression and without orbax's copy of each array, because a database, a
        # compressor and a copy would need more memory. Our arrays do not change while they are written.
        kinds = ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False))
        )
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=kinds)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(piece.absolute(), save)
    return sum(array.nbytes for array in arrays.values())


def open_pieces(folder: Path, table: Table) -> Pieces:
    """Reads the manifest, and compares its parameters with those of the model.

    Raises:
        InputError: the manifest does not fit the config, or a piece is missing.
    """
    listed = require_json(folder / MANIFEST).get("weights")
    try:
        weights = {path: (str(piece), str(dtype)) for path, (piece, dtype, _) in listed.items()}  # type: ignore[union-attr]
        held = {path: tuple(shape) for path, (_, _, shape) in listed.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"{folder / MANIFEST}: contains no weights: convert again") from None
    shapes = table.shapes().items()
    wanted = {path: shape for path, shape in shapes if path != HEAD or path in weights or not table.tied}
    for path in [*wanted, *held]:
        if held.get(path) != wanted.get(path):
            stored, expected = (shape and list(shape) for shape in (held.get(path), wanted.get(path)))
            says = f"{path} has shape {stored}, config.json says {expected}"
            raise InputError(f"{folder / MANIFEST}: {says}: convert again")
    for piece in sorted({piece for piece, _ in weights.values()}):
        if piece != Path(piece).name or piece in ("", ".", ".."):
            raise InputError(f"{folder / MANIFEST}: points outside the folder: {piece!r}")
        if not (folder / piece).is_dir():
            raise InputError(f"{folder / piece}: missing, but listed in the manifest")
    return Pieces(folder, weights)


def read(pieces: Pieces, piece: str, placed: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of one piece as jax arrays with the shardings `placed` (by path)."""
    import orbax.checkpoint as ocp  # noqa: PLC0415

    arguments = {
        path: ocp.ArrayRestoreArgs(sharding=placed[path]) for path, (name, _) in pieces.weights.items() if name == piece
    }
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            return dict(checkpointer.restore((pieces.folder / piece).absolute(), restore_args=arguments))
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise InputError(f"{pieces.folder / piece}: cannot be read ({one_line(error)[:200]}): convert again") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides orbax's warnings about the missing database and about numpy arrays."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
