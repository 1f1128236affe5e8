"""The measurements of `vlkv inspect`: each runs a model and returns arrays, table columns, and panels to draw."""

import dataclasses
import itertools
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vlkv import analysis, policies
from vlkv.analysis.cost import full_attention
from vlkv.analysis.drawing import outlined
from vlkv.analysis.text_drawing import kept_text
from vlkv.errors import InputError
from vlkv.policies import Policy, text_of
from vlkv.tools.commands.case import Case, View
from vlkv.tools.commands.plots import MEAN, Curves, Maps, by_layer

Method = TypeVar("Method", bound=Policy)
_SHARES = np.linspace(0, 1, 101)  # x axis of Lorenz curves: share of the tokens
_WEIGHTS = np.linspace(-7, 0.5, 151)  # x axis of densities: log10 of a token's attention
_TOP = (0.5, 0.3)  # shares of the vision tokens whose overlap A-VL's Figs. 4 and 5 show
_MOST = 0.8  # A-VL's sparsity: share of the tokens that hold this share of the attention
WINDOWS: tuple[Literal["elite", "text", "recent", "vision"], ...] = ("elite", "text", "recent", "vision")
_ROWS = 16  # size of the windows "recent" and "vision" in AirCache's Fig. 1
_OBSERVERS = 64  # most observers of a window that are drawn and compared
_concordance = jax.jit(analysis.concordance, static_argnames="fraction")


def budgets(case: Case) -> View:
    """Entries that each layer keeps."""
    cache = case.fill(case.read(case.policy))
    entries = np.asarray(analysis.layer_budgets(cache))[0]
    share = entries / int(case.valid.sum())
    vision = case.held(cache)[:, case.is_vision].sum(axis=1)
    lines = {"budget": share, MEAN: np.full(len(share), share.mean())}
    return View(
        {"entries": entries, "share": share, "vision": vision},
        {"entries": entries, "of them vision": vision, "share": share},
        [by_layer("budgets", "share of the prompt kept", lines)],
    )


def lorenz(case: Case) -> View:
    """Lorenz curves and Gini coefficients of PrefixKV's importance, and the share of it that the budgets retain."""
    prompt = case.read()
    chosen = by_sums = case.choose(prompt)
    if not isinstance(case.policy, policies.PrefixKV):
        by_sums = case.choose(prompt, dataclasses.replace(policies.PrefixKV(keep=0.5), scope=case.policy.scope))
    importance = by_sums.scores[:, 0]
    inside = case.valid if case.policy.scope == "all" else case.vision
    budget = np.rint(chosen.budgets.mean(axis=1)).astype(np.int32)
    equal = np.full_like(budget, round(budget.mean()))
    curve, gini, kept, uniform = (np.asarray(x) for x in _concentration(importance, inside, budget, equal))
    ends = np.arange(inside.sum() + 1) / inside.sum()
    curves = np.stack([np.interp(_SHARES, ends, np.concatenate([[0.0], c[: inside.sum()]])) for c in curve])
    arrays = {"share_of_tokens": _SHARES, "lorenz": curves, "gini": gini, "budgets": budget, "retained": kept}
    shares = {"retained": kept, "with equal budgets": uniform}
    return View(
        {**arrays, "retained_by_equal_budgets": uniform},
        {"Gini": gini, "budget": budget, **shares},
        [
            Curves("Lorenz curves", "share of the tokens", "share of the importance", _SHARES, _layers(curves)),
            by_layer("per layer", "", {"Gini": gini, **shares}),
        ],
    )


@jax.jit
def _concentration(importance: Any, inside: Any, *budgets: Any) -> tuple[jax.Array, ...]:
    curve = analysis.lorenz(importance, inside)
    return curve, analysis.gini(importance, inside), *(analysis.retained(curve, budget) for budget in budgets)


def _layers(values: Any) -> dict[str, np.ndarray]:
    return {f"layer {i}": x for i, x in enumerate(values)}


def _ranked(title: str, y_label: str, values: np.ndarray) -> Curves:
    """The values [L, T] of each layer, already sorted, over their rank."""
    return Curves(title, "rank", y_label, np.arange(1, values.shape[1] + 1), _layers(values))


def strength(case: Case) -> View:
    """AirCache's strength and skewness of each layer."""
    _require(case, "strength is AirCache's measure", policies.AirCache)
    if case.policy.scope != "vision":
        raise InputError("--what strength measures vision tokens: give --scope vision")
    vision, chosen = case.vision, case.choose(case.read())
    measured = {name: chosen.extra[name] for name in ("strength", "skewness")}
    importance = -np.sort(-chosen.scores[:, 0][:, vision], axis=1)
    labels = ("importance of the whole image", "skewness of the importance")
    panels = [by_layer(name, label, {name: x}) for (name, x), label in zip(measured.items(), labels, strict=True)]
    panels.append(_ranked("importance, sorted", "importance", importance))
    return View({**measured, "importance": importance}, measured, [*panels])


