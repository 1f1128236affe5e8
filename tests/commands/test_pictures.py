"""What a reader sees on plots: intervals beside each other, labels apart, a line for the mean, axes from zero."""

import itertools

import numpy as np
import pytest

from vlkv.tools.commands import plots
from vlkv.tools.commands.plots import MEAN, Curves, Maps
from vlkv.tools.evaluation import curves

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure

    seen, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (seen.append(self), save(self, *a, **k)))
    return seen


def points(shares, lines=8):
    about = dict(bits=16, quality=0.5, low=0.4, high=0.6, scope="vision")
    return [dict(name=f"method {i}", bytes=share * (1 - i / 2000), **about) for i in range(lines) for share in shares]


@pytest.mark.parametrize("shares", [(0.02, 0.1), (0.01, 0.02, 0.05, 0.1, 0.2, 0.25), (0.1,)])
def test_intervals_and_labels_do_not_hide_each_other(figures, tmp_path, shares):
    curves.plot(points(shares), tmp_path / "a.png", title="t", label="l")
    (figure,) = figures
    axes = figure.axes[0]
    bars = [bar for container in axes.containers for bar in container.lines[2][0].get_segments()]
    x = np.sort([axes.transData.transform(bar)[0, 0] for bar in bars])
    assert len(x) == 8 * len(shares) and np.diff(x).min() > 3, "pixels"
    middles = np.exp(
        np.log(axes.transData.inverted().transform(np.c_[x, x])[:, 0]).reshape(len(shares), 8).mean(axis=1)
    )
    np.testing.assert_allclose(middles, shares, rtol=0.02)
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert boxes and all(a.x1 + 4 < b.x0 for a, b in itertools.pairwise(boxes))


def test_a_mean_is_dashed_and_counts_begin_at_zero(figures, tmp_path):
    layer, share = np.arange(4), np.array([0.1, 0.9, 0.2, 0.8])
    budgets = Curves("budgets", "layer", "share", layer, {"budget": share, MEAN: np.full(4, share.mean())})
    close = Curves("agreement", "layer", "cosine", layer, {"a": np.array([0.9, 0.95, 0.97, 0.93])})
    wide = Curves("importance", "rank", "importance", layer, {"a": np.array([1e-5, 1e-3, 0.1, 1])})
    plots.save(
        [budgets, close, wide, Maps("kept", {"layer 0": np.full((4, 4, 3), 255, np.uint8)})], tmp_path / "a.png", "t"
    )
    first, second, third, picture = figures[0].axes
    mean = next(line for line in first.lines if line.get_label() == "mean 0.5")
    assert mean.get_linestyle() == "--" and set(mean.get_ydata()) == {0.5}
    assert first.get_ylim()[0] == 0 and second.get_ylim()[0] > 0.8 and third.get_yscale() == "log"
    assert picture.axison and not len(picture.get_xticks()), "a white picture has a frame"
