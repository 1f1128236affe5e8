"""What the demo model is trained on, and the resumption of training."""

import numpy as np
import pytest

import vlkv
from vlkv.mini import folder, pages

pytest.importorskip("optax")

from benchmarks import train_data
from benchmarks import train_mini as training


def test_targets_are_the_answers():
    task = train_data.TASKS["digits"]
    stage = train_data.Stage(1, 48, (2, 5), 4, 4, ("digits",))
    batch = next(train_data.batches(pages.held_out_digits(), stage, task, np.random.default_rng(0)))
    word = folder.tokenizer().id_to_token
    for tokens, weights in zip(batch.tokens, batch.weights, strict=True):
        said = [word(token) for token in tokens[weights > 0]]
        assert said.count("</s>") == 2
        assert set(said) <= {*"0123456789/", "</s>"}
    assert batch.patches.shape == (4, 1, 48, 8, 8)


@pytest.mark.parametrize("name", train_data.TASKS)
def test_every_cell_with_a_digit_is_shown(name):
    task, stage = train_data.TASKS[name], train_data.Stage(1, 84, (4, 10), 8, 1, (name,))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        shown = train_data.make_pages(pages.held_out_digits(), stage, task, rng)
        _, cells, _, _ = train_data.compose_row(shown, stage, train_data.Layout.of(stage, task), rng)
        assert cells.shape == (task.images, stage.shown(task))
        for page, own in zip(shown, cells, strict=True):
            assert len(set(own.tolist())) == len(own) and set(page.cells) <= set(own.tolist())


def test_variation_keeps_digits_legible():
    """Far closer to their originals than to one another, and never twice the same."""
    digits = pages.held_out_digits()
    first, second = (train_data.vary(digits, np.random.default_rng(seed)).ink for seed in (0, 1))
    assert first.shape == digits.ink.shape and first.min() >= 0 and first.max() <= 1
    own = np.mean((first - digits.ink) ** 2)
    assert 0 < own < 0.5 * np.mean((first - digits.ink[::-1]) ** 2)
    assert not np.array_equal(first, second)


@pytest.mark.full
def test_resumes_where_it_stopped(tmp_path, monkeypatch):
    """A run of two steps, then the same again with four: it goes on, and writes a folder that loads."""
    monkeypatch.setattr(training, "evaluate", lambda *_: {"exact": 0.0})
    said: list[str] = []
    for steps in (2, 4):
        settings = training.Settings(stages=(train_data.Stage(steps, 28, (1, 1), 2, 2, ("ledger",)),), warmup=1)
        training.train(tmp_path / "out", tmp_path / "work", settings, every=2, say=said.append)
    assert "resumed at step 2" in said
    assert vlkv.load_params(tmp_path / "out").config == folder.config()
    assert [path.name for path in tmp_path.iterdir() if "." in path.name] == []
