"""`vlkv convert`: both formats, killed and resumed, verified, and in little memory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from checkpoints_convert import checkpoint, converting
from checkpoints_convert.__main__ import convert
from tests.checkpoints_convert.test_convert_families import write
from tests.models import same
from vlkv.cli import main
from vlkv.families.folders import describe

FORMATS = pytest.mark.parametrize("kind", ["safetensors", "orbax"])


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """So that the miniature has several, and a tensor several slices."""
    monkeypatch.setattr(converting, "SHARD_BYTES", 2**19)
    monkeypatch.setattr(converting, "PIECE_BYTES", 2**19)
    monkeypatch.setattr(checkpoint, "SLICE_BYTES", 3000)


@pytest.fixture
def folder(miniature, tmp_path) -> Path:
    return Path(shutil.copytree(miniature(), tmp_path / "model"))


@pytest.mark.default("bfloat16-orbax")
@FORMATS
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_was_converted_loads_as_its_source_does(folder, tmp_path, kind, dtype):
    convert(folder, tmp_path / "out", format=kind, dtype=dtype, progress=False)
    converting.verify(tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "vlkv_manifest.json").read_text())
    params, processor = vlkv.load(tmp_path / "out")
    assert manifest["storage"] == kind
    same(params, vlkv.load_params(folder, dtype=dtype))
    half = jax.tree.map(lambda x: np.asarray(x).astype("float16"), params)
    same(vlkv.load_params(tmp_path / "out", dtype="float16"), half)
    assert manifest["parameters"] == sum(x.size for x in jax.tree.leaves(params))
    assert manifest["bytes"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert processor.config == params.config


def stop_after(shards: int, monkeypatch) -> list[str]:
    """Ends a conversion as Ctrl-C does, after so many shards, the next one half-written; returns what it writes."""
    written: list[str] = []
    write = converting._write_shard

    def counted(checkpoint, members, path, *rest):
        if len(written) == shards:
            path.with_name(f"{path.name}.half").write_bytes(b"half")
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path.name)
        return write(checkpoint, members, path, *rest)

    monkeypatch.setattr(converting, "_write_shard", counted)
    return written


@pytest.mark.default("safetensors")
@FORMATS
def test_a_run_that_was_stopped_is_taken_up(folder, tmp_path, monkeypatch, kind):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"

    def convert(**options) -> Path:
        return converting.convert(folder, out, describe, format=kind, progress=False, **options)

    with monkeypatch.context() as patch:
        first = stop_after(3, patch)
        with pytest.raises(KeyboardInterrupt):
            convert()
    assert not out.exists() and partial.is_dir()
    with pytest.raises(vlkv.InputError, match="complete"):
        vlkv.load(partial)
    damaged = next(path for path in [partial / first[1], *(partial / first[1]).rglob("*")] if path.is_file())
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with monkeypatch.context() as patch:
        second = stop_after(99, patch)
        convert()
    assert first[1] in second, "its checksum was wrong: written again"
    assert not {first[0], first[2]} & set(second), "finished shards are kept"
    assert len({*first, *second}) > 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert not list(out.glob("*unfinished*")) and not list(out.glob("*half*"))
    converting.verify(out)
    same(vlkv.load_params(out), vlkv.load_params(folder))


def random_llama(folder: Path, width: int) -> Path:
    """One layer of 7 matrices and 2 tables, all [width, width], in three shards."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), width)
    write(folder, {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 16, **sizes}, ())
    return folder


def memory_growth(tmp_path: Path, convert: str) -> int:
    """MiB of private memory for 288 MiB, besides what a small checkpoint needs; `convert`: code of a function."""
    code = convert + (
        "import sys, threading, time\n"
        "def private():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon')) // 1024\n"
        "def watch():\n"
        "    while True: peak.append(private()); time.sleep(0.001)\n"
        "convert(sys.argv[1])\n"
        "before, peak = private(), []\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "convert(sys.argv[2])\n"
        "print(max(peak) - before)\n"
    )
    small, big = random_llama(tmp_path / "small", width=64), random_llama(tmp_path / "big", width=4096)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code, str(small), str(big)], capture_output=True, text=True, check=True, env=environment
    )
    return int(result.stdout.splitlines()[-1])


@pytest.mark.full
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """288 MiB in tensors of 32: private memory grows by a few slices of 4 MiB, not by a tensor or a shard of 64."""
    code = (
        "from pathlib import Path; from checkpoints_convert import checkpoint, converting, __main__ as main\n"
        "converting.SHARD_BYTES, checkpoint.SLICE_BYTES = 2**26, 2**22\n"
        "def convert(folder): main.convert(Path(folder), Path(folder + '-out'), progress=False)\n"
    )
    assert 0 <= memory_growth(tmp_path, code) < 24
    manifest = json.loads((tmp_path / "big-out" / "vlkv_manifest.json").read_text())
    assert manifest["bytes"] == 9 * 2**25 + 3 * 2**13 and len(list((tmp_path / "big-out").glob("model-*"))) > 3


def test_folders_are_made_and_the_result_is_said(folder, tmp_path, capsys):
    """Above the destination; a pooling head that the model does not use is left out."""
    held, out = load_file(folder / "model.safetensors"), tmp_path / "some" / "new" / "folder"
    name = next(key for key in held if "vision" in key and ".encoder." in key)
    held[f"{name.partition('.encoder.')[0]}.head.probe"] = np.zeros((1, 1, 4), np.float32)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["convert", str(folder), str(out), "--dtype", "bfloat16", "--quiet"]) == 0
    said, manifest = capsys.readouterr(), json.loads((out / "vlkv_manifest.json").read_text())
    assert said.out == f"wrote {out}\n"
    copied = [key for file in out.glob("*.safetensors") for key in load_file(file)]
    shards = sum(name.endswith(".safetensors") for name in manifest["sha256"])
    (line,) = said.err.splitlines()
    start, _, name = line.rpartition(", such as ")
    made = f"{shards} shards, {manifest['parameters']:,} parameters in bfloat16, {manifest['bytes'] / 2**20:.1f} MiB"
    assert start == f"{out}: {made}; unused tensors left out: {len(held) - len(copied)}" and len(held) > len(copied) + 1
    assert name in held and name not in copied and not any("head.probe" in key for key in copied)
    vlkv.load_processor(out)
