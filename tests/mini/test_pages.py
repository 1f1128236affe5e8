"""The pages: deterministic, made of digits that training never sees, and legible where they say."""

import numpy as np
import pytest

import vlkv
from benchmarks import train_data
from vlkv.mini import folder, pages


@pytest.mark.parametrize("kind", pages.KINDS)
def test_same_seed_same_samples(kind):
    first, second, other = (list(pages.held_out(5, seed, kind)) for seed in (3, 3, 4))
    assert [s[1:] for s in first] == [s[1:] for s in second] != [s[1:] for s in other]
    assert all(a.image.tobytes() == b.image.tobytes() for a, b in zip(first, second, strict=True))
    assert first[0].image.size == (192, 192) and first[0].image.mode == "RGB"


def test_blocks_are_disjoint():
    """The shipped digits are the last 360 of the data set, and training takes the ones before them."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    shipped, trained = pages.held_out_digits(), train_data.training_digits()
    assert len(shipped.label) == pages.HELD_OUT
    assert len(trained.label) + len(shipped.label) == len(data.target)
    np.testing.assert_array_equal(np.concatenate([trained.ink, shipped.ink]) * 16, data.images)
    np.testing.assert_array_equal(np.concatenate([trained.label, shipped.label]), data.target)


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


@pytest.mark.full
def test_resumes_where_it_stopped(tmp_path, monkeypatch):
    """A run of two steps, then the same again with four: it goes on, and writes a folder that loads."""
    pytest.importorskip("optax")
    training = pytest.importorskip("benchmarks.train_mini")
    monkeypatch.setattr(training, "evaluate", lambda *_: {"exact": 0.0})
    said: list[str] = []
    for steps in (2, 4):
        settings = training.Settings(stages=(train_data.Stage(steps, 28, (1, 1), 2, 2, ("ledger",)),), warmup=1)
        training.train(tmp_path / "out", tmp_path / "work", settings, every=2, say=said.append)
    assert "resumed at step 2" in said
    assert vlkv.load_params(tmp_path / "out").config == folder.config()
    assert [path.name for path in tmp_path.iterdir() if "." in path.name] == []
