"""Measurements on SmolLM2-135M-Instruct in float32: 100 passages of Python's language reference.

The prompt has 512 tokens, the next 32 are the answer. Measured are attention, budgets, features and log-probability.

Axes: B passages of a batch · S answer tokens · L layers · T prompt tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vlkv
from benchmarks.findings.table import Series, declared
from benchmarks.real import folders
from vlkv import analysis, policies
from vlkv.analysis import profiles
from vlkv.compression.sizes import budget_of
from vlkv.generation import jitted
from vlkv.inputs import Inputs

PASSAGES, BATCH, PROMPT, ANSWER = 100, 10, 512, 32
_EXTRA = 20  # passages after those that are measured, for offline profiles
_SINKS, _RECENT = 4, 64  # first tokens, which get attention in any text, and the end of the prompt


def passages(processor: Any) -> np.ndarray:
    """Passages of the language reference of Python, with its code, in its order."""
    from pydoc_data.topics import topics  # (large)

    ids = processor.encode("\n\n".join(topics[name] for name in sorted(topics)), begin=False)
    size = PROMPT + ANSWER
    return np.asarray(ids[: (PASSAGES + _EXTRA) * size], np.int32).reshape(-1, size)


def reference(series: Series) -> None:
    """Measures what is missing of the passages: first caches, then attention and budgets."""
    vlkv.keep_programs()
    params, processor = vlkv.load(folders.written(), dtype="float32")
    rows = passages(processor)
    half, fifth = declared()["reference"]["half"], declared()["reference"]["fifth"]
    plan = {f"{name} 0.5": (text, 0.5) for name, text in half.items()}
    plan |= {f"{name} 0.2": (text, 0.2) for name, text in (half | fifth).items() if name != "full"}
    plan |= {f"offline {n} 0.2": (_offline(series, params, rows, n), 0.2) for n in (1, 10)}
    plan["last row 0.3"] = ("tova(keep=0.3,recent=1,evict=False)", 0.3)
    for start in series.todo(f"reference/nats, {[*plan][-1]}", PASSAGES, BATCH):
        _, prompt, targets = _read(params, rows[start : start + BATCH])
        full = _trace(params, prompt, _cache(prompt, "full", 1.0), targets)
        for name, (text, keep) in plan.items():
            if not series.holds(f"reference/nats, {name}", start):
                trace = full if text == "full" else _trace(params, prompt, _cache(prompt, text, keep), targets)
                measured = {f"{what}, {name}": values for what, values in _compared(full, trace, targets).items()}
                series.add("reference", measured, start)
    for start in series.todo("reference/gini", PASSAGES, BATCH):
        inputs, prompt, targets = _read(params, rows[start : start + BATCH])
        mass = _trace(params, prompt, _cache(prompt, "full", 1.0), targets).mass
        curves = jax.jit(profiles.curves)(params, inputs, policies.PrefixKV(keep=0.5))
        measured = _attention(np.asarray(mass, np.float64)) | _budgets(np.asarray(curves, np.float64))
        series.add("reference", measured, start)


def _read(params: Any, rows: np.ndarray) -> tuple[Inputs, Any, Any]:
    """The inputs, the prompt and the answers of passages."""
    inputs = _inputs(rows[:, :PROMPT], params)
    return inputs, jitted.read_prompt(params, inputs, new_tokens=ANSWER), jnp.asarray(rows[:, PROMPT:])


def _inputs(ids: np.ndarray, params: Any) -> Inputs:
    return Inputs.from_hf({"input_ids": ids, "attention_mask": np.ones_like(ids)}, params.config)


def _offline(series: Series, params: Any, rows: np.ndarray, count: int) -> str:
    """PrefixKV with budgets from other passages."""
    if not series.holds(f"profile/{count}", 0):
        samples = [_inputs(rows[PASSAGES : PASSAGES + count, :PROMPT], params)]
        shares = profiles.aggregate(profiles.measure(params, samples, policies.PrefixKV(keep=0.2)))
        series.add("profile", {f"{count}": shares}, 0)
    shares = series.content["series"][f"profile/{count}"]
    return f"prefixkv(keep=0.2,profile=({','.join(map(str, shares))}))"


def _cache(prompt: Any, text: str, keep: float) -> Any:
    """The cache of a policy; its program is that of the largest keep."""
    policy = policies.make(text)
    if policy.keep in (None, 1.0, keep):
        return jitted.fill_cache_with(prompt, policy, None, new_tokens=ANSWER)
    smaller = policies.make(text.replace(f"keep={policy.keep}", f"keep={keep}"))
    table = budget_of(smaller, layers=len(prompt.layers), most=prompt.valid.shape[1], text=prompt.bounds.text)
    return jitted.fill_cache_with(prompt, policy, table, new_tokens=ANSWER)


@jax.jit
def _trace(params: Any, prompt: Any, cache: Any, targets: Any) -> analysis.Trace:
    return analysis.follow(params, prompt, cache, targets[:, :-1])


@jax.jit
def _compared(full: analysis.Trace, trace: analysis.Trace, targets: Any) -> dict[str, Any]:
    """Nats per token, the error of features relative to their size by layer, and whether three tokens are equal."""
    best = [jnp.argmax(x.logits[:2], axis=-1) for x in (full, trace)]  # tokens 2 and 3; the first is that of prefill
    size = jnp.mean(jnp.abs(full.hidden), axis=(0, 3))
    return {
        "nats": -analysis.log_probability(trace.logits, targets),
        "error": jnp.mean(jnp.abs(full.hidden - trace.hidden), axis=(0, 3)).T / size.T,
        "same": jnp.all(best[0] == best[1], axis=0),
    }


def _attention(mass: np.ndarray) -> dict[str, np.ndarray]:
    """What A-VL measures of attention scores (Eq. 1), [S, L, B, E]."""
    prompt = mass[..., _SINKS:PROMPT].swapaxes(1, 2)  # [S, B, L, T]
    inside = np.ones(prompt.shape[-1], bool)

    def common(a: np.ndarray, b: np.ndarray, share: float) -> np.ndarray:
        return np.asarray(analysis.concordance(a, np.broadcast_to(b, a.shape), inside, share))

    remote, recent = prompt[..., :-_RECENT].mean(axis=(2, 3)), prompt[..., -_RECENT:].mean(axis=(2, 3))
    return {
        "tokens with 80%": tokens_with(prompt).mean(axis=0),  # [B, L]
        "layers 50%": common(prompt[0], prompt[0][:, :1], 0.5),  # [B, L]
        "first three and last 50%": np.mean([common(prompt[0][:, i], prompt[0][:, -1], 0.5) for i in range(3)], axis=0),
        **{f"steps {share:.0%}": common(prompt, prompt[:1], share).mean(axis=2).T for share in (0.5, 0.3)},  # [B, S]
        "remote": (remote / remote[:1]).T,  # [B, S], relative to the first step
        "recent": (recent / recent[:1]).T,
    }


def tokens_with(mass: np.ndarray, share: float = 0.8) -> np.ndarray:
    """The smallest share of the tokens (last axis) that receives this share of the attention to them."""
    ordered = -np.sort(-mass, axis=-1)
    fewer = np.cumsum(ordered, axis=-1) < share * ordered.sum(axis=-1, keepdims=True)
    return (fewer.sum(axis=-1) + 1) / mass.shape[-1]


def _budgets(curves: np.ndarray) -> dict[str, Any]:
    """Gini coefficients, and PrefixKV's budgets by its printed search."""
    gini = 2 * (curves.sum(axis=-1) - 0.5) / curves.shape[-1] - 1
    shares = {keep: np.stack([profiles.search(row, keep)[0] for row in curves]) for keep in (0.5, 0.2)}
    steps = [[profiles.search(row, 0.5, tolerance=d)[1] for d in (0.0125, 0.1)] for row in curves]
    early = [profiles.search(row, 0.5, steps=7)[0] for row in curves]
    ranks = [[np.argsort(np.argsort(x)) for x in pair] for pair in zip(gini, shares[0.5], strict=True)]
    return {
        "gini": gini,
        **{f"shares {keep}": share for keep, share in shares.items()},
        "steps": steps,
        "shares after 7 steps": np.abs(early - shares[0.5]).mean(axis=1),
        "gini and share": [np.asarray(np.corrcoef(np.array(pair, float)))[0, 1] for pair in ranks],
    }
