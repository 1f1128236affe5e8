"""Offline profiles of PrefixKV: the share of tokens that each layer keeps, measured on a few samples and then fixed.

Measure a profile, save it, and give it to the policy, which then needs no search during prefill:

    policy = PrefixKV(keep=0.2)
    ratios = profiles.measure(params, samples, policy)
    profiles.save("profile.json", {policy: ratios}, params.config, name="llava-1.5-7b")
    policy = PrefixKV(keep=0.2, profile=profiles.load("profile.json", params.config, keep=0.2))

A profile is for one `keep`; a file may contain several. PrefixKV's Tables 5 to 11 study how reliable profiles are, and
`vlkv profile` makes what they need: profiles of n samples (Table 5) and of other samples (Tables 8 and 9), deviations
(Table 7, `spread` and `distance`), and profiles by a search that ends early (Tables 10 and 11, `searched`).

Axes: S samples · L layers · B rows of a batch · T tokens. Numbers are float64 on the host.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.compression.candidates import observation
from vlkv.compression.filling import Prompt
from vlkv.compression.observe import Layer, Observation
from vlkv.compression.option_types import Scope
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.files import read_text, write_json
from vlkv.generation.nan import check_values
from vlkv.generation.prefill import fill_cache
from vlkv.generation.prompt import read_prompt
from vlkv.inputs import Inputs
from vlkv.policies import CSP, Policy, PrefixKV, text_of
from vlkv.policies.csp import region_share


def measure(params: Model, samples: Iterable[Inputs | Mapping[str, Any]], policy: Policy) -> Float[np.ndarray, "S L"]:
    """The share of tokens in scope that each layer keeps of each sample, averaged over key heads.

    Args:
        params: the model.
        samples: from the processor of vlkv or of transformers; every row of a batch is one sample.
        policy: a PrefixKV without a profile, or another policy with budgets that depend on the sample.

    Raises:
        InputError: no samples, a sample without tokens in scope, a policy with a profile, or NaN logits.
    """
    ratios: list[np.ndarray] = []
    for inputs, count in _in_scope(params, samples, policy):
        always = np.asarray(inputs.valid).sum(axis=1) - count
        counts, logits = _kept(params, inputs, policy)
        check_values(params, inputs, logits)
        kept = np.asarray(counts, np.float64).mean(axis=2)  # [L, B]
        ratios.extend(((kept - always) / count).T)
    return np.stack(ratios)


def _in_scope(
    params: Model, samples: Iterable[Inputs | Mapping[str, Any]], policy: Policy
) -> Iterator[tuple[Inputs, Int[np.ndarray, " B"]]]:
    """The inputs of each sample, and how many tokens of each row are in scope."""
    if getattr(policy, "profile", None) is not None:
        raise InputError("to measure a profile, give PrefixKV no profile=")
    rows = 0
    for inputs in (Inputs.of(sample, params.config) for sample in samples):
        in_scope = inputs.valid & inputs.is_vision if policy.scope == "vision" else inputs.valid
        count = np.asarray(in_scope).sum(axis=1)
        if not count.all():
            raise InputError(f"sample {rows + int(count.argmin())} has no tokens in scope: it has no image")
        rows += len(count)
        yield inputs, count
    if not rows:
        raise InputError("a profile needs at least one sample")


@jax.jit
def _kept(params: Model, inputs: Inputs, policy: Policy) -> tuple[Int[Array, "L B K"], Float[Array, "B vocab"]]:
    prompt = read_prompt(params, inputs, policy)
    return fill_cache(prompt, policy, new_tokens=1).counts, prompt.logits


def aggregate(ratios: Float[np.ndarray, "S L"]) -> Float[np.ndarray, " L"]:
    """The profile: the mean over the samples."""
    return ratios.mean(axis=0)


def spread(ratios: Float[np.ndarray, "S L"]) -> Float[np.ndarray, " L"]:
    """Standard deviation over the samples; its mean over the layers is "std" in PrefixKV's Table 7."""
    return ratios.std(axis=0)


