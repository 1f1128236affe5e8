"""Measurements of the scores, budgets and observers of a prompt."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

from vlkv import analysis, policies
from vlkv.errors import InputError
from vlkv.tools.commands.plots import MEAN, Curves, Maps
from vlkv.tools.commands.views.case import Case, View

_SHARES = np.linspace(0, 1, 101)  # x axis of Lorenz curves: share of the tokens
_WEIGHTS = np.linspace(-7, 0.5, 151)  # x axis of densities: log10 of a token's attention
WINDOWS: tuple[Literal["elite", "text", "recent", "vision"], ...] = ("elite", "text", "recent", "vision")
_ROWS = 16  # size of the windows "recent" and "vision" in AirCache's Fig. 1
_OBSERVERS = 64  # most observers of a window that are drawn and compared
_choose = jax.jit(analysis.choose)


def budgets(case: Case) -> View:
    """Entries that each layer keeps."""
    prompt = case.read(case.policy)
    cache = case.fill(prompt, case.policy)
    entries = np.asarray(analysis.layer_budgets(cache))[0]
    tokens = int(case.inputs.valid.sum())
    is_vision = np.asarray(case.inputs.is_vision)[0]
    vision = np.asarray(analysis.held(cache, is_vision.size))[0][:, is_vision].sum(axis=1)
    layer = np.arange(len(entries))
    share = entries / tokens
    lines = {"budget": share, MEAN: np.full(len(share), share.mean())}
    panel = Curves("budgets", "layer", "share of the prompt kept", layer, lines)
    return View(
        {"entries": entries, "share": share, "vision": vision},
        {"layer": layer, "entries": entries, "of them vision": vision, "share": share}, [panel],
    )  # fmt: skip


def lorenz(case: Case) -> View:
    """Lorenz curves and Gini coefficients of PrefixKV's importance, and the share of it that the budgets retain."""
    prompt = case.read()
    by_sums = dataclasses.replace(policies.PrefixKV(keep=0.5), scope=case.policy.scope)
    chosen = _choose(prompt, case.policy, key=case.key)
    same = isinstance(case.policy, policies.PrefixKV)
    importance = (chosen if same else _choose(prompt, by_sums)).scores[0, :, 0]
    inside = np.asarray(case.inputs.valid)[0] if case.policy.scope == "all" else case.vision
    budget = np.rint(np.asarray(chosen.budgets)[0].mean(axis=1)).astype(np.int32)
    equal = np.full_like(budget, round(budget.mean()))
    curve, gini, kept, uniform = (np.asarray(x) for x in _concentration(importance, inside, budget, equal))
    layer, count = np.arange(len(gini)), int(inside.sum())
    ends = np.arange(count + 1) / count
    curves = np.stack([np.interp(_SHARES, ends, np.concatenate([[0.0], c[:count]])) for c in curve])
    lines = {f"layer {i}": c for i, c in enumerate(curves)}
    return View(
        {
            "share_of_tokens": _SHARES,
            "lorenz": curves,
            "gini": gini,
            "budgets": budget,
            "retained": kept,
            "retained_by_equal_budgets": uniform,
        },
        {"layer": layer, "Gini": gini, "budget": budget, "retained": kept, "with equal budgets": uniform},
        [
            Curves("Lorenz curves", "share of the tokens", "share of the importance", _SHARES, lines),
            Curves("per layer", "layer", "", layer, {"Gini": gini, "retained": kept, "with equal budgets": uniform}),
        ],
    )


@jax.jit
def _concentration(importance: Any, inside: Any, *budgets: Any) -> tuple[jax.Array, ...]:
    curve = analysis.lorenz(importance, inside)
    return curve, analysis.gini(importance, inside), *(analysis.retained(curve, budget) for budget in budgets)


def strength(case: Case) -> View:
    """AirCache's strength and skewness of each layer."""
    if not isinstance(case.policy, policies.AirCache):
        raise InputError("--what strength is AirCache's measure: give --policy aircache")
    if case.policy.scope != "vision":
        raise InputError("--what strength measures vision tokens: give --scope vision")
    vision = case.vision
    chosen = _choose(case.read(), case.policy, key=case.key)
    strength, skewness = (np.asarray(chosen.extra[name])[0] for name in ("strength", "skewness"))
    importance = -np.sort(-np.asarray(chosen.scores)[0, :, 0][:, vision], axis=1)
    layer = np.arange(len(strength))
    lines = {f"layer {i}": x for i, x in enumerate(importance)}
    return View(
        {"strength": strength, "skewness": skewness, "importance": importance},
        {"layer": layer, "strength": strength, "skewness": skewness},
        [
            Curves("strength", "layer", "importance of the whole image", layer, {"strength": strength}),
            Curves("skewness", "layer", "skewness of the importance", layer, {"skewness": skewness}),
            Curves("importance, sorted", "rank", "importance", np.arange(1, importance.shape[1] + 1), lines),
        ],
    )


