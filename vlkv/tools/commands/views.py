"""The measurements of `vlkv inspect`: each runs a model and returns arrays, table columns, and panels to draw."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from PIL import Image

from vlkv import analysis, policies
from vlkv.analysis.drawing import fitted, outlined, overlaid
from vlkv.cache.pool import PackedCache
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.nan import check_values
from vlkv.generation.prompt import Prompt
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.policies import Policy
from vlkv.tools.commands.plots import Curves, Maps, Panel

TOP = (0.5, 0.3)  # shares of the vision tokens whose overlap A-VL's Figs. 4 and 5 show
_PICTURES = 8  # most layers drawn as maps
_SHARES = np.linspace(0, 1, 101)  # x axis of Lorenz curves: share of the tokens
_WEIGHTS = np.linspace(-7, 0.5, 151)  # x axis of densities: log10 of a token's attention
WINDOWS: tuple[Literal["elite", "text", "recent", "vision"], ...] = ("elite", "text", "recent", "vision")
_ROWS = 16  # size of the windows "recent" and "vision" in AirCache's Fig. 1
_MOST = 0.8  # A-VL's sparsity: share of the tokens that hold this share of the attention
_OBSERVERS = 64  # most observers of a window that are drawn and compared
# Parameters of A-VL's Figs. 9 and 10: the option of `policies.AVL` for each letter, and the values to try.
SWEEPS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "S": ("keep", (0.2, 0.3, 0.4, 0.6, 0.8)),
    "C": ("core", (0.1, 0.2, 0.3, 0.4)),
    "K": ("refresh", (1, 2, 3, 5, 8)),
    "P": ("prefill", (0.5, 0.7, 0.9)),
    "T": ("text", (0.4, 0.6, 0.8)),
}
_SWEPT = ("agreement", "stored", "used")
_answer = jax.jit(analysis.answer_of)
_follow = jax.jit(analysis.follow)
_choose = jax.jit(analysis.choose)
_one_token_curve = jax.jit(analysis.one_token_curve)
_histograms = jax.jit(analysis.value_histograms)
_concordance_of = jax.jit(analysis.concordance, static_argnames="fraction")


class View(NamedTuple):
    """The result of a measurement: all arrays (for JSON), columns of the printed table, and panels of the picture."""

    arrays: dict[str, Any]
    columns: dict[str, np.ndarray]  # all of one length
    panels: list[Panel]


@dataclasses.dataclass(frozen=True)
class Case:
    """One question to one model, and the policy to measure."""

    params: Model
    inputs: Inputs
    policy: Policy
    key: jax.Array
    new_tokens: int
    ranks: int
    images: tuple[Image.Image, ...] = ()  # drawn under maps
    say: Callable[[str], None] = print  # reports progress

    def read(self, policy: Policy | None = None) -> Prompt:
        """Prefill of the prompt, reduced by the policy if it reduces prompts."""
        prompt: Prompt = jitted.read_prompt(self.params, self.inputs, policy, new_tokens=self.new_tokens, key=self.key)
        check_values(self.params, self.inputs, prompt.logits)
        return prompt

    def fill(self, prompt: Prompt, policy: Policy) -> PackedCache:
        """The compressed cache of a prompt."""
        return jitted.fill_cache_with(prompt, policy, None, new_tokens=self.new_tokens, key=self.key)

    def answer(self, prompt: Prompt, cache: PackedCache) -> tuple[jax.Array, int]:
        """The greedy answer [1, S], padded with -1, and its number of decoding steps."""
        tokens = _answer(self.params, cache, prompt.logits, sampling=Greedy(max_new_tokens=self.new_tokens))
        steps = int((np.asarray(tokens) >= 0).sum()) - 1
        if steps < 1:
            raise InputError("the answer is a single token, which needs no decoding: ask for a longer answer")
        return tokens, steps

    def trace(self) -> tuple[Prompt, jax.Array, int]:
        """Answers with the policy: the prompt, the attention to each token [S, L, B, E], and the number of steps."""
        prompt = self.read(self.policy)
        cache = self.fill(prompt, self.policy)
        answer, steps = self.answer(prompt, cache)
        return prompt, _follow(self.params, prompt, cache, answer[:, :-1]).mass, steps

    def maps(self, title: str, values: np.ndarray) -> list[Panel]:
        """Maps of values [L, T] between 0 and 1 for at most `_PICTURES` layers; drawn over the images if known."""
        layers = np.unique(np.linspace(0, len(values) - 1, _PICTURES).astype(int))
        grids = analysis.on_grid(values, np.asarray(self.inputs.grid)[0])
        panels: list[Panel] = []
        for i, grid in enumerate(grids):
            shown = {f"layer {j}": grid[j] for j in layers}
            if len(self.images) == len(grids):
                base = fitted(self.images[i], grid.shape[1:], "crop")
                base = base.resize((grid.shape[2] * 16, grid.shape[1] * 16), Image.Resampling.NEAREST)
                shown = {name: np.asarray(overlaid(base, x)) for name, x in shown.items()}
            panels.append(Maps(f"{title}, image {i}" if len(grids) > 1 else title, shown))
        return panels

    @property
    def vision(self) -> np.ndarray:
        """Mask [T] of the vision tokens; raises InputError if there are none."""
        mask = np.asarray(self.inputs.is_vision & self.inputs.valid)[0]
        if not mask.any():
            raise InputError("the prompt has no vision tokens: give --image")
        return mask


def _budgets(case: Case) -> View:
    """Entries that each layer keeps."""
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


def _strength(case: Case) -> View:
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


def _divergence(case: Case) -> View:
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
    """Log-probability of the answer with a single vision token, by the rank of that token."""
    prompt, count = case.read(), int(case.vision.sum())
    ranks = np.unique(np.rint(np.linspace(0, count, min(case.ranks, count) + 1)).astype(np.int32))
    cache = case.fill(prompt, policies.Full())
    answer, _ = case.answer(prompt, cache)
    scores = _choose(prompt, case.policy, key=case.key).scores
    curve = np.asarray(_one_token_curve(case.params, prompt, cache, scores, answer, ranks))[:, 0]
    panel = Curves(
        "with one vision token", "rank of the token (0: none)", "log-probability of the answer", ranks, {"": curve}
    )
    return View(
        {"ranks": ranks, "log_probability": curve}, {"rank": ranks, "log-probability of the answer": curve}, [panel]
    )


def _error(case: Case) -> View:
    """Difference between the features with the full and with the compressed cache, while decoding the same answer."""
    prompt = case.read()
    cache = case.fill(prompt, policies.Full())
    answer, steps = case.answer(prompt, cache)
    reduced = case.read(case.policy)
    traces = [
        _follow(case.params, p, c, answer[:, :-1])
        for p, c in ((prompt, cache), (reduced, case.fill(reduced, case.policy)))
    ]
    error = np.asarray(analysis.feature_error(*traces))[:steps, :, 0]
    mean, layer = error.mean(axis=0), np.arange(error.shape[1])
    agreement = float(analysis.agreement(traces[1].logits, answer)[0])
    panel = Curves("features, full cache against compressed", "layer", "mean absolute error", layer, {"": mean})
    return View(
        {"error": error, "mean": mean, "agreement": agreement}, {"layer": layer, "mean absolute error": mean}, [panel]
    )


def _attention(case: Case) -> View:
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


def _concordance(case: Case) -> View:
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


def _survival(case: Case) -> View:
    """Vision tokens that each layer computes, and those that it caches."""
    vision, prompt = case.vision, case.read(case.policy)
    reached = np.asarray(analysis.reached(prompt))[0]
    held = np.asarray(analysis.held(case.fill(prompt, case.policy), vision.size))[0]
    counts = {"computed": reached[:, vision].sum(axis=1), "cached": held[:, vision].sum(axis=1)}
    grid = np.asarray(case.inputs.grid)[0]
    layer = np.arange(len(held))
    return View(
        {
            **counts,
            "computed_by_image": analysis.on_grid(reached, grid),
            "cached_by_image": analysis.on_grid(held, grid),
        },
        {"layer": layer, **counts},
        [
            Curves("vision tokens", "layer", "tokens", layer, counts),
            *case.maps("cached (share of heads)", held),
        ],
    )


def _merged(case: Case) -> View:
    """Vision tokens left after each stage of merging, and which patches were merged together."""
    vision = case.vision
    owner = analysis.merged_into(case.params, case.inputs, case.policy)
    grid = np.asarray(case.inputs.grid)[0]
    by_image = analysis.on_grid(owner, grid)
    left = np.array([len(np.unique(one[vision])) for one in owner])
    stage = np.arange(1, len(owner) + 1)
    panels: list[Panel] = [Curves("vision tokens left", "stage", "tokens", stage, {"": left})]
    for i, numbers in enumerate(by_image):
        if len(case.images) == len(by_image):
            base = fitted(case.images[i], numbers.shape[1:], "crop")
        else:
            base = Image.new("RGB", numbers.shape[:0:-1], "white")
        drawn = {f"stage {s}: {n} tokens": np.asarray(outlined(base, x.astype(int)))
                 for s, n, x in zip(stage, left, numbers, strict=True)}  # fmt: skip
        panels.append(Maps(f"merged tokens, image {i}" if len(by_image) > 1 else "merged tokens", drawn))
    return View({"left": left, "owner_by_image": by_image}, {"stage": stage, "tokens": left}, panels)


def _observers(case: Case) -> View:
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
            rows = np.asarray(analysis.observer_attention(layer.q[0], layer.k[0], layer.valid[0], places, vision))
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


def _patches(case: Case) -> View:
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


def _densities(case: Case) -> View:
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


def _cost(case: Case) -> View:
    """FLOPs and cache bytes of each layer, and their ratio to the full cache's."""
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
            "allocated_bytes": cache.bytes,  # includes capacity for new tokens, and quantisation by the policy
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
    for letter, (option, values) in SWEEPS.items():
        plan = [_varied(case.policy, option, value) for value in values]
        swept = analysis.sweep(case.params, case.inputs, plan, new_tokens=case.new_tokens, key=case.key)
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


class Measure(NamedTuple):
    """A measurement, the figures that it repeats, and the policy and keep that they use."""

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
    "observers": Measure(_observers, "AirCache, Fig. 1", "AirCache", 0.1),
    "patches": Measure(_patches, "A-VL, Fig. 3", "Full", None),
    "densities": Measure(_densities, "CSP, Fig. 6", "CSP", 0.2),
    "merged": Measure(_merged, "LightKV, Fig. 7", "LightKV", None),
    "survival": Measure(_survival, "LightKV, Fig. 7", "FastV", 0.5),
    "cost": Measure(_cost, "LightKV, Tables 1, 6", "FastV", 0.5),
    "sweep": Measure(_sweep, "A-VL, Figs. 9, 10", "AVL", 0.45),
}
