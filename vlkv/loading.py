"""`load` returns the parameters and the processor of a checkpoint folder, a hub id, "mini" or "smollm2"."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from checkpoints_convert import checkpoint, packaged, pieces
from checkpoints_convert.entry import HEAD
from checkpoints_convert.sources import ADAPTER, base_of, with_settings
from vlkv import sharding
from vlkv.buckets import Buckets
from vlkv.errors import InputError, suggestion
from vlkv.families import Model, abstract, presets
from vlkv.families.folders import read_config, read_raw, table_of, with_head
from vlkv.generation.sampling import check_settings
from vlkv.processing import Processor
from vlkv.processing.pixels import Layout

MINI = Path(__file__).parent / "mini" / "checkpoint"  # the demo model
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
_SETTINGS = ["*.json", "*.jinja"]
_WEIGHTS = ["model*.safetensors", "adapter_model.safetensors"]


def load(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    buckets: Buckets | None = None,
    layout: Layout = "checkpoint",
) -> tuple[Model, Processor]:
    """`(load_params(...), load_processor(...))` of one folder or hub id.

    Args:
        source: a folder from Hugging Face or `vlkv convert`, a hub id such as `llava-hf/llava-1.5-7b-hf` (downloaded
            once, safetensors only), or "mini", the demo model of vlkv, which reads pages of handwritten digits; or
            "smollm2" or "gemma-3-270m", text models that are installed as Python packages. A LoRA adapter in the folder
            is merged into the weights. A folder with an adapter alone is loaded with its `base_model_name_or_path`,
            which must be on this machine.
        dtype: of the parameters; None: that of the checkpoint.
        mesh: the mesh (axes `data`, `model`) on which weights are sharded; None: the default device.
        buckets: how to round lengths and counts; see `vlkv.Buckets`.
        layout: "pad" pads images to a square, instead of cropping the middle. "pan_and_scan" (Gemma 3) adds crops of
            long images.

    Raises:
        InputError: the folder is not complete, damaged or not supported, or the dtype is not one of
            floating-point numbers. Raised before weights are read.
    """
    dtype = _checked(dtype)
    folder = resolve(source)
    processor = load_processor(folder, buckets=buckets, layout=layout)
    return load_params(folder, dtype=dtype, mesh=mesh), processor


def load_params(source: str | os.PathLike[str], *, dtype: DTypeLike | None = None, mesh: Mesh | None = None) -> Model:
    """The parameters, a pytree with the attribute `config`. The folder needs no tokenizer; arguments as in `load`."""
    dtype = _checked(dtype)
    folder = resolve(source)
    config = read_config(folder)
    check_settings(config)
    table = table_of(config, read_raw(folder))
    if pieces.is_pieces(base_of(folder)):
        if (folder / ADAPTER).is_file():
            raise InputError(f"{folder / ADAPTER}: cannot be applied to orbax weights: convert base model and adapter")
        return read_pieces(pieces.open_pieces(folder, table), dtype=dtype, mesh=mesh)
    return read_params(checkpoint.open_checkpoint(folder, table), dtype=dtype, mesh=mesh)


def _checked(dtype: DTypeLike | None) -> jnp.dtype | None:
    if dtype is None:
        return None
    try:
        checked = jnp.dtype(dtype)
    except TypeError:
        checked = None
    if checked not in _DTYPES:
        raise InputError(f"dtype={dtype!r} must be float32, bfloat16 or float16; None is that of the checkpoint")
    return checked


def load_processor(
    source: str | os.PathLike[str], *, buckets: Buckets | None = None, layout: Layout = "checkpoint"
) -> Processor:
    """The processor: tokenizer, chat template and image settings of the folder. Arguments as in `load`."""
    folder = resolve(source, weights=False)
    with with_settings(folder) as place:
        return Processor.from_folder(place, read_config(place), buckets=buckets, layout=layout)


def read_params(source: checkpoint.Checkpoint, *, dtype: DTypeLike | None, mesh: Mesh | None) -> Model:
    """Reads parameters one tensor at a time, so that the host needs memory for only one."""
    dtype = source.dtype if dtype is None else jnp.dtype(dtype)
    shapes = abstract(with_head(read_config(source.folder), tied=source.tied), dtype)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    arrays = []
    for keypath, leaf in leaves:
        path = sharding.path_name(keypath)
        arrays.append(sharding.place(path, source.read(path, leaf.dtype).reshape(leaf.shape), mesh))
    return jax.tree_util.tree_unflatten(structure, arrays)


def read_pieces(held: pieces.Pieces, *, dtype: DTypeLike | None, mesh: Mesh | None) -> Model:
    """Reads a converted folder file by file; each parameter goes directly to the devices that hold it."""
    cast = jnp.dtype(held.weights["decoder.embedding.weight"][1] if dtype is None else dtype)
    config = with_head(read_config(held.folder), tied=HEAD not in held.weights)
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract(config, cast))
    shapes = {sharding.path_name(keypath): leaf.shape for keypath, leaf in leaves}
    placed = {path: sharding.where(path, shape, mesh) for path, shape in shapes.items()}
    arrays: dict[str, jax.Array] = {}
    for piece in sorted({piece for piece, _ in held.weights.values()}):
        for path, array in pieces.read(held, piece, placed).items():
            arrays[path] = _cast_placed(array, cast, path)
    return jax.tree_util.tree_unflatten(structure, [arrays[path] for path in shapes])


def _cast_placed(array: jax.Array, dtype: jnp.dtype, path: str) -> jax.Array:
    """Casts an array on devices, with the same checks as `cast`."""
    if array.dtype == dtype:
        return array
    result = array.astype(dtype)
    if not bool(jnp.isfinite(result).all()) and bool(jnp.isfinite(array).all()):
        raise InputError(f"{path} has values beyond {dtype.name}: use bfloat16 or float32")
    return result


def resolve(source: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The local folder of `source`. Downloads a hub id if necessary: first settings, then weights if `weights`."""
    name = os.fspath(source)
    if not name:
        raise InputError("no model given: a checkpoint folder, a hub id, or mini")
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{path}: not a folder; give the folder that contains config.json")
    if name == "mini":
        return MINI
    if name in packaged.CHECKPOINTS:
        return packaged.written(packaged.CHECKPOINTS[name])
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        remedy = "give a checkpoint folder, a hub id (ORG/NAME), or mini"
        hint = suggestion(name, ["mini", *packaged.CHECKPOINTS, *presets], remedy)
        raise InputError(f"{path}: no such folder; {hint}")
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow to import)

    try:
        folder = Path(snapshot_download(name, allow_patterns=_SETTINGS))
        if weights:
            read_config(folder)  # raises an error for an unsupported model before its weights are downloaded
            folder = Path(snapshot_download(name, allow_patterns=[*_SETTINGS, *_WEIGHTS]))
        return folder
    except InputError:
        raise
    except Exception as error:  # network libraries raise many kinds of errors
        raise InputError(f"{name}: no such folder, and the hub cannot provide it ({type(error).__name__})") from None
