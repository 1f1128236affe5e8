"""Training's shortcut, many questions in one row, against vlkv.forward on each question by itself."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import vlkv
from tests.models import random_model
from vlkv.inputs import Inputs
from vlkv.mini import folder, pages

pytest.importorskip("optax")

from vlkv.mini import training


def test_branches_equal_separate_rows():
    params = random_model(folder.config())
    stage = training.Stage(1, 144, (3, 3), (2, 4), 2, batch=1)
    layout = training.Layout.of(stage)
    rng = np.random.default_rng(0)
    page = pages.compose(pages.held_out_digits(), rng, rows=stage.rows, length=stage.length)
    parts = training.compose_row(page, stage, layout, rng)
    batch = training.Batch(*(part[None] for part in parts))
    got = np.asarray(jax.jit(training.log_probs, static_argnames="layout")(params, batch, layout))[0]
    head = folder.tokenizer().encode("USER:" + "<image>" * 144).ids
    pixels = np.broadcast_to(page.pixels.astype(np.float32) / 127.5 - 1, (1, 3, 96, 96))
    forward = jax.jit(vlkv.forward)
    for first, length in zip(np.cumsum([0, *layout.lengths]), layout.lengths, strict=False):
        ids = [int(i) for i in batch.tokens[0, first : first + length] if i != folder.PAD]
        inputs = Inputs.from_hf({"input_ids": [head + ids], "pixel_values": pixels}, params.config)
        want = np.asarray(jax.nn.log_softmax(forward(params, inputs)[0]))[len(head) :][: len(ids) - 1]
        np.testing.assert_allclose(got[first : first + len(ids) - 1], want, atol=1e-4)


def test_targets_are_the_answers():
    stage = training.Stage(1, 48, (2, 5), (2, 5), 1, batch=4)
    batch = next(training.batches(pages.held_out_digits(), stage, np.random.default_rng(0)))
    for tokens, weights in zip(batch.tokens, batch.weights, strict=True):
        said = [folder.VOCABULARY[token] for token in tokens[weights > 0]]
        assert said.count("</s>") == 2
        assert set(said) <= {*"0123456789/", "</s>"}
    assert batch.patches.shape == (4, 48, 8, 8)


def test_variation_keeps_digits_legible():
    """Far closer to their originals than to one another, and never twice the same."""
    digits = pages.held_out_digits()
    first, second = (training.vary(digits, np.random.default_rng(seed)).ink for seed in (0, 1))
    assert first.shape == digits.ink.shape
    assert first.min() >= 0
    assert first.max() <= 1
    own = np.mean((first - digits.ink) ** 2)
    assert 0 < own < 0.5 * np.mean((first - digits.ink[::-1]) ** 2)
    assert not np.array_equal(first, second)


@pytest.mark.full
def test_resumes_where_it_stopped(tmp_path, monkeypatch):
    """A run of two steps, then the same again with four: it goes on, and writes a folder that loads."""
    monkeypatch.setattr(training, "evaluate", lambda *_: {"page": 0.0, "row": 0.0, "digit": 0.0})
    said: list[str] = []
    for steps in (2, 4):
        settings = training.Settings(stages=(training.Stage(steps, 8, (1, 1), (2, 2), 0, batch=2),), warmup=1)
        training.train(tmp_path / "out", tmp_path / "work", settings, every=2, say=said.append)
    assert "resumed at step 2" in said
    assert vlkv.load_params(tmp_path / "out").config == folder.config()
    assert [path.name for path in tmp_path.iterdir() if "." in path.name] == []