def distance(ratios: Float[np.ndarray, "S L"], profile: Float[np.ndarray, " L"]) -> Float[np.ndarray, " L"]:
    """Mean absolute difference between samples and profile; its mean over the layers is "mad" in PrefixKV's Table 7."""
    return np.abs(ratios - profile).mean(axis=0)


def curves(params: Model, inputs: Inputs | Mapping[str, Any], policy: PrefixKV) -> Float[Array, "B L T"]:
    """P_l(o), the share of importance of a layer's o best tokens; +inf beyond the tokens in scope. Jittable."""
    prompt = read_prompt(params, inputs, policy)
    return _observed(prompt, policy, lambda obs: policy.statistics(obs, policy.score(obs))["cumulative"])


def _observed(prompt: Prompt, policy: Policy, measure: Callable[[Observation], Array]) -> Float[Array, "B L ..."]:
    """`measure` of the policy's observation of each row and layer."""

    def of_layer(number: int, layer: Layer) -> Array:
        return jax.vmap(lambda row: measure(observation(policy, row, number, layers=len(prompt.layers))))(layer)

    return jnp.stack([of_layer(number, layer) for number, layer in enumerate(prompt.layers)], axis=1)


_curves = jax.jit(curves)


def search(
    cumulative: Float[np.ndarray, "L T"], keep: float, *, tolerance: float = 0.0, steps: int = 64
) -> tuple[Float[np.ndarray, " L"], int]:
    """PrefixKV's Algorithm 1 as printed, with a limit on its steps; the result is scaled to the budget (Tables 10, 11).

    Args:
        cumulative: of one sample, a row of `curves`.
        keep: r, the share of all tokens that is kept.
        tolerance: the search ends when |sum R_l - r L| is at most this, where R_l are the shares of layers.
        steps: limit on the bisections of [0, 1].

    Returns:
        R_l, which sum to r L (except that each is at most 1), and the number of steps.
    """
    count = np.isfinite(cumulative).sum(axis=1)
    low, high, goal = 0.0, 1.0, keep * len(cumulative)
    taken, ratios = 0, np.ones(len(cumulative))
    while taken < steps:
        taken += 1
        p = (low + high) / 2
        ratios = np.minimum((cumulative < p).sum(axis=1) + 1, count) / count
        delta = ratios.sum() - goal
        if abs(delta) <= tolerance:
            break
        low, high = (p, high) if delta < 0 else (low, p)
    return np.minimum(ratios * (goal / ratios.sum()), 1.0), taken


def searched(
    params: Model,
    samples: Iterable[Inputs | Mapping[str, Any]],
    policy: PrefixKV,
    *,
    tolerance: float = 0.0,
    steps: int = 64,
) -> tuple[Float[np.ndarray, "S L"], Int[np.ndarray, " S"]]:
    """The shares that `search` finds for each sample, and its steps. Arguments and errors are those of `measure`.

    The exact search of the policy, which `measure` uses, takes no steps.
    """
    results = [
        search(cumulative, policy.keep or 1.0, tolerance=tolerance, steps=steps)
        for inputs, _ in _in_scope(params, samples, policy)
        for cumulative in np.asarray(_curves(params, inputs, policy), np.float64)
    ]
    ratios, taken = zip(*results, strict=True)
    return np.stack(ratios), np.array(taken)


def cross_share(params: Model, samples: Iterable[Inputs | Mapping[str, Any]], policy: CSP) -> float:
    """The mean share of cross attention in both regions, over samples, layers and heads (CSP, Sec. 4.3).

    This is the paper's calibrated value for the option `c` of CSP; `c="auto"` uses the share of each layer and head.
    The policy's window and n-softmax are used; its `c` has no effect.

    Raises:
        InputError: no samples.
    """
    batches = (Inputs.of(sample, params.config) for sample in samples)
    shares = [np.asarray(_cross_share(params, inputs, policy), np.float64) for inputs in batches]
    if not shares:
        raise InputError("a calibrated share needs at least one sample")
    return float(np.concatenate(shares).mean())


