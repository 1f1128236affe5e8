"""What `vlkv convert` says and makes: folders above the destination, what a second run keeps, the result in numbers."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlkv
from checkpoints_convert import converting
from vlkv.cli import main


@pytest.fixture
def folder(miniature, tmp_path, monkeypatch):
    """The demo model with two layers, in several shards, with a pooling head that the model does not use."""
    monkeypatch.setattr(converting, "SHARD_BYTES", 2**19)
    folder = shutil.copytree(miniature(), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in tensors if "vision" in key and ".encoder." in key)
    head = f"{name.partition('.encoder.')[0]}.head.probe"
    tensors[head] = np.zeros((1, 1, 4), np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def numbers(out):
    manifest = json.loads((out / "vlkv_manifest.json").read_text())
    shards = sum(name.endswith(".safetensors") for name in manifest["sha256"])
    size = f"{manifest['bytes'] / 2**20:.1f} MiB"
    return f"{out}: {shards} shards, {manifest['parameters']:,} parameters in bfloat16, {size}"


def test_folders_are_made_and_the_result_is_said(folder, tmp_path, capsys):
    out = tmp_path / "some" / "new" / "folder"
    assert main(["convert", str(folder), str(out), "--dtype", "bfloat16", "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.out == f"wrote {out}\n"
    copied = [key for file in out.glob("*.safetensors") for key in load_file(file)]
    unused = len(load_file(folder / "model.safetensors")) - len(copied)
    assert unused > 1 and not any("head.probe" in key for key in copied)
    (line,) = said.err.splitlines()
    start, _, name = line.rpartition(", such as ")
    assert start == f"{numbers(out)}; unused tensors left out: {unused}"
    assert name in load_file(folder / "model.safetensors") and name not in copied
    vlkv.load_processor(out)


def test_a_second_run_says_what_it_keeps(folder, tmp_path, capsys, monkeypatch):
    out, command = tmp_path / "out", ["convert", str(folder), str(tmp_path / "out"), "--dtype", "bfloat16", "--quiet"]
    write, written = converting._write_shard, []

    def interrupted(*args):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(args[2])
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(converting, "_write_shard", interrupted)
        assert main(command) == 130 and capsys.readouterr().err == ""
    kept = sum(x.nbytes for path in written[1:] for x in load_file(path).values())
    written[0].write_bytes(b"damaged")
    shutil.copytree(tmp_path / ".out.partial", tmp_path / ".other.partial")
    assert main(command) == 0
    first, last = capsys.readouterr().err.splitlines()
    assert first == (f"{tmp_path / '.out.partial'}: resumes, 2 finished shards ({kept / 2**20:.1f} MiB) are kept; "
                     "damaged and written again: 1")  # fmt: skip
    assert last.startswith(numbers(out))
    assert main(["convert", str(folder), str(tmp_path / "other"), "--quiet"]) == 0
    first, last = capsys.readouterr().err.splitlines()
    assert "begins again, because the interrupted run had another source or other options" in first
    assert " in float32, " in last


def test_a_file_is_no_folder_to_write_into(folder, tmp_path, refused):
    (tmp_path / "file").write_text("")
    refused(main, "convert", folder, tmp_path / "file" / "out", says="is a file; give a folder to write into")
    refused(main, "convert", folder, folder, says="already exists")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]
