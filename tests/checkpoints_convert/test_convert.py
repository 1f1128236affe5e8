"""`vlkv convert`: both formats, killed and resumed, verified, and in little memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import vlkv
from checkpoints_convert import checkpoint, converting, pieces
from checkpoints_convert.__main__ import convert
from checkpoints_convert.checkpoint import open_checkpoint
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


def test_further_templates_are_copied_and_verified(folder, tmp_path):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "default.jinja").write_text("further")
    convert(folder, tmp_path / "out", progress=False)
    template = tmp_path / "out" / "additional_chat_templates" / "default.jinja"
    assert template.read_text() == "further"
    converting.verify(tmp_path / "out")
    template.write_text("other")
    with pytest.raises(vlkv.InputError, match=r"default\.jinja"):
        converting.verify(tmp_path / "out")


def test_safetensors_reads_what_is_written_slice_by_slice(folder, tmp_path):
    """The library's own reader, and header: every tensor as in the source, wide types first, aligned."""
    source = open_checkpoint(folder, describe(folder))
    keys = list(dict.fromkeys(entry.key for entry in source.entries))
    done = []
    digest, nbytes = source.write_safetensors(keys, tmp_path / "x.safetensors", None, lambda: done.append(1))
    found = load_file(tmp_path / "x.safetensors")
    assert sorted(found) == sorted(keys) and len(done) == len(keys)
    for key, array in found.items():
        np.testing.assert_array_equal(array, source.read_tensor(key))
    assert nbytes == sum(array.nbytes for array in found.values())
    assert digest == converting.sha256(tmp_path / "x.safetensors")


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


@pytest.mark.full
def test_damaged_orbax_folders(folder, tmp_path):
    out = tmp_path / "out"
    assert main(["convert", str(folder), str(out), "--quiet", "--format", "orbax"]) == 0
    assert pieces.is_pieces(out)
    with pytest.raises(vlkv.InputError, match="contains orbax weights: convert the folder that it was made from"):
        convert(out, tmp_path / "again", progress=False)
    manifest, name = (out / "vlkv_manifest.json").read_text(), "decoder.norm.weight"

    def edited(change) -> None:
        value = json.loads(manifest)
        change(value["weights"])
        (out / "vlkv_manifest.json").write_text(json.dumps(value))

    for change, says in (
        (lambda w: w.pop(name), f"{name} has shape None"),
        (lambda w: w.update({name: [*w[name][:2], [3]]}), rf"{name} has shape \[3\]"),
        (lambda w: w.update(surplus=w[name]), "surplus has shape"),
        (lambda w: w.update({name: ["../elsewhere", *w[name][1:]]}), "points outside"),
        (lambda w: w.update({name: ["params-9", *w[name][1:]]}), "params-9: missing"),
        (lambda w: w.update({name: 3}), "contains no weights"),
    ):
        edited(change)
        with pytest.raises(vlkv.InputError, match=says):
            vlkv.load_params(out)
    (out / "vlkv_manifest.json").write_text(manifest)
    data = max((path for path in out.glob("params-*/**/*") if path.is_file()), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(vlkv.InputError, match="cannot be read"):
        vlkv.load_params(out)
    with pytest.raises(vlkv.InputError, match="checksum differs"):
        converting.verify(out)


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


@pytest.mark.full
def test_kill_9_leaves_nothing_that_loads_and_the_next_run_goes_on(folder, tmp_path):
    """In a process of its own, stopped after the second shard."""
    code = (
        "import sys, time; from pathlib import Path; from checkpoints_convert import converting\n"
        "from checkpoints_convert.__main__ import convert\n"
        "converting.SHARD_BYTES = converting.PIECE_BYTES = 2**19\n"
        "finish = converting.Journal.finish\n"
        "def stop(self, *args):\n"
        "    finish(self, *args)\n"
        "    if len(self.shards) == 2: print('two', flush=True); time.sleep(60)\n"
        "converting.Journal.finish = stop\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), progress=False)\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "out")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "two\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    partial = tmp_path / ".out.partial"
    with pytest.raises(vlkv.InputError, match="complete"):
        vlkv.load(partial)
    kept = {path: path.stat().st_ino for path in partial.rglob("*") if path.is_file() and "unfinished" not in path.name}
    assert kept
    convert(folder, tmp_path / "out", progress=False)
    for path, inode in kept.items():
        assert (tmp_path / "out" / path.relative_to(partial)).stat().st_ino == inode, "kept, not written again"
    same(vlkv.load_params(tmp_path / "out"), vlkv.load_params(folder))
