"""Measurements on ledger pages with the demo model: the variants of the papers' ablations, and attention to the image.

    answers     200 questions, the same as those of the section "methods" of `benchmarks.quality`
    images      100 of these pages: attention, AirCache's observers and CSP's lists

Axes: B pages of a batch · S answer tokens · L layers · T prompt tokens.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

import vlkv
from benchmarks import quality
from benchmarks.findings.table import Series, declared
from benchmarks.findings.text import tokens_with
from benchmarks.quality_sections import Section
from vlkv import analysis, policies
from vlkv.compression.slots import slots_of
from vlkv.generation import jitted
from vlkv.mini import CHECKPOINT
from vlkv.tools.evaluation import dialogue

ANSWERS, HALF = 200, 100  # questions, and those of a batch
PAGES, BATCH = 100, 25
_ANSWER = 8  # new tokens
_GREEDY = vlkv.Greedy(max_new_tokens=_ANSWER)
WINDOWS = ("elite", "text", "recent", "vision")


def answers(series: Series) -> None:
    """Answers what is missing; one prefill serves all variants that do not change it."""
    params, processor = _load()
    asked = list(_batches(processor, ANSWERS, HALF))
    read = [functools.cache(functools.partial(jitted.read_prompt, params, inputs)) for inputs, _ in asked]
    for name, text in declared()["answers"].items():
        policy = policies.make(text)
        for start in series.todo(f"answers/{name}", ANSWERS, HALF):
            prompt = read[start // HALF](slots_of(policy).reduce, new_tokens=_ANSWER)
            cache = jitted.fill_cache_with(prompt, policy, None, new_tokens=_ANSWER)
            said = processor.decode(*jitted.decode(params, cache, prompt.logits, sampling=_GREEDY))
            wanted = [record.turns[0].answers[0] for record in asked[start // HALF][1]]
            series.add("answers", {name: [a.strip() == b for a, b in zip(said, wanted, strict=True)]}, start)


def images(series: Series) -> None:
    params, processor = _load()
    batches = list(_batches(processor, PAGES, BATCH))
    for start in series.todo("images/saved", PAGES, BATCH):
        inputs, _ = batches[start // BATCH]
        prompt = jitted.read_prompt(params, inputs, new_tokens=_ANSWER)
        series.add("images", {**_attention(params, inputs, prompt), **_statistics(prompt)}, start)


def _load() -> tuple[Any, Any]:
    vlkv.keep_programs()
    return vlkv.load(CHECKPOINT)


def _batches(processor: Any, count: int, size: int) -> Iterator[tuple[Any, list[Any]]]:
    """Inputs and records of the questions of `benchmarks.quality`."""
    with TemporaryDirectory() as folder:
        asked = quality.questions(Section("findings", "ledger", ()), count, quality.EVALUATED, Path(folder))
        for start in range(0, count, size):
            records = [question.record for question in asked[start : start + size]]
            groups = [[record] for record in records]
            yield dialogue.first_inputs(processor, groups, query_agnostic=False, frames=1)[0], records


def _attention(params: Any, inputs: Any, prompt: Any) -> dict[str, np.ndarray]:
    """What A-VL measures while the full cache answers."""
    cache = jitted.fill_cache_with(prompt, policies.Full(), None, new_tokens=_ANSWER)
    tokens, lengths = jitted.decode(params, cache, prompt.logits, sampling=_GREEDY)
    tokens = np.where(np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None], tokens, -1)
    mass = np.asarray(jax.jit(analysis.follow)(params, prompt, cache, tokens).mass, np.float64)  # [S, L, B, E]
    is_vision, valid = np.asarray(inputs.is_vision), np.asarray(inputs.valid)
    shares = np.asarray(analysis.shares_by_type(mass, analysis.token_types(is_vision, valid))).mean(axis=1)
    vision = np.stack([mass[:, :, i, : valid.shape[1]][..., is_vision[i]] for i in range(len(valid))])  # [B, S, L, V]
    relative = shares[:4] / shares[:1]  # the shortest answer has three digits
    return {
        "tokens with 80%": tokens_with(vision[:, :3]).mean(axis=1),  # [B, L]
        **{name: relative[..., i].T for i, name in enumerate(analysis.TYPES[:3])},  # [B, 4]
    }


def _statistics(prompt: Any) -> dict[str, Any]:
    """How alike AirCache's observers are, and what CSP's lists have in common."""
    choose = jax.jit(analysis.choose)
    windows: Any = WINDOWS
    chosen = {name: choose(prompt, policies.AirCache(keep=0.1, window=name, rows=4)) for name in windows}
    attend = jax.jit(analysis.observer_attention)
    alike: dict[str, list[float]] = {name: [] for name in WINDOWS}
    for i in range(len(prompt.valid)):
        tokens, vision = np.arange(prompt.valid.shape[1]), np.flatnonzero(np.asarray(prompt.is_vision[i]))
        rows = [
            np.asarray(attend(r.q[i].swapaxes(0, 1), r.k[i].swapaxes(0, 1), r.valid[i], tokens, vision))
            for r in prompt.layers
        ]
        for name in WINDOWS:
            masks = np.asarray(chosen[name].extra["observers"][i])
            cosines = [analysis.consistency(row[mask]) for row, mask in zip(rows, masks, strict=True)]
            known = [x for x in cosines if not np.isnan(x)]  # of layers with at least two observers
            alike[name].append(float(np.mean(known)) if known else float("nan"))
    union, filled = (np.asarray(choose(prompt, policies.CSP(keep=0.2, fill=fill)).budgets) for fill in (False, True))
    return {
        **{f"alike, {name}": values for name, values in alike.items()},
        "saved": 1 - union.sum(axis=(1, 2)) / filled.sum(axis=(1, 2)),
    }