def _require(case: Case, what: str, method: type[Method]) -> Method:
    if not isinstance(case.policy, method):
        raise InputError(f"--what {what}: give --policy {method.__name__.lower()}")
    return case.policy


def divergence(case: Case) -> View:
    """Jensen-Shannon divergence between AirCache's budgets, and between CSP's self and cross attention."""
    prompt, policy = case.read(), case.policy
    chosen, layers = case.choose(prompt), len(prompt.layers)
    mean = chosen.budgets.mean(axis=1, dtype=np.float32)
    budgets = {"average": np.full(layers, mean.mean(), np.float32), type(policy).__name__: mean}
    if isinstance(policy, policies.AirCache):
        total, most = jnp.asarray(chosen.budgets[:, 0].sum()), jnp.isfinite(chosen.scores[:, 0]).sum(axis=1)
        for name in ("strength", "skewness"):
            alone = dataclasses.replace(policy, allocation=name)
            statistics = jax.tree.map(jnp.asarray, chosen.extra)
            budgets[name] = np.asarray(alone.allocate(statistics, total=total, most=most, layers=layers), np.float32)
    pairs = itertools.combinations(budgets, 2)
    between = {f"{a} & {b}": float(analysis.jensen_shannon(budgets[a], budgets[b])) for a, b in pairs}
    extra = case.choose(prompt, policies.CSP(keep=policy.keep, budget=policy.budget, scope="all")).extra
    regions = (extra[name].mean(axis=1) for name in ("self", "cross"))
    per_layer = np.asarray(analysis.jensen_shannon(*analysis.value_histograms(*regions, inside=case.valid)))
    return View(
        {"budgets": budgets, "between_budgets": between, "self_and_cross": per_layer},
        {**budgets, "self & cross attention": per_layer},
        [
            by_layer("budgets", "entries", budgets),
            by_layer("self and cross attention", "Jensen-Shannon divergence", {"": per_layer}),
        ],
    )


def observers(case: Case) -> View:
    """How similar the attention of the tokens within each of AirCache's windows is."""
    policy = _require(case, "observers compares AirCache's windows", policies.AirCache)
    vision, prompt = np.flatnonzero(case.vision), case.read()
    middle = len(prompt.layers) // 2
    consistency, pictures = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for window in WINDOWS:
        masks = case.choose(prompt, dataclasses.replace(policy, window=window, rows=_ROWS)).extra["observers"]
        consistency[window] = np.zeros(len(prompt.layers))
        for i, (layer, mask) in enumerate(zip(prompt.layers, masks, strict=True)):
            places = np.flatnonzero(mask)[-_OBSERVERS:]
            q, k, valid, until = jax.tree.map(lambda x: x[0], (layer.q, layer.k, layer.valid, layer.until))
            q, k = q.swapaxes(0, 1), k.swapaxes(0, 1)
            rows = np.asarray(analysis.observer_attention(q, k, valid, places, vision, until))
            consistency[window][i] = analysis.consistency(rows)
            if i == middle:
                pictures[f"{window} ({len(places)})"] = rows / max(rows.max(), 1e-30)
    title = f"root of the attention in layer {middle}: observers down, vision tokens across"
    by_window = {name.split()[0]: x for name, x in pictures.items()}
    return View(
        {"consistency": consistency, "attention": by_window, "layer": middle},
        consistency,
        [
            by_layer("agreement of the observers", "mean cosine of two observers", consistency),
            Maps(title, {name: np.sqrt(rows) for name, rows in pictures.items()}),
        ],
    )


def densities(case: Case) -> View:
    """Densities of CSP's self and cross attention, and the divergence between them."""
    _require(case, "densities shows CSP's regions", policies.CSP)
    valid, extra = case.valid, case.choose(case.read()).extra
    in_self, in_cross = (np.where(valid, extra[name], 0).sum(axis=-1) for name in ("self", "cross"))  # [L, K]
    share = (in_cross / np.maximum(in_self + in_cross, 1e-30)).mean(axis=1)
    density = {}
    for name in ("self", "cross"):
        scores = extra[name].mean(axis=1)[:, valid]
        density[name] = np.stack([analysis.density(np.log10(row[row > 0]), _WEIGHTS) for row in scores])
    divergence = np.asarray(analysis.jensen_shannon(density["self"] + 1e-12, density["cross"] + 1e-12))
    means = {name: x.mean(axis=0) for name, x in density.items()}
    title, x_label = "density, mean over layers", "log10 of the attention of a token"
    return View(
        {"log10_attention": _WEIGHTS, "density": density, "divergence": divergence, "share": share, "c": share.mean()},
        {"Jensen-Shannon divergence": divergence, "share of cross attention (mean: c)": share},
        [
            Curves(title, x_label, "density", _WEIGHTS, means, log=False),
            by_layer("self and cross attention", "Jensen-Shannon divergence", {"": divergence}),
        ],
    )


