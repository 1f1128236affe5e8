"""What `vlkv inspect` can look at: each measure runs a model and returns arrays, a few columns, and panels to draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from vlkv import analysis, policies
from vlkv.cache import PackedCache
from vlkv.commands.plots import Curves, Maps, Panel
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.inputs import Inputs
from vlkv.policies import Policy
from vlkv.prefill import fill_cache
from vlkv.reading import Prompt, read_prompt
from vlkv.sampling import Greedy

TOP = (0.5, 0.3)  # shares of the image that A-VL's Figs. 4 and 5 compare
_PICTURES = 8
# The letters of A-VL's Figs. 9 and 10, the options of `policies.AVL` that they are, and the values tried.
SWEEPS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "S": ("keep", (0.2, 0.3, 0.4, 0.6, 0.8)),
    "C": ("core", (0.1, 0.2, 0.3, 0.4)),
    "K": ("refresh", (1, 2, 3, 5, 8)),
    "P": ("prefill", (0.5, 0.7, 0.9)),
    "T": ("text", (0.4, 0.6, 0.8)),
}
_SWEPT = ("agreement", "stored", "used")
_read_prompt = jax.jit(read_prompt)
_fill_cache = jax.jit(fill_cache, static_argnames="new_tokens")
_answer = jax.jit(analysis.answer_of)
_follow = jax.jit(analysis.follow)
_choose = jax.jit(analysis.choose)
_one_token_curve = jax.jit(analysis.one_token_curve)
_histograms = jax.jit(analysis.value_histograms)
_concordance_of = jax.jit(analysis.concordance, static_argnames="fraction")


class View(NamedTuple):
    """What was measured: everything for machines, a few columns to read, panels to look at."""

    arrays: dict[str, Any]
    columns: dict[str, np.ndarray]  # all of one length
    panels: list[Panel]


@dataclasses.dataclass(frozen=True)
class Case:
    """One question to one model, and the policy that is looked at."""

    params: Model
    inputs: Inputs
    policy: Policy
    key: jax.Array
    new_tokens: int
    ranks: int

    def read(self, policy: Policy | None = None) -> Prompt:
        """The prompt, shortened if the policy does that."""
        return _read_prompt(self.params, self.inputs, policy, key=self.key)

    def fill(self, prompt: Prompt, policy: Policy) -> PackedCache:
        """What a policy keeps of it."""
        return _fill_cache(prompt, policy, new_tokens=self.new_tokens, key=self.key)

    def answer(self, prompt: Prompt, cache: PackedCache) -> tuple[jax.Array, int]:
        """What the model says, padded with -1, and how many steps of decoding that takes."""
        tokens = _answer(self.params, cache, prompt.logits, sampling=Greedy(max_new_tokens=self.new_tokens))
        steps = int((np.asarray(tokens) >= 0).sum()) - 1
        if steps < 1:
            raise InputError("the answer is a single token, which needs no cache: ask for a longer one")
        return tokens, steps

    @property
    def vision(self) -> np.ndarray:
        """Which prompt tokens come from an image [T]; there must be some."""
        mask = np.asarray(self.inputs.is_vision & self.inputs.valid)[0]
        if not mask.any():
            raise InputError("the prompt has no vision tokens to look at: give --image")
        return mask


def _budgets(case: Case) -> View:
    prompt = case.read(case.policy)
    cache = case.fill(prompt, case.policy)
    entries = np.asarray(analysis.layer_budgets(cache))[0]
    tokens = int(case.inputs.valid.sum())
    is_vision = np.asarray(case.inputs.is_vision)[0]
    vision = np.asarray(analysis.held(cache, is_vision.size))[0][:, is_vision].sum(axis=1)
    layer = np.arange(len(entries))
    share = entries / tokens
    panel = Curves("budgets", "layer", "share of the prompt kept", layer, {"all": share})
    return View(
        {"entries": entries, "share": share, "vision": vision},
        {"layer": layer, "entries": entries, "of them vision": vision, "share": share}, [panel],
    )  # fmt: skip


def _lorenz(case: Case) -> View:
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
    curves = curve[:, :count]
    lines = {f"layer {i} ({g:.2f})": c for i, (g, c) in enumerate(zip(gini, curves, strict=True))}
    share = np.arange(1, count + 1) / count
    return View(
        {"lorenz": curves, "gini": gini, "budgets": budget, "retained": kept, "retained_by_equal_budgets": uniform},
        {"layer": layer, "Gini": gini, "budget": budget, "retained": kept, "with equal budgets": uniform},
        [
            Curves("Lorenz curves (Gini)", "share of the tokens", "share of the importance", share, lines),
            Curves("per layer", "layer", "", layer, {"Gini": gini, "retained": kept, "with equal budgets": uniform}),
        ],
    )


@jax.jit
def _concentration(importance: Any, inside: Any, *budgets: Any) -> tuple[jax.Array, ...]:
    curve = analysis.lorenz(importance, inside)
    return curve, analysis.gini(importance, inside), *(analysis.retained(curve, budget) for budget in budgets)


def _strength(case: Case) -> View:
    if not isinstance(case.policy, policies.AirCache):
        raise InputError(f"--what strength is AirCache's measure, --policy {type(case.policy).__name__} has none")
    if case.policy.scope != "vision":
        raise InputError("--what strength measures the image: give --scope vision")
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


def _divergence(case: Case) -> View:
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
    per_layer = np.asarray(analysis.jensen_shannon(*_histograms(*both, np.asarray(case.inputs.valid)[0])))
    layer = np.arange(layers)
    return View(
        {"budgets": budgets, "between_budgets": between, "self_and_cross": per_layer},
        {"layer": layer, **budgets, "self & cross attention": per_layer},
        [
            Curves("budgets", "layer", "entries", layer, budgets),
            Curves("self and cross attention", "layer", "Jensen-Shannon divergence", layer, {"": per_layer}),
        ],
    )


def _ranking(case: Case) -> View:
    prompt, count = case.read(), int(case.vision.sum())
    ranks = np.unique(np.rint(np.linspace(0, count, min(case.ranks, count) + 1)).astype(np.int32))
    cache = case.fill(prompt, policies.Full())
    answer, _ = case.answer(prompt, cache)
    scores = _choose(prompt, case.policy, key=case.key).scores
    curve = np.asarray(_one_token_curve(case.params, prompt, cache, scores, answer, ranks))[:, 0]
    panel = Curves(
        "one vision token at a time", "its rank (0: none)", "log-probability of the answer", ranks, {"": curve}
    )
    return View(
        {"ranks": ranks, "log_probability": curve}, {"rank": ranks, "log-probability of the answer": curve}, [panel]
    )


def _error(case: Case) -> View:
    prompt = case.read()
    cache = case.fill(prompt, policies.Full())
    answer, steps = case.answer(prompt, cache)
    own = case.read(case.policy)
    traces = [
        _follow(case.params, p, c, answer[:, :-1]) for p, c in ((prompt, cache), (own, case.fill(own, case.policy)))
    ]
    error = np.asarray(analysis.feature_error(*traces))[:steps, :, 0]
    mean, layer = error.mean(axis=0), np.arange(error.shape[1])
    agreement = float(analysis.agreement(traces[1].logits, answer)[0])
    panel = Curves("features, full cache against compressed", "layer", "mean absolute error", layer, {"": mean})
    return View(
        {"error": error, "mean": mean, "agreement": agreement}, {"layer": layer, "mean absolute error": mean}, [panel]
    )


def _attention(case: Case) -> View:
    prompt = case.read(case.policy)
    cache = case.fill(prompt, case.policy)
    answer, steps = case.answer(prompt, cache)
    trace = _follow(case.params, prompt, cache, answer[:, :-1])
    types = analysis.token_types(prompt.is_vision, prompt.valid)
    shares = np.asarray(analysis.shares_by_type(trace.mass, types))[:steps, :, 0]
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


def _concordance(case: Case) -> View:
    vision, prompt = case.vision, case.read(case.policy)
    cache = case.fill(prompt, case.policy)
    answer, steps = case.answer(prompt, cache)
    mass = np.asarray(_follow(case.params, prompt, cache, answer[:, :-1]).mass)[:steps, :, 0, : vision.size]
    mass = mass[..., vision]
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


def _survival(case: Case) -> View:
    vision, prompt = case.vision, case.read(case.policy)
    reached = np.asarray(analysis.reached(prompt))[0]
    held = np.asarray(analysis.held(case.fill(prompt, case.policy), vision.size))[0]
    counts = {"computed": reached[:, vision].sum(axis=1), "cached": held[:, vision].sum(axis=1)}
    grid = np.asarray(case.inputs.grid)[0]
    computed, cached = analysis.on_grid(reached, grid), analysis.on_grid(held, grid)
    layer = np.arange(len(held))
    shown = np.unique(np.linspace(0, len(held) - 1, _PICTURES).astype(int))
    maps = [
        Maps(f"image {i}: cached" if len(cached) > 1 else "cached", {f"layer {j}": x[j] for j in shown})
        for i, x in enumerate(cached)
    ]
    return View(
        {**counts, "computed_by_image": computed, "cached_by_image": cached},
        {"layer": layer, **counts},
        [Curves("vision tokens", "layer", "tokens", layer, counts), *maps],
    )


def _cost(case: Case) -> View:
    decoder, prompt = case.params.config.decoder, case.read(case.policy)
    cache = case.fill(prompt, case.policy)
    tokens = np.asarray(analysis.reached(prompt))[0].sum(axis=1)
    entries = np.asarray(cache.counts)[:, 0].mean(axis=1)
    itemsize = case.params.decoder.embedding.weight[...].dtype.itemsize
    whole = np.full_like(tokens, int(case.inputs.valid.sum()))
    prefill = analysis.prefill_flops(decoder, tokens)
    decode = analysis.decode_flops(decoder, np.ceil(entries).astype(int) + 1)
    size = analysis.cache_bytes(decoder, entries, itemsize)
    layer = np.arange(len(tokens))
    full = analysis.prefill_flops(decoder, whole), analysis.cache_bytes(decoder, whole, itemsize)
    ratios = {
        "prefill FLOPs": prefill / full[0],
        "decode FLOPs": decode / analysis.decode_flops(decoder, whole + 1),
        "cache bytes": size / full[1],
    }
    return View(
        {
            "tokens": tokens, "prefill_flops": prefill, "decode_flops": decode, "cache_bytes": size,
            "total": {"prefill_flops": prefill.sum(), "decode_flops": decode.sum(), "cache_bytes": size.sum()},
            "allocated_bytes": cache.bytes,  # with room for new tokens, and quantised where the policy does that
            "of_full": {
                "prefill_flops": prefill.sum() / full[0].sum(),
                "cache_bytes": size.sum() / full[1].sum(),
            },
        },
        {"layer": layer, "tokens": tokens, "prefill GFLOPs": prefill / 1e9, "decode MFLOPs": decode / 1e6,
         "cache KiB": size / 1024},
        [Curves("cost, as a share of the full cache's", "layer", "share", layer, ratios)],
    )  # fmt: skip


def _sweep(case: Case) -> View:
    if not isinstance(case.policy, policies.AVL):
        raise InputError(f"--what sweep varies A-VL's S, C, K, P and T, --policy {type(case.policy).__name__} has none")
    if case.policy.budget is not None:
        raise InputError("--what sweep varies S, a fraction: give --keep, not --budget")
    arrays: dict[str, Any] = {}
    columns: list[tuple[Any, ...]] = []
    panels: list[Panel] = []
    for letter, (option, values) in SWEEPS.items():
        plan = [_varied(case.policy, option, value) for value in values]
        swept = analysis.sweep(case.params, case.inputs, plan, new_tokens=case.new_tokens, key=case.key)
        lines = {name: np.asarray(x)[:, 0] for name, x in zip(_SWEPT, swept, strict=True)}
        arrays[letter] = {"option": option, "values": list(values), **lines}
        columns += [(letter, value, *(line[i] for line in lines.values())) for i, value in enumerate(values)]
        panels.append(Curves(f"{letter} ({option})", option, "share", np.array(values), lines))
    names = ("parameter", "value", *_SWEPT)
    return View(arrays, {name: np.array(x) for name, x in zip(names, zip(*columns, strict=True), strict=True)}, panels)


def _varied(policy: policies.AVL, option: str, value: Any) -> policies.AVL:
    """With another value, and what would contradict it brought along: C <= S <= P."""
    changed = {"keep": policy.keep, "core": policy.core, "prefill": policy.prefill, option: value}
    if option != "core" and changed["core"] is not None:
        changed["core"] = min(changed["core"], changed["keep"])
    if option == "core":
        changed["keep"] = max(changed["keep"], value)
    if changed["prefill"] is not None:
        changed["prefill"] = max(changed["prefill"], changed["keep"])
    return dataclasses.replace(policy, **changed)


class Measure(NamedTuple):
    """One thing to look at, the figures it stands for, and the policy that they show."""

    view: Callable[[Case], View]
    source: str
    policy: str
    keep: float | None


WHAT = {
    "budgets": Measure(_budgets, "PrefixKV, Fig. 4", "PrefixKV", 0.5),
    "lorenz": Measure(_lorenz, "PrefixKV, Figs. 2, 4", "PrefixKV", 0.5),
    "strength": Measure(_strength, "AirCache, Fig. 3", "AirCache", 0.1),
    "divergence": Measure(_divergence, "AirCache, Table 13; CSP, Figs. 1, 7", "AirCache", 0.1),
    "ranking": Measure(_ranking, "AirCache, Figs. 3(b), 4, 5", "AirCache", 0.1),
    "error": Measure(_error, "PrefixKV, Fig. 5", "PrefixKV", 0.5),
    "attention": Measure(_attention, "A-VL, Fig. 1", "Full", None),
    "concordance": Measure(_concordance, "A-VL, Figs. 4, 5", "Full", None),
    "survival": Measure(_survival, "LightKV, Fig. 7", "FastV", 0.5),
    "cost": Measure(_cost, "LightKV, Tables 1, 6", "FastV", 0.5),
    "sweep": Measure(_sweep, "A-VL, Figs. 9, 10", "AVL", 0.45),
}
