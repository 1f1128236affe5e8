"""Measurements while an answer is decoded."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import jax
import numpy as np

from vlkv import analysis, policies
from vlkv.compression.checking import require_layers
from vlkv.errors import InputError
from vlkv.tools.commands.plots import Curves, Panel
from vlkv.tools.commands.views.case import Case, View, follow

TOP = (0.5, 0.3)  # shares of the vision tokens whose overlap A-VL's Figs. 4 and 5 show
_MOST = 0.8  # A-VL's sparsity: share of the tokens that hold this share of the attention
# Parameters of A-VL's Figs. 9 and 10: the option of `policies.AVL` for each letter, and the values to try.
SWEEPS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "S": ("keep", (0.2, 0.3, 0.4, 0.6, 0.8)),
    "C": ("core", (0.1, 0.2, 0.3, 0.4)),
    "K": ("refresh", (1, 2, 3, 5, 8)),
    "P": ("prefill", (0.5, 0.7, 0.9)),
    "T": ("text", (0.4, 0.6, 0.8)),
}
_SWEPT = ("agreement", "stored", "used")
_concordance_of = jax.jit(analysis.concordance, static_argnames="fraction")


def error(case: Case) -> View:
    """Difference between the features with the full and with the compressed cache, while decoding the same answer."""
    prompt = case.read()
    cache = case.fill(prompt, policies.Full())
    answer, steps = case.answer(prompt, cache)
    reduced = case.read(case.policy)
    traces = [
        follow(case.params, p, c, answer[:, :-1])
        for p, c in ((prompt, cache), (reduced, case.fill(reduced, case.policy)))
    ]
    error = np.asarray(analysis.feature_error(*traces))[:steps, :, 0]
    mean, layer = error.mean(axis=0), np.arange(error.shape[1])
    agreement = float(analysis.agreement(traces[1].logits, answer)[0])
    panel = Curves("features, full cache against compressed", "layer", "mean absolute error", layer, {"": mean})
    return View(
        {"error": error, "mean": mean, "agreement": agreement}, {"layer": layer, "mean absolute error": mean}, [panel]
    )


def attention(case: Case) -> View:
    """Share of the attention that each type of token receives, by step and by layer."""
    prompt, mass, steps = case.trace()
    types = analysis.token_types(prompt.is_vision, prompt.valid)
    shares = np.asarray(analysis.shares_by_type(mass, types))[:steps, :, 0]
    by_step, by_layer = shares.mean(axis=1), shares.mean(axis=0)
    step, layer = np.arange(1, steps + 1), np.arange(shares.shape[1])
    lines, across = (dict(zip(analysis.TYPES, x.T, strict=True)) for x in (by_step, by_layer))
    return View(
        {"types": list(analysis.TYPES), "shares": shares},
        {"step": step, **lines},
        [
            Curves("mean over layers", "step", "share of the attention", step, lines),
            Curves("mean over steps", "layer", "share of the attention", layer, across),
        ],
    )


def concordance(case: Case) -> View:
    """Overlap of the most attended vision tokens with those of the first layer, and with those of the first step."""
    vision, (_, trace, steps) = case.vision, case.trace()
    mass = np.asarray(trace)[:steps, :, 0, : vision.size][..., vision]
    everywhere = np.ones(mass.shape[-1], bool)
    between_layers, between_steps = (
        np.stack([np.asarray(_concordance_of(first, mass, everywhere, fraction=p)) for p in TOP])  # [p, S, L]
        for first in (np.broadcast_to(mass[:, :1], mass.shape), np.broadcast_to(mass[:1], mass.shape))
    )
    layers = {f"top {p:.0%}": x for p, x in zip(TOP, between_layers.mean(axis=1), strict=True)}
    times = {f"top {p:.0%}": x for p, x in zip(TOP, between_steps.mean(axis=2), strict=True)}
    layer, step = np.arange(mass.shape[1]), np.arange(1, steps + 1)
    return View(
        {"top": list(TOP), "with_first_layer": between_layers, "with_first_step": between_steps},
        {"layer": layer, **{f"{name}, with the first layer": x for name, x in layers.items()}},
        [
            Curves("with the first layer", "layer", "concordance", layer, layers),
            Curves("with the first step", "step", "concordance", step, times),
        ],
    )


def patches(case: Case) -> View:
    """Attention that each vision token receives, and how few tokens hold most of it."""
    vision, (_, trace, steps) = case.vision, case.trace()
    mass = np.asarray(trace)[:steps, :, 0, : vision.size].mean(axis=0)  # [L, T]
    curve = np.asarray(analysis.lorenz(mass, vision))[:, : vision.sum()]
    few = (np.argmax(curve >= _MOST, axis=1) + 1) / vision.sum()
    peak = np.maximum(np.where(vision, mass, 0).max(axis=1, keepdims=True), 1e-30)
    layer = np.arange(len(mass))
    ordered = -np.sort(-mass[:, vision], axis=1)
    return View(
        {"attention": mass[:, vision], "tokens_for_80_percent": few},
        {"layer": layer, "tokens with 80 % of the attention": few},
        [
            Curves("sparsity", "layer", "share of the vision tokens that hold 80 %", layer, {"": few}),
            Curves("attention, sorted", "rank", "attention, mean over steps and heads",
                   np.arange(1, ordered.shape[1] + 1), {f"layer {i}": x for i, x in enumerate(ordered)}),
            *case.maps("attention / largest of the layer", mass / peak),
        ],
    )  # fmt: skip


def sweep(case: Case) -> View:
    """Agreement with the full cache, and stored and used entries, for several values of each of A-VL's parameters."""
    if not isinstance(case.policy, policies.AVL):
        raise InputError("--what sweep varies A-VL's parameters: give --policy avl")
    if case.policy.budget is not None:
        raise InputError("--what sweep varies the fraction that is kept: give --keep, not --budget")
    arrays: dict[str, Any] = {}
    columns: list[tuple[Any, ...]] = []
    panels: list[Panel] = []
    total, begin = sum(len(values) for _, values in SWEEPS.values()), time.perf_counter()
    case.say(f"sweep: {total} settings, each of which is compiled; an estimate of the time follows")
    plans = {
        letter: [_varied(case.policy, option, value) for value in values] for letter, (option, values) in SWEEPS.items()
    }
    for policy in itertools.chain.from_iterable(plans.values()):  # before minutes of compiling
        require_layers(policy, case.params.decoder.full_layers)
    for letter, (option, values) in SWEEPS.items():
        swept = analysis.sweep(case.params, case.inputs, plans[letter], new_tokens=case.new_tokens, key=case.key)
        lines = {name: np.asarray(x)[:, 0] for name, x in zip(_SWEPT, swept, strict=True)}
        arrays[letter] = {"option": option, "values": list(values), **lines}
        columns += [(letter, value, *(line[i] for line in lines.values())) for i, value in enumerate(values)]
        panels.append(Curves(f"{letter} ({option})", option, "relative to the full cache", np.array(values), lines))
        if len(panels) == 1:
            took = time.perf_counter() - begin
            rest = took * (total - len(values)) / len(values)
            case.say(f"sweep: {len(values)} settings took {took:.0f} s, so about {rest:.0f} s are left")
    names = ("parameter", "value", *_SWEPT)
    return View(arrays, {name: np.array(x) for name, x in zip(names, zip(*columns, strict=True), strict=True)}, panels)


def _varied(policy: policies.AVL, option: str, value: Any) -> policies.AVL:
    """The policy with one option changed, and core <= keep <= prefill restored by changing the others."""
    changed = {"keep": policy.keep, "core": policy.core, "prefill": policy.prefill, option: value}
    if option != "core" and changed["core"] is not None:
        changed["core"] = min(changed["core"], changed["keep"])
    if option == "core":
        changed["keep"] = max(changed["keep"], value)
    if changed["prefill"] is not None:
        changed["prefill"] = max(changed["prefill"], changed["keep"])
    return dataclasses.replace(policy, **changed)
