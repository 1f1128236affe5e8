"""The same questions answered by transformers with kvpress' presses, for `vlkv eval --against kvpress`.

The prompts are the same token ids, and each press keeps as many entries as our policy. The answers are in the same
journal, as those of further policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlkv.compression.sizes import budget_of
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.policies import Policy
from vlkv.processing import Processor
from vlkv.tools.evaluation.journal import Entry, Journal
from vlkv.tools.evaluation.peers import Answer, Theirs, available, press_of, split
from vlkv.tools.evaluation.records import Record
from vlkv.tools.evaluation.settings import Settings

NAME = "kvpress"


def compared(
    plan: Mapping[Policy, str], config: ModelConfig, records: Sequence[Record], settings: Settings
) -> tuple[dict[Policy, str], list[str]]:
    """The policies that kvpress has too, with their names for tables, and why the others are left out.

    Raises:
        InputError: kvpress is not installed, has none of the policies, or cannot answer these questions.
    """
    if config.vision is not None:
        raise InputError(f"--against {NAME}: it compresses the cache of text models, and this model has a vision tower")
    for record in records:
        if record.images or record.videos or len(record.turns) > 1:
            raise InputError(f"line {record.line}: --against {NAME} needs questions of one turn about text")
    if settings.perplexity:
        raise InputError(f"--against {NAME} compares answers: leave out the metric perplexity")
    found, reasons = {}, []
    for policy, name in plan.items():
        try:
            press_of(policy)
            found[policy] = f"{name}, {NAME}"
        except InputError as error:
            reasons.append(str(error))
    if reasons and not any(policy.facts.selects for policy in found):
        raise InputError(f"--against {NAME}: {reasons[0]}")
    missing = available()
    if missing is not None:
        raise InputError(f"--against {NAME}: {missing}")
    return found, reasons


def run(
    folder: Path,
    dtype: str,
    processor: Processor,
    records: Sequence[Record],
    plan: Mapping[int, Policy],
    settings: Settings,
    journal: Journal,
    advance: Callable[..., None],
) -> None:
    """Answers with kvpress what is not in the journal yet.

    Args:
        folder: the checkpoint.
        dtype: of the weights, as on our side.
        processor: of the model.
        records: the questions.
        plan: the policies, by their indices in the journal.
        settings: how to answer.
        journal: of the run.
        advance: of a `progress_bar` over the answers that are not in the journal.
    """
    advance(0, f"{NAME}: loading transformers and the model", left=False)
    theirs: Theirs | None = None
    for row, record in enumerate(records):
        todo = {i: policy for i, policy in plan.items() if (row, 0, i) not in journal.entries}
        if todo:
            theirs = theirs or Theirs(folder, dtype)
            advance(0, f"{NAME}: question {row + 1} of {len(records)}")
            prompt = split(processor, record, agnostic=settings.query_agnostic)
            length = len(prompt.ids)
            layers = processor.config.decoder.full_layers
            presses = {str(i): press_of(policy)(_removed(policy, length, layers)) for i, policy in todo.items()}
            made, logits, _ = theirs.prefill(prompt.ids, presses)
            for i in todo:
                answer = theirs.answer(prompt, made.pop(str(i)), logits, processor.config.stop, settings.max_new_tokens)
                journal.append([_entry(processor, row, i, answer)])
                advance(1, f"{NAME}: question {row + 1} of {len(records)}")


def _removed(policy: Policy, length: int, layers: int) -> float:
    """The share of the entries that a press removes, so that it keeps as many as our policy in the mean layer."""
    if not policy.facts.selects:
        return 0.0
    kept = float(np.asarray(budget_of(policy, layers=layers, most=length, text=length).total)[length]) / layers
    # kvpress rounds down or to the nearest number; a little more than ours gives the same number in both ways.
    return max(0.0, 1 - (kept + 0.001) / length)


def _entry(processor: Processor, row: int, policy: int, answer: Answer) -> Entry:
    text: Any = processor.decode(np.array(answer.tokens))
    return Entry(
        row=row, turn=0, policy=policy, answer=str(text), tokens=len(answer.tokens), seconds=answer.decode_seconds,
        bytes=answer.bytes, begun=0, bytes_before=0, log_probability=0.0, reference=0, drawn=[],
    )  # fmt: skip
