"""What a reader sees on plots: intervals beside each other, labels apart, a line for the mean, axes from zero."""

import numpy as np
import pytest

from vlkv.tools.commands import plots
from vlkv.tools.commands.plots import MEAN, Curves, Maps

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure

    seen, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (seen.append(self), save(self, *a, **k)))
    return seen


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
