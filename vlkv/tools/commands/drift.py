"""`vlkv profile --what drift`: where answers attend next, given what questions attend to, as kernel and picture."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vlkv import loading
from vlkv.analysis import drift
from vlkv.errors import InputError
from vlkv.files import replacing
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.policies import Policy
from vlkv.terminal import track
from vlkv.tools.commands.options import policy_of
from vlkv.tools.commands.plots import check_file, require_matplotlib

_POLICY = "snapkv(window=8, kernel=1)"
_NEAR = 8  # offsets that the pictures of steps show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv profile` that only a drift has."""
    add = parser.add_argument
    add("--policy", metavar="NAME", help=f"drift: whose scores are before the answer (default: {_POLICY})")
    add("--on", choices=["order", "grid"], help="drift: offsets in tokens, or in lines and columns of an image "
                                                "(default: grid with --scope vision)")  # fmt: skip
    add("--max-new-tokens", type=int, default=20, metavar="N", help="drift: limit of an answer (default: 20)")


def run(args: argparse.Namespace, inputs: Sequence[Inputs]) -> Any:
    """Measures, writes the kernel and the picture beside it, and prints the largest shares."""
    on: drift.On = args.on or ("grid" if args.scope == "vision" else "order")
    picture = args.out.with_suffix(".png")
    policy = checked(args)
    if not args.json:
        require_matplotlib()
        check_file(picture, "picture", "png")
    params = loading.load_params(args.model, dtype=args.dtype)
    looks = drift.observe(params, _tracked(inputs), policy, sampling=Greedy(max_new_tokens=args.max_new_tokens))
    measured = drift.measure(looks, on=on)
    name = Path(args.model).name
    content = drift.save(args.out, measured, policy, params.config, name=name)
    if args.json:
        return content
    draw(measured, picture, f"{name}: where answers attend next, {len(looks)} samples")
    Console().print(_table(measured, f"{len(looks)} samples: {args.out}"))
    Console().out(f"{picture}, {args.out}: compose(..., smooth=Smooth({str(args.out)!r}))", highlight=False)  # one line
    return None


def checked(args: argparse.Namespace) -> Policy:
    """The policy whose scores are measured. Raises InputError if it cannot be used."""
    return policy_of(args.policy or _POLICY, {"keep": 0.1, "scope": args.scope}, _no_profile)


def _no_profile() -> Any:
    raise InputError("drift is measured on scores, which do not depend on a profile: leave out profile=")


def _tracked(inputs: Sequence[Inputs]) -> Iterator[Inputs]:
    yield from track(inputs, "measuring drift")


def _table(measured: drift.Drift, title: str) -> Table:
    table = Table("offset", "mean over steps [95 %]", "largest of the steps [95 %]", title=title)
    order = np.argsort(-measured.peak.share[:-1])[:12]
    for d in sorted(order[measured.peak.share[order] > 0]):
        offset = ", ".join(f"{x:+d}" for x in measured.offsets[d])
        table.add_row(offset, *(_cell(x, d) for x in (measured.mean, measured.peak)))
    table.add_row("elsewhere", _cell(measured.mean, -1), "")
    return table


def _cell(x: drift.Shares, d: int) -> str:
    return f"{x.share[d]:.3f} \\[{x.low[d]:.3f}, {x.high[d]:.3f}]"


def draw(measured: drift.Drift, out: Path, title: str) -> None:
    """Draws r(delta): its mean, at each step of the answer, and of each layer and head."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and slow to import)

    grid = measured.on == "grid"
    axis = {"columns to the right": 1, "lines below": 0} if grid else {"tokens later": 0}
    figure = Figure(figsize=(20 if grid else 13, 4.6), layout="constrained")
    figure.suptitle(title, fontsize="large")
    panels = list(figure.subplots(1, 5 if grid else 3))
    if grid:
        _draw_map(panels.pop(0), measured)
    _draw_line(panels.pop(0), measured, axis)
    for label, number in axis.items():
        _draw_steps(figure, panels.pop(0), measured, number, label)
    _draw_heads(figure, panels[0], measured, 1 if grid else 0)
    with replacing(out) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _along(measured: drift.Drift, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets along one axis, 0 in the other, and their places among all offsets."""
    others = np.delete(measured.offsets, axis, axis=1)
    places = np.flatnonzero((others == 0).all(axis=1) & (np.abs(measured.offsets[:, axis]) <= 2 * _NEAR))
    return measured.offsets[places, axis], places


def _draw_line(axes: Any, measured: drift.Drift, along: dict[str, int]) -> None:
    for label, axis in along.items():
        x, places = _along(measured, axis)
        (line,) = axes.plot(x, measured.mean.share[places], marker=".", label=f"{label}, mean of the steps")
        low, high = measured.mean.low[places], measured.mean.high[places]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.25, linewidth=0)
        peak = measured.peak.share[places]
        axes.plot(x, peak, "--", color=line.get_color(), linewidth=1, label=f"{label}, largest of the steps")
    axes.set(title="r(delta), mean with 95 % intervals", xlabel="delta", ylabel="share of the attention")
    axes.set_ylim(0, 1.4 * measured.peak.share[:-1].max())  # the legend hides no line
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper center")


def _draw_map(axes: Any, measured: drift.Drift) -> None:
    reach = measured.offsets.max()
    share = measured.peak.share[:-1].reshape(2 * reach + 1, -1)
    shown = axes.imshow(share, extent=(-reach - 0.5, reach + 0.5, reach + 0.5, -reach - 0.5), cmap="viridis", vmin=0)
    axes.set(title="r(delta), largest of the steps", xlabel="columns to the right", ylabel="lines below")
    axes.plot(0, 0, "+", color="white")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.figure.colorbar(shown, ax=axes, shrink=0.8)


def _draw_steps(figure: Any, axes: Any, measured: drift.Drift, axis: int, label: str) -> None:
    x, places = _along(measured, axis)
    steps = np.flatnonzero(measured.steps.share.any(axis=1))
    share = measured.steps.share[np.ix_(steps, places)]
    shown = axes.imshow(share, aspect="auto", cmap="viridis", vmin=0,
                        extent=(x[0] - 0.5, x[-1] + 0.5, len(steps) - 0.5, -0.5))  # fmt: skip
    ends = [*drift.STEPS[1:], None]
    spans = [(drift.STEPS[i] + 1, ends[i]) for i in steps]
    names = [str(a) if a == b else f"{a}-{b or ''}" for a, b in spans]
    axes.set_yticks(range(len(steps)), names)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title="r(delta) by token of the answer", xlabel=f"delta: {label}", ylabel="token of the answer")
    figure.colorbar(shown, ax=axes, shrink=0.8)


def _draw_heads(figure: Any, axes: Any, measured: drift.Drift, axis: int) -> None:
    x, places = _along(measured, axis)
    layers, heads = measured.heads.share.shape[:2]
    share = measured.peak_heads.share[..., places].reshape(layers * heads, -1)
    shown = axes.imshow(np.minimum(share, 1), aspect="auto", cmap="viridis", vmin=0, vmax=1,
                        extent=(x[0] - 0.5, x[-1] + 0.5, layers - 0.5 / heads, -0.5 / heads))  # fmt: skip
    label = "columns to the right" if measured.on == "grid" else "tokens later"
    axes.set(title="by layer and key head, largest of the steps", xlabel=f"delta: {label}", ylabel="layer")
    for number_axis in (axes.xaxis, axes.yaxis):
        number_axis.get_major_locator().set_params(integer=True)
    figure.colorbar(shown, ax=axes, shrink=0.8)