def divergence(case: Case) -> View:
    """Jensen-Shannon divergence between AirCache's budgets, and between CSP's self and cross attention."""
    prompt, policy = case.read(), case.policy
    chosen, layers = _choose(prompt, policy, key=case.key), len(prompt.layers)
    budgets = {type(policy).__name__: np.asarray(chosen.budgets)[0].mean(axis=1, dtype=np.float32)}
    if isinstance(policy, policies.AirCache):
        total, most = chosen.budgets[0, :, 0].sum(), np.isfinite(np.asarray(chosen.scores)[0, :, 0]).sum(axis=1)
        statistics = {name: value[0] for name, value in chosen.extra.items()}
        for name in ("strength", "skewness"):
            alone = dataclasses.replace(policy, allocation=name)
            granted = alone.allocate(statistics, total=total, most=jax.numpy.asarray(most), layers=layers)
            budgets[name] = np.asarray(granted, np.float32)
    budgets = {"average": np.full(layers, budgets[type(policy).__name__].mean(), np.float32), **budgets}
    names = list(budgets)
    between = {
        f"{a} & {b}": float(analysis.jensen_shannon(budgets[a], budgets[b]))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    pruning = policies.CSP(keep=policy.keep, budget=policy.budget, scope="all")
    extra = _choose(prompt, pruning).extra
    both = [np.asarray(extra[name])[0].mean(axis=1) for name in ("self", "cross")]
    per_layer = np.asarray(analysis.jensen_shannon(*analysis.value_histograms(*both, np.asarray(case.inputs.valid)[0])))
    layer = np.arange(layers)
    return View(
        {"budgets": budgets, "between_budgets": between, "self_and_cross": per_layer},
        {"layer": layer, **budgets, "self & cross attention": per_layer},
        [
            Curves("budgets", "layer", "entries", layer, budgets),
            Curves("self and cross attention", "layer", "Jensen-Shannon divergence", layer, {"": per_layer}),
        ],
    )


def observers(case: Case) -> View:
    """How similar the attention of the tokens within each of AirCache's windows is."""
    policy = case.policy
    if not isinstance(policy, policies.AirCache):
        raise InputError("--what observers compares AirCache's windows: give --policy aircache")
    vision, prompt = np.flatnonzero(case.vision), case.read()
    middle = len(prompt.layers) // 2
    agreed: dict[str, np.ndarray] = {}
    drawn: dict[str, np.ndarray] = {}
    for window in WINDOWS:
        chosen = _choose(prompt, dataclasses.replace(policy, window=window, rows=_ROWS), key=case.key)
        masks = np.asarray(chosen.extra["observers"])[0]
        agreed[window] = np.zeros(len(prompt.layers))
        for i, (layer, mask) in enumerate(zip(prompt.layers, masks, strict=True)):
            places = np.flatnonzero(mask)[-_OBSERVERS:]
            until = None if layer.until is None else layer.until[0]
            q, k = (np.swapaxes(x[0], 0, 1) for x in (layer.q, layer.k))
            attended = analysis.observer_attention(q, k, layer.valid[0], places, vision, until)
            rows = np.asarray(attended)
            agreed[window][i] = analysis.consistency(rows)
            if i == middle:
                drawn[f"{window} ({len(places)})"] = rows / max(rows.max(), 1e-30)
    layer = np.arange(len(prompt.layers))
    return View(
        {"consistency": agreed, "attention": {name.split()[0]: x for name, x in drawn.items()}, "layer": middle},
        {"layer": layer, **agreed},
        [
            Curves("agreement of the observers", "layer", "mean cosine of two observers", layer, agreed),
            Maps(
                f"root of the attention in layer {middle}: observers down, vision tokens across",
                {name: np.sqrt(rows) for name, rows in drawn.items()},
            ),
        ],
    )


def densities(case: Case) -> View:
    """Densities of CSP's self and cross attention, and the divergence between them."""
    if not isinstance(case.policy, policies.CSP):
        raise InputError("--what densities shows CSP's regions: give --policy csp")
    prompt = case.read()
    extra, valid = _choose(prompt, case.policy, key=case.key).extra, np.asarray(case.inputs.valid)[0]
    sums = [np.where(valid, np.asarray(extra[name])[0], 0).sum(axis=-1) for name in ("self", "cross")]  # [L, K]
    share = (sums[1] / np.maximum(sums[0] + sums[1], 1e-30)).mean(axis=1)
    found: dict[str, np.ndarray] = {}
    for name in ("self", "cross"):
        scores = np.asarray(extra[name])[0].mean(axis=1)[:, valid]  # mean over heads [L, T]
        found[name] = np.stack([analysis.density(np.log10(row[row > 0]), _WEIGHTS) for row in scores])
    both = {name: x.mean(axis=0) for name, x in found.items()}
    divergence = np.asarray(analysis.jensen_shannon(found["self"] + 1e-12, found["cross"] + 1e-12))
    layer = np.arange(len(divergence))
    return View(
        {"log10_attention": _WEIGHTS, "density": found, "divergence": divergence, "share": share, "c": share.mean()},
        {"layer": layer, "Jensen-Shannon divergence": divergence, "share of cross attention (mean: c)": share},
        [
            Curves(
                "density, mean over layers", "log10 of the attention of a token", "density", _WEIGHTS, both, log=False
            ),
            Curves("self and cross attention", "layer", "Jensen-Shannon divergence", layer, {"": divergence}),
        ],
    )
