"""Measurements while an answer is decoded."""

from __future__ import annotations

import jax
import numpy as np

from vlkv import analysis, policies
from vlkv.tools.commands.plots import Curves
from vlkv.tools.commands.views.case import Case, View, follow

TOP = (0.5, 0.3)  # shares of the vision tokens whose overlap A-VL's Figs. 4 and 5 show
_MOST = 0.8  # A-VL's sparsity: share of the tokens that hold this share of the attention
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
            Curves("mean over layers", "step", "share of the attention", step, lines, log=False),
            Curves("mean over steps", "layer", "share of the attention", layer, across, log=False),
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
