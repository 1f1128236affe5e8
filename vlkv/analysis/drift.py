"""Where the answer attends next, given what the question attends to: the drift r(delta) of a model's own attention.

For each layer and key head, `observe` records distributions over the tokens that compete for the cache: `before`, the
scores of a policy after prefill, such as the attention of the last rows of the question; and `after`, the attention at
each step of the answer. `measure` explains the second by the first: of the attention of a step to token t,

    after[t] = sum_delta r(delta) before[t - delta] + elsewhere / n

so that r(delta) >= 0 is the share of the attention that is found delta tokens after (or lines below, columns to the
right of) what the question attended to, and `elsewhere` the share that does not depend on it. r is fitted by
non-negative least squares over all samples, because attention to one token is often attention to its neighbours too,
which a mere correlation would count as drift. Intervals are those of the bootstrap over samples.

A token has to be kept if any step of the answer needs it. So the kernel is the largest r(delta) of all steps, each
measured on the answers that are long enough.

    looks = drift.observe(params, samples, SnapKV(keep=0.1, window=8, kernel=1, scope="vision"))
    measured = drift.measure(looks, on="grid")
    policy = compose(SnapKV(keep=0.1), smooth=Smooth(measured.weights()))

Axes: S samples · B rows of a batch · J steps · L layers · K key heads · T tokens · D offsets · E = D + 1 · F = E + J ·
R resamples. Numbers are float64 on the host.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from vlkv.analysis.looks import STEPS, Look, captured, observe
from vlkv.analysis.profiles import fingerprint
from vlkv.compression.policy import Policy
from vlkv.compression.smooth import Weights
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.files import replacing, require_json
from vlkv.policies import text_of

__all__ = ["STEPS", "Drift", "Look", "Shares", "captured", "load", "measure", "observe", "save"]
On = Literal["order", "grid"]
REACH = {"order": 16, "grid": 8}  # largest offset that is measured, in tokens, or in lines and columns
_RESAMPLES = 100
_TOLERANCE = 1e-5  # of the shares
_FAINT = 0.05  # weights below this share of the largest one are left out of a kernel
_FEWEST = 8  # samples for a step of the answer to be measured


class Shares(NamedTuple):
    """r(delta) and, as the last of E numbers, `elsewhere`, with the ends of their 95 % intervals."""

    share: Float[np.ndarray, "*of E"]
    low: Float[np.ndarray, "*of E"]
    high: Float[np.ndarray, "*of E"]


@dataclasses.dataclass(frozen=True)
class Drift:
    """What `measure` has found."""

    on: On
    offsets: Int[np.ndarray, "D axes"]  # tokens; or lines and columns
    mean: Shares  # of all steps, layers and heads together
    steps: Shares  # [J, E], of each step
    heads: Shares  # [L, K, E], of each layer and head
    samples: Int[np.ndarray, " J"]  # whose answers have each step
    peak: Shares  # the largest of all steps
    peak_heads: Shares  # [L, K, E], the same of each layer and head

    def weights(self, *, by_head: bool = True, floor: bool = True) -> Weights:
        """The kernel for `Smooth`: offsets whose interval is above 0, with weights relative to the largest of the head.

        Args:
            by_head: weights for each layer and key head. False: the same weights for all.
            floor: with `by_head`, no weight is smaller than that of all heads together. Without it, a head that does
                not move keeps nothing that lies ahead, which answers less if the measured prompts were easier.

        Raises:
            InputError: the answer's attention does not depend on the question's.
        """
        common = _relative(self.peak)
        if not common.any():
            raise InputError("the answers attend to nothing near what the questions attend to: no kernel can be made")
        each = _relative(self.peak_heads)
        each = np.maximum(each, common) if floor else np.where(each.any(axis=-1, keepdims=True), each, common)
        used = each.any(axis=(0, 1)) if by_head else common > 0
        offsets = [tuple(map(int, d)) for d in self.offsets]

        def weight(d: Any) -> Any:
            return tuple(tuple(row) for row in each[..., d].tolist()) if by_head else float(common[d])

        return tuple((*offsets[d], weight(d)) for d in map(int, np.flatnonzero(used)))


def _relative(shares: Shares) -> Float[np.ndarray, "*of D"]:
    """Shares relative to the largest one; 0 where they are faint or may be 0."""
    share, low = shares.share[..., :-1], shares.low[..., :-1]
    relative = share / np.maximum(share.max(axis=-1, keepdims=True), 1e-30)
    return np.round(np.where((low > 10 * _TOLERANCE) & (relative >= _FAINT), relative, 0.0), 3)


def measure(
    looks: Sequence[Look], *, on: On = "order", reach: int | None = None, resamples: int = _RESAMPLES, seed: int = 0
) -> Drift:
    """r(delta) of each layer and head, and of all together, with intervals over the samples.

    Args:
        looks: from `observe`.
        on: "order": delta counts tokens of the prompt; "grid": lines and columns of the image.
        reach: largest offset in each direction; None: 16 tokens, or 8 lines and columns.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        InputError: on="grid", and a sample has no tokens with a place on the grid.
    """
    reach = REACH[on] if reach is None else reach
    axis = np.arange(-reach, reach + 1)
    offsets = axis[:, None] if on == "order" else np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    sources = [_sources(look, on, offsets) for look in looks]
    has = np.array([look.after.any(axis=(1, 2, 3)) for look in looks])  # [S, J], which steps the answers have
    draws = np.random.default_rng(seed).multinomial(len(looks), np.full(len(looks), 1 / len(looks)), resamples)
    draws = np.concatenate([np.ones((1, len(looks)), int), draws])  # the first is the data themselves
    pooled: Any = 0.0
    fits = []
    layers, heads = looks[0].before.shape[:2]
    for layer, head in itertools.product(range(layers), range(heads)):
        sums = np.stack([_sums(x.before[layer, head], x.after[:, layer, head], *src)
                         for x, src in zip(looks, sources, strict=True)])  # fmt: skip
        pooled = pooled + sums
        fits.append(_fits(sums, has, draws))
    steps, mean = _fits(pooled, has, draws)
    by_head, by_head_mean = (np.stack(x, axis=1).reshape(len(draws), layers, heads, *x[0].shape[1:])
                             for x in zip(*fits, strict=True))  # fmt: skip
    return Drift(
        on=on,
        offsets=offsets,
        mean=_interval(mean),
        steps=_interval(steps),
        heads=_interval(by_head_mean),
        samples=has.sum(axis=0),
        peak=_interval(steps.max(axis=1)),
        peak_heads=_interval(by_head.max(axis=3)),
    )


Sources = tuple[Int[np.ndarray, " T"], Int[np.ndarray, "D T"]]


def _sources(look: Look, on: On, offsets: Int[np.ndarray, "D axes"]) -> Sources:
    """The tokens that are explained, and for each offset the token that far before each of them; -1: there is none."""
    if on == "order":
        tokens = np.flatnonzero(look.among)
        place = np.where(look.among, np.arange(len(look.among)), -1)
        source = tokens - offsets
        inside = (source >= 0) & (source < len(place))
        return tokens, np.where(inside, place[np.clip(source, 0, len(place) - 1)], -1)
    tokens = np.flatnonzero(look.among & (look.grid >= 0).all(axis=1))
    if not len(tokens):
        raise InputError("no token that competes has a place on an image: measure the drift in reading order")
    image, line, column = look.grid[tokens].T
    table = np.full((image.max() + 1, line.max() + 1, column.max() + 1), -1)
    table[image, line, column] = tokens
    lines, columns = line - offsets[:, :1], column - offsets[:, 1:]
    inside = (lines >= 0) & (lines < table.shape[1]) & (columns >= 0) & (columns < table.shape[2])
    return tokens, np.where(inside, table[image, np.where(inside, lines, 0), np.where(inside, columns, 0)], -1)


def _sums(
    before: Float[np.ndarray, " T"], after: Float[np.ndarray, "J T"], tokens: Int[np.ndarray, " t"],
    source: Int[np.ndarray, "D t"],
) -> Float[np.ndarray, "E F"]:  # fmt: skip
    """The normal equations of one sample: products of the explaining columns, and of these with `after`."""
    columns = np.concatenate([np.where(source >= 0, before[source], 0.0), np.full((1, len(tokens)), 1 / len(tokens))])
    return columns @ np.concatenate([columns, after[:, tokens]]).T


def _fits(
    sums: Float[np.ndarray, "S E F"], has: Bool[np.ndarray, "S J"], draws: Int[np.ndarray, "R S"]
) -> tuple[Float[np.ndarray, "R J E"], Float[np.ndarray, "R E"]]:
    """The shares that fit best in each draw of samples: of each step, 0 if few samples have it, and of all together."""
    samples, size, _ = sums.shape
    products, targets = sums[..., :size], sums[..., size:]

    def drawn(weights: np.ndarray, x: np.ndarray) -> np.ndarray:  # [R, S], [S, ...] -> [R, ...]
        return (weights @ x.reshape(samples, -1)).reshape(-1, *x.shape[1:])

    steps = np.zeros((len(draws), has.shape[1], size))
    for step in np.flatnonzero(has.sum(axis=0) >= _FEWEST):
        weights = draws * has[:, step]
        steps[:, step] = _solve(drawn(weights, products), drawn(weights, targets[..., step]))
    count = has.sum(axis=1)
    together = _solve(drawn(draws * count, products), drawn(draws, targets.sum(axis=-1)))
    return steps, together


def _interval(draws: Float[np.ndarray, "R *of E"]) -> Shares:
    low, high = np.quantile(draws[1:], (0.025, 0.975), axis=0)
    return Shares(draws[0], low, high)


def _solve(
    products: Float[np.ndarray, "R E E"], target: Float[np.ndarray, "R E"], sweeps: int = 200
) -> Float[np.ndarray, "R E"]:
    """Non-negative least squares from normal equations, by coordinate descent in all resamples at once."""
    diagonal = np.maximum(np.einsum("rdd->rd", products), 1e-30)
    x, residual = np.zeros_like(target), target.copy()  # target - products @ x
    if len(x) > 1:  # the resamples begin with the solution of the data
        x[:] = _solve(products[:1], target[:1])
        residual -= np.einsum("red,rd->re", products, x)
    for _ in range(sweeps):
        largest = 0.0
        for d in range(x.shape[1]):
            if not (x[:, d].any() or (residual[:, d] > 0).any()):
                continue
            step = np.maximum(x[:, d] + residual[:, d] / diagonal[:, d], 0) - x[:, d]
            x[:, d] += step
            residual -= step[:, None] * products[:, d]
            largest = max(largest, float(np.abs(step).max()))
        if largest < _TOLERANCE:
            break
    return x


def save(
    path: str | os.PathLike[str], drift: Drift, policy: Policy, config: ModelConfig, *, name: str
) -> dict[str, Any]:
    """Writes a drift as JSON, which `Smooth(path)` reads as a kernel, and returns the content.

    Args:
        path: the file; an existing one is replaced.
        drift: from `measure`.
        policy: that of `observe`.
        config: of the model (`params.config`).
        name: name of the model, for readers of the file.
    """

    def plain(x: Any) -> Any:
        return np.round(x, 4).tolist() if isinstance(x, np.ndarray) else x

    parts = {field.name: getattr(drift, field.name) for field in dataclasses.fields(drift)}
    arrays = {name: {k: plain(v) for k, v in x._asdict().items()} if isinstance(x, Shares) else plain(x)
              for name, x in parts.items()}  # fmt: skip
    about = {"policy": text_of(policy), "scope": policy.scope}
    kernel = [list(each) for each in drift.weights()]
    content = {"model": {"name": name, **fingerprint(config)}, "what": "drift", **about, "kernel": kernel, **arrays}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    with replacing(Path(path)) as partial:  # one line for each array, which are long
        partial.write_text(f"{{\n{lines}\n}}\n")
    return content


def load(path: str | os.PathLike[str]) -> Drift:
    """The drift in a file that `save` has written, to compare or to draw it.

    Raises:
        InputError: no such file, or another one.
    """
    content = require_json(Path(path))
    try:
        parts = {field.name: content[field.name] for field in dataclasses.fields(Drift)}
        arrays = {name: Shares(**{k: np.array(v) for k, v in x.items()}) if isinstance(x, dict) else x
                  for name, x in parts.items()}  # fmt: skip
        return Drift(**arrays | {name: np.array(arrays[name]) for name in ("offsets", "samples")})
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}: not a drift; make it again with `vlkv profile --what drift`") from None