def error(case: Case) -> View:
    """Difference between the features with the full and with the compressed cache, while decoding the same answer."""
    prompt, reduced = case.read(), case.read(case.policy)
    caches = case.fill(prompt, policies.Full()), case.fill(reduced)
    answer, steps = case.answer(prompt, caches[0])
    full, compressed = (case.follow(p, cache, answer) for p, cache in zip((prompt, reduced), caches, strict=True))
    error = np.asarray(analysis.feature_error(full, compressed))[:steps, :, 0]
    mean = error.mean(axis=0)
    agreement = float(analysis.agreement(compressed.logits, answer)[0])
    return View(
        {"error": error, "mean": mean, "agreement": agreement},
        {"mean absolute error": mean},
        [by_layer("features, full cache against compressed", "mean absolute error", {"": mean})],
    )


def attention(case: Case) -> View:
    """Share of the attention that each type of token receives, by step and by layer."""
    prompt, mass, steps = case.attention()
    types = analysis.token_types(prompt.is_vision, prompt.valid)
    shares = np.asarray(analysis.shares_by_type(mass, types))[:steps, :, 0]
    by_step, of_layers = (dict(zip(analysis.TYPES, shares.mean(axis=axis).T, strict=True)) for axis in (1, 0))
    label = "share of the attention"
    return View(
        {"types": list(analysis.TYPES), "shares": shares},
        by_step,
        [
            Curves("mean over layers", "step", label, np.arange(1, steps + 1), by_step, log=False),
            by_layer("mean over steps", label, of_layers, log=False),
        ],
        rows="step",
    )


def concordance(case: Case) -> View:
    """Overlap of the most attended vision tokens with those of the first or last layer, and of the first step."""
    vision, (_, trace, steps) = case.vision, case.attention()
    mass = np.asarray(trace)[:steps, :, 0, : vision.size][..., vision]
    everywhere = np.ones(mass.shape[-1], bool)
    with_layer, with_last, with_step = (
        np.stack([np.asarray(_concordance(other, mass, everywhere, fraction=p)) for p in _TOP])  # [p, S, L]
        for other in (np.broadcast_to(part, mass.shape) for part in (mass[:, :1], mass[:, -1:], mass[:1]))
    )
    names = [f"top {p:.0%}" for p in _TOP]
    layers, last = (dict(zip(names, each.mean(axis=1), strict=True)) for each in (with_layer, with_last))
    steps_by_share = dict(zip(names, with_step.mean(axis=2), strict=True))
    return View(
        {"top": list(_TOP), "with_first_layer": with_layer, "with_last_layer": with_last, "with_first_step": with_step},
        {
            **{f"{name}, with the first layer": x for name, x in layers.items()},
            **{f"{name}, with the last layer": x for name, x in last.items()},
        },
        [
            by_layer("with the first layer", "concordance", layers),
            by_layer("with the last layer", "concordance", last),
            Curves("with the first step", "step", "concordance", np.arange(1, steps + 1), steps_by_share),
        ],
    )


def patches(case: Case) -> View:
    """Attention that each vision token receives, and how few tokens hold most of it."""
    vision, (_, trace, steps) = case.vision, case.attention()
    mass = np.asarray(trace)[:steps, :, 0, : vision.size].mean(axis=0)  # [L, T]
    curve = np.asarray(analysis.lorenz(mass, vision))[:, : vision.sum()]
    few = (np.argmax(curve >= _MOST, axis=1) + 1) / vision.sum()
    peak = np.maximum(np.where(vision, mass, 0).max(axis=1, keepdims=True), 1e-30)
    ordered = -np.sort(-mass[:, vision], axis=1)
    return View(
        {"attention": mass[:, vision], "tokens_for_80_percent": few},
        {"tokens with 80 % of the attention": few},
        [
            by_layer("sparsity", "share of the vision tokens that hold 80 %", {"": few}),
            _ranked("attention, sorted", "attention, mean over steps and heads", ordered),
            *case.maps("attention / largest of the layer", mass / peak),
        ],
    )


