"""Metrics as numbers for each question, and the 95 % confidence intervals of metrics and of their differences.

Axes: C columns · Q questions, or whatever else a metric counts one by one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from vlkv.tools.evaluation.records import Scored

LEVEL, _NORMAL = 0.95, 1.959964  # the level of all intervals, and the normal quantile that belongs to it
_RESAMPLES = 2000
Interval = tuple[float, float]
Columns = Float[np.ndarray, "C *draws Q"]


def _mean(columns: Columns) -> Any:
    return columns[0].mean(axis=-1)


class Metric(NamedTuple):
    """A metric: numbers for each question, and how they give one number. Call it to get that number."""

    parts: Callable[[Sequence[Scored]], Any]  # [C, Q]
    combine: Callable[[Columns], Any] = _mean
    share: bool = False  # whether it is a share of right answers: `parts` are 0 or 1

    def __call__(self, scored: Sequence[Scored]) -> float:
        """The value of the metric."""
        return self.value(self.columns(scored))

    def columns(self, scored: Sequence[Scored]) -> Columns:
        """`parts` as an array."""
        return np.asarray(self.parts(scored), float)

    def value(self, columns: Columns) -> float:
        """The value of the metric from its columns."""
        with np.errstate(over="ignore"):
            return float(self.combine(columns))


def mean(value: Callable[[Scored], float]) -> Metric:
    """The metric that is the mean of a value of each question."""
    return Metric(lambda scored: [[value(item) for item in scored]])


def share(right: Callable[[Scored], bool]) -> Metric:
    """The metric that is the share of right answers."""
    return mean(right)._replace(share=True)


def interval(metric: Metric, columns: Columns) -> Interval | None:
    """The 95 % confidence interval of a metric: Wilson's for a share, else of the bootstrap over questions.

    None if there is only one question.
    """
    if metric.share:
        return wilson(float(columns[0].mean()), columns.shape[-1])
    return _bootstrap(columns, metric.combine)


def difference(metric: Metric, columns: Columns, full: Columns) -> tuple[float, Interval | None]:
    """The difference of a metric from that of the full cache on the same questions, and its 95 % confidence interval.

    Both policies answer the same questions, so the differences of single questions count. For a share, the interval is
    that of Bonett and Price (2012), which is not empty if no answer differs.
    """
    value = metric.value(columns) - metric.value(full)
    if not metric.share:
        count = len(columns)
        both = np.concatenate([columns, full])
        return value, _bootstrap(both, lambda both: metric.combine(both[:count]) - metric.combine(both[count:]))
    questions = columns.shape[-1] + 2
    better, worse = (1 + np.sum(columns > full)) / questions, (1 + np.sum(columns < full)) / questions
    half = _NORMAL * np.sqrt((better + worse - (better - worse) ** 2) / questions)
    return value, (float(max(-1, better - worse - half)), float(min(1, better - worse + half)))


def wilson(mean: float, count: int) -> Interval:
    """The 95 % confidence interval of a share `mean` of `count` questions (Wilson 1927), as of whole right answers."""
    from scipy.stats import binomtest  # noqa: PLC0415 (slow to import)

    interval = binomtest(round(mean * count), count).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def _bootstrap(columns: Columns, combine: Callable[[Columns], Any]) -> Interval | None:
    """The percentile bootstrap (Efron 1979): questions are drawn with replacement, always the same ones."""
    from scipy.stats import bootstrap  # noqa: PLC0415 (slow to import)

    if columns.shape[-1] < 2:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        drawing = {"n_resamples": _RESAMPLES, "batch": 100, "random_state": np.random.default_rng(0)}
        options = {"paired": True, "vectorized": True, "method": "percentile", "confidence_level": LEVEL, **drawing}
        result = bootstrap(tuple(columns), lambda *drawn, axis: combine(np.stack(drawn)), **options)
    low, high = result.confidence_interval
    return float(low), float(high)