@jax.jit
def _cross_share(params: Model, inputs: Inputs, policy: CSP) -> Float[Array, "B L K"]:
    def share(obs: Observation) -> Float[Array, " K"]:
        return region_share(*(jnp.where(obs.valid, x, 0.0) for x in policy.regions_of(obs)))

    return _observed(read_prompt(params, inputs), policy, share)


def fingerprint(config: ModelConfig) -> dict[str, Any]:
    """Properties of the model that must be the same when a profile is used."""
    decoder = config.decoder
    return {
        "family": config.family,
        "layers": decoder.full_layers,
        "heads": decoder.heads,
        "key heads": decoder.kv_heads,
        "width": decoder.width,
        "vocabulary": decoder.vocab_size,
    }


def save(
    path: str | os.PathLike[str],
    measured: Mapping[Policy, Float[np.ndarray, "S L"]],
    config: ModelConfig,
    *,
    name: str,
) -> dict[str, Any]:
    """Writes the ratios from `measure` of policies that differ in `keep` or `scope` as JSON, and returns the content.

    Args:
        path: the file; an existing one is replaced.
        measured: the ratios of each policy.
        config: of the model (`params.config`).
        name: name of the model, for readers of the file.
    """
    profiles = [
        {
            "policy": text_of(policy),
            "keep": policy.keep,
            "scope": policy.scope,
            "samples": len(ratios),
            "shares": aggregate(ratios).tolist(),
            "spread": spread(ratios).tolist(),
        }
        for policy, ratios in measured.items()
    ]
    content = {"model": {"name": name, **fingerprint(config)}, "aggregation": "mean", "profiles": profiles}
    write_json(Path(path), content)
    return content


def load(
    path: str | os.PathLike[str], config: ModelConfig, *, keep: float | None, scope: Scope = "all"
) -> tuple[float, ...]:
    """The shares for one keep in a file, for `PrefixKV(profile=...)`.

    Args:
        path: written by `save` or `vlkv profile`.
        config: of the model that will use the profile (`params.config`).
        keep: of the policy that will use it; None: it has a budget, and the file must have one profile.
        scope: of the policy that will use it.

    Raises:
        InputError: no such file, not a profile, or measured on a model of another shape, with another keep or with
            another scope.
    """
    path = Path(path)
    text = read_text(path)
    if text is None:
        raise InputError(f"{path}: no such profile; `vlkv profile` makes one")
    try:
        content = json.loads(text)
        model = dict(content["model"])
        profiles = [(each["keep"], each["scope"], list(each["shares"])) for each in content["profiles"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(f"{path}: not a profile; make it again with `vlkv profile`") from None
    for field, ours in fingerprint(config).items():
        if model.get(field) != ours:
            raise InputError(
                f"{path}: measured on {model.get('name')!r}, another model: {field} {model.get(field)!r}, "
                f"here {ours!r}; make one for this model with `vlkv profile`"
            )
    in_scope = [(measured, shares) for measured, scoped, shares in profiles if scoped == scope]
    if not in_scope:
        other = profiles[0][1] if profiles else "none"
        raise InputError(f'{path}: measured with scope="{other}", but the policy has scope="{scope}"')
    only = keep is None and len(in_scope) == 1
    shares = next((shares for measured, shares in in_scope if measured == keep or only), None)
    if shares is None:
        has = ", ".join(str(measured) for measured, _ in in_scope)
        raise InputError(f"{path}: measured with keep={has}, but the policy has keep={keep}; measure that one too")
    layers = config.decoder.full_layers
    if len(shares) != layers or not all(isinstance(x, float | int) and 0 < x <= 1 for x in shares):
        raise InputError(f"{path}: shares must be {layers} fractions in (0, 1]; make it again with `vlkv profile`")
    return tuple(float(x) for x in shares)