def survival(case: Case) -> View:
    """Vision tokens that each layer computes, and those that it caches."""
    vision, prompt = case.vision, case.read(case.policy)
    reached, held = np.asarray(analysis.reached(prompt))[0], case.held(case.fill(prompt))
    counts = {"computed": reached[:, vision].sum(axis=1), "cached": held[:, vision].sum(axis=1)}
    return View(
        {**counts, "computed_by_image": case.on_grid(reached), "cached_by_image": case.on_grid(held)},
        counts,
        [by_layer("vision tokens", "tokens", counts), *case.maps("cached (share of heads)", held)],
    )


def text(case: Case) -> View:
    """The share of the layers and heads that keep each token of the prompt's text."""
    assert case.processor is not None
    cache = case.fill(case.read(case.policy))
    drawn = kept_text(case.processor, case.inputs, [(text_of(case.policy), case.policy, cache)])
    share = case.held(cache)
    columns = {
        f"share of the {mask.sum()} {name} tokens kept": share[:, mask].mean(axis=1)
        for name, mask in (("text", case.valid & ~case.is_vision), ("vision", case.is_vision))
        if mask.any()
    }
    (kept,) = drawn.kept.values()
    return View({"pieces": list(drawn.pieces), "kept": kept, "layers_and_heads": drawn.heads}, columns, drawn)


def merged(case: Case) -> View:
    """Vision tokens left after each stage of merging, and which patches were merged together."""
    vision = case.vision
    owner = analysis.merged_into(case.params, case.inputs, case.policy)
    counts = np.array([len(np.unique(stage[vision])) for stage in owner])
    stages, by_image = np.arange(1, len(owner) + 1), case.on_grid(owner)

    def draw(base: Image.Image | None, grid: np.ndarray) -> dict[str, np.ndarray]:
        base = base or Image.new("RGB", grid.shape[:0:-1], "white")
        drawn = [np.asarray(outlined(base, groups.astype(int))) for groups in grid]
        return {f"stage {i}: {n} tokens": x for i, n, x in zip(stages, counts, drawn, strict=True)}

    curve = Curves("vision tokens left", "stage", "tokens", stages, {"": counts})
    panels = [curve, *case.pictures("merged tokens", by_image, draw)]
    return View({"left": counts, "owner_by_image": by_image}, {"tokens": counts}, panels, rows="stage")


def cost(case: Case) -> View:
    """FLOPs and cache bytes of each layer with full attention, their ratio to the full cache's, and memory by kind."""
    decoder, prompt = full_attention(case.params.config.decoder), case.read(case.policy)
    cache = case.fill(prompt)
    itemsize = case.params.decoder.embedding.weight[...].dtype.itemsize

    def amounts(tokens: np.ndarray, entries: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "prefill_flops": analysis.prefill_flops(decoder, tokens),
            "decode_flops": analysis.decode_flops(decoder, np.ceil(entries).astype(int) + 1),
            "cache_bytes": analysis.cache_bytes(decoder, entries, itemsize),
        }

    tokens = np.asarray(analysis.reached(prompt))[0].sum(axis=1)
    costs = amounts(tokens, np.asarray(cache.counts)[:, 0].mean(axis=1))
    full = amounts(*[np.full_like(tokens, case.valid.sum())] * 2)
    total = {name: x.sum() for name, x in costs.items()}
    vision = analysis.cache_bytes(decoder, case.held(cache)[:, case.is_vision].sum(axis=1), itemsize)
    ratios = {name.replace("_", " ").replace("flops", "FLOPs"): costs[name] / full[name] for name in costs}
    memory = {  # LightKV, Fig. 1
        "weights": sum(leaf.nbytes for leaf in jax.tree.leaves(case.params)),
        "vision": vision.sum(),
        "text": total["cache_bytes"] - vision.sum(),
    }
    return View(
        {
            "tokens": tokens,
            **costs,
            "total": total,
            "memory": memory,
            "allocated_bytes": cache.bytes,  # includes capacity for new tokens, and quantisation by the policy
            "of_full": {name: total[name] / full[name].sum() for name in ("prefill_flops", "cache_bytes")},
        },
        {
            "tokens": tokens,
            "prefill GFLOPs": costs["prefill_flops"] / 1e9,
            "decode MFLOPs": costs["decode_flops"] / 1e6,
            "cache KiB": costs["cache_bytes"] / 1024,
            "of them vision": vision / 1024,
        },
        [by_layer("cost, as a share of the full cache's", "share", ratios)],
    )
