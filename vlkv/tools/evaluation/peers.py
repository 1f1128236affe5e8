"""kvpress' side: the same questions answered by transformers with kvpress' presses. Needs the extra `peers`.

The prompts are the same token ids, and each press keeps as many entries as our policy. One prefill serves all presses,
because a press changes the cache after a layer's attention, so that hidden states do not depend on it: each press' own
hook gets a cache of its own. tests/benchmarks/real/test_quality.py compares the result with kvpress' own
`with press(model)`. A press that runs the model again after the prefill (KVzip) is used as kvpress does.
"""

from __future__ import annotations

import importlib
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from vlkv import policies
from vlkv.compression.sizes import budget_of
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.policies import Policy
from vlkv.processing import Processor
from vlkv.tools.evaluation import dialogue
from vlkv.tools.evaluation.journal import Store
from vlkv.tools.evaluation.records import Record, Settings

NAME = "kvpress"


def available() -> str | None:
    """The reason why kvpress cannot be used here; None if it can."""
    try:
        for package in ("kvpress", "torch"):
            importlib.import_module(package)
    except ImportError as error:
        return f"{error.name} is missing: pip install '.[peers]'"
    except Exception as error:  # kvpress changes internals of transformers, so it can fail in many ways
        return f"kvpress does not work with this transformers ({type(error).__name__}): pip install '.[peers]'"
    return None


class Press(NamedTuple):
    """kvpress' counterpart of a policy, as described in presses.toml."""

    name: str = ""
    options: Mapping[str, str] = {}
    needs: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {}
    around: str = ""


PRESSES: Mapping[type[Policy], Press] = {
    getattr(policies, name): Press(**fields)
    for name, fields in tomllib.loads(Path(__file__).with_name("presses.toml").read_text()).items()
}


def press_of(policy: Policy) -> Callable[[float], Any]:
    """Makes kvpress' press with the options of a policy, from the share that is removed; None for the full cache.

    Raises InputError if kvpress has no such press.
    """
    press, name = PRESSES.get(type(policy)), policies.text_of(policy, scope=True)
    if press is None:
        raise InputError(f"{name}: kvpress has no such method, or under another definition")
    if policy.scope != "all" and policy.facts.selects:
        raise InputError(f"{name}: kvpress compresses all tokens: give --scope all")
    others = [f"{key}={value!r}" for key, value in press.needs.items() if getattr(policy, key) != value]
    if others:
        raise InputError(f"{name}: kvpress' press has other options: give {', '.join(others)}")

    def make(ratio: float, press: Press = press) -> Any:
        import kvpress  # noqa: PLC0415 (heavy and optional, as torch and transformers below)

        options = {theirs: getattr(policy, ours) for theirs, ours in press.options.items()}
        changed = make(ratio, PRESSES[getattr(policies, press.around)]) if press.around else ratio
        return getattr(kvpress, press.name)(changed, **options, **press.fixed) if press.name else None

    return make


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
    shared, reasons = {}, []
    for policy, name in plan.items():
        try:
            press_of(policy)
            shared[policy] = f"{name}, {NAME}"
        except InputError as error:
            reasons.append(str(error))
    if reasons and not any(policy.facts.selects for policy in shared):
        raise InputError(f"--against {NAME}: {reasons[0]}")
    if (missing := available()) is not None:
        raise InputError(f"--against {NAME}: {missing}")
    return shared, reasons


def run(
    folder: Path,
    dtype: str,
    processor: Processor,
    records: Sequence[Record],
    plan: Mapping[int, Policy],
    settings: Settings,
    journal: Store,
    advance: Callable[..., None],
    *,
    rounded: bool = False,
) -> None:
    """Answers with kvpress what is not in the journal yet; arguments as those of `running.run`.

    The keys of `plan` are the indices of its policies in the journal. `rounded`: our side rounds the number of entries
    down, so that all layers have equally many of them.
    """
    advance(0, f"{NAME}: loading transformers and the model", left=False)
    theirs: Theirs | None = None
    stop, new, layers = processor.config.stop, settings.max_new_tokens, processor.config.decoder.full_layers
    for row, record in enumerate(records):
        todo = {i: policy for i, policy in plan.items() if (row, 0, i) not in journal.entries}
        if todo:
            theirs = theirs or Theirs(folder, dtype)
            advance(0, f"{NAME}: question {row + 1} of {len(records)}")
            prompt = split(processor, record, agnostic=settings.query_agnostic)
            removed = {i: _removed(policy, len(prompt.ids), layers, rounded) for i, policy in todo.items()}
            presses = {str(i): press_of(policy)(removed[i]) for i, policy in todo.items()}
            caches, logits, seconds = theirs.prefill(prompt.ids, presses)
            for i in todo:
                answer = theirs.answer(prompt, caches.pop(str(i)), logits, stop, new)
                entry = _entry(processor, row, i, answer)
                journal.append([{**entry, "prompt": len(prompt.ids), "prefill_seconds": seconds}])
                advance(1, f"{NAME}: question {row + 1} of {len(records)}")


def _removed(policy: Policy, length: int, layers: int, rounded: bool) -> float:
    """The share of the entries that a press removes, so that it keeps as many as our policy in the mean layer."""
    if not policy.facts.selects:
        return 0.0
    kept = float(np.asarray(budget_of(policy, layers=layers, most=length, text=length).total)[length]) / layers
    # kvpress rounds down or to the nearest number; a little more than ours gives the same number in both ways.
    return max(0.0, 1 - ((max(1, int(kept)) if rounded else kept) + 0.001) / length)


def _entry(processor: Processor, row: int, policy: int, answer: Answer) -> dict[str, Any]:
    """An `Entry`, in which nothing was scored, drawn or compressed late."""
    text = str(processor.decode(np.array(answer.tokens)))
    said = {"answer": text, "tokens": len(answer.tokens), "ids": answer.tokens, "seconds": answer.decode_seconds}
    cache = {name: getattr(answer, name) for name in ("bytes", "kept", "margins", "compress_seconds")}
    others = {"begun": 0, "bytes_before": 0, "log_probability": 0.0, "reference": 0, "drawn": []}
    return {"row": row, "turn": 0, "policy": policy, **said, **cache, **others}


class Split(NamedTuple):
    """A prompt as both sides get it."""

    ids: Int[np.ndarray, " T"]  # what is prefilled and compressed
    fed: Int[np.ndarray, " t"]  # ids that follow before the answer; they are not compressed


def split(processor: Processor, record: Record, *, agnostic: bool) -> Split:
    """The whole prompt; if `agnostic`, only the part before the question is prefilled."""
    inputs, fed = dialogue.first_inputs(processor, [[record]], query_agnostic=agnostic, frames=1)
    return Split(np.asarray(inputs.tokens[0])[np.asarray(inputs.valid[0])], fed[0][0])


class Answer(NamedTuple):
    """An answer and its cache."""

    tokens: list[int]  # with the stop token, if there was one
    kept: float  # entries of the prompt, mean over layers and heads
    bytes: int  # allocated for keys and values of the prompt's entries
    compress_seconds: float
    decode_seconds: float  # of all tokens but the first
    margins: list[float] | None = None  # by how much the logit of each token exceeds the second highest


class Compressed(NamedTuple):
    """What a press made of a prompt."""

    cache: Any  # DynamicCache
    masked: list[Any]  # per layer, the entries that attention ignores (AdaKV); None: none
    seconds: float


class Theirs:
    """A model in transformers, with scaled dot-product attention."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()
        self.torch = torch
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        self.model = model.eval()
        self.attentions = [layer.self_attn for layer in model.model.layers]
        # KVzip's press reads the tokenizer from here, and would not repeat what a chat template writes first.
        self.tokenizer = tempfile.TemporaryDirectory()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = None
        tokenizer.save_pretrained(self.tokenizer.name)
        model.config.name_or_path = self.tokenizer.name

    def prefill(
        self, ids: Int[np.ndarray, " T"], presses: Mapping[str, Any]
    ) -> tuple[dict[str, Compressed], Any, float]:
        """The compressed caches by name, the logits of the first new token, and the seconds without the presses'."""
        import kvpress  # noqa: PLC0415
        from transformers import DynamicCache  # noqa: PLC0415

        caches = {name: Compressed(DynamicCache(), [], 0.0) for name in presses}
        tokens = self.torch.from_numpy(ids[None].astype(np.int64))
        alone: dict[str, Any] = {}
        shared: dict[str, dict[str, Any]] = {"eager": {}, "sdpa": {}}  # only "eager" returns attention weights
        for name, press in presses.items():
            if press is not None and type(press).__call__ is not kvpress.BasePress.__call__:
                alone[name] = press
            else:
                shared["eager" if isinstance(press, kvpress.ObservedAttentionPress) else "sdpa"][name] = press
        for attention, group in shared.items():
            self.model.set_attn_implementation(attention)
            if group:
                logits, seconds, _ = self._read(tokens, DynamicCache(), _together(group, caches))
                seconds -= sum(caches[name].seconds for name in group)
        for name, press in alone.items():
            logits, seconds, spent = self._read(tokens, caches[name].cache, press)
            caches[name] = Compressed(caches[name].cache, [x.masked_key_indices for x in self.attentions], spent)
        return caches, logits, seconds

    def _read(self, tokens: Any, cache: Any, press: Any) -> tuple[Any, float, float]:
        """Logits of the first new token, and the seconds of the prefill and of what the press does after it."""
        begin = time.perf_counter()
        with self.torch.inference_mode(), press(self.model):
            logits = self.model(tokens, past_key_values=cache, logits_to_keep=1).logits[0, -1]
            seconds = time.perf_counter() - begin
        return logits, seconds, time.perf_counter() - begin - seconds

    def answer(self, prompt: Split, compressed: Compressed, logits: Any, stop: Sequence[int], new: int) -> Answer:
        """Feeds the ids after the prompt and decodes greedily until a token of `stop`. The cache is used up.

        The ids are fed one by one if layers have different numbers of entries, which have no common mask, or if entries
        are masked, for which kvpress needs a key that no query of a head agrees with. Without ids, `logits` give the
        first token.
        """
        length, fed = len(prompt.ids), prompt.fed
        kept = [layer.keys.shape[1] * layer.keys.shape[2] for layer in compressed.cache.layers]
        masked = [0 if x is None else len(x[0]) for x in compressed.masked]
        heads = compressed.cache.layers[0].keys.shape[1]
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in compressed.cache.layers)
        for attention, entries in zip(self.attentions, compressed.masked, strict=True):
            attention.masked_key_indices = entries
        tokens: list[int] = []
        margins: list[float] = []
        with self.torch.inference_mode():
            for part in list(fed[:, None]) if len(set(kept)) > 1 or any(masked) else [fed]:
                if len(part):
                    logits, length = self._step(part.tolist(), length, compressed.cache), length + len(part)
            begin = time.perf_counter()
            while True:
                best = self.torch.topk(logits, 2)
                tokens.append(int(best.indices[0]))
                margins.append(float(best.values[0] - best.values[1]))
                if len(tokens) == new or tokens[-1] in stop:
                    break
                logits = self._step(tokens[-1:], length + len(tokens) - 1, compressed.cache)
            seconds = time.perf_counter() - begin
        mean = float(np.mean(kept) - np.mean(masked)) / heads
        return Answer(tokens, mean, size, compressed.seconds, seconds, margins)

    def _step(self, tokens: list[int], position: int, cache: Any) -> Any:
        """Logits after more tokens, the first of which has this position."""
        ids, places = (self.torch.tensor([x]) for x in (tokens, range(position, position + len(tokens))))
        return self.model(ids, past_key_values=cache, position_ids=places, logits_to_keep=1).logits[0, -1]


def _together(presses: Mapping[str, Any], caches: dict[str, Compressed]) -> Any:
    """A press that runs several presses on copies of the cache; `caches` get the results."""
    import kvpress  # noqa: PLC0415

    class Together(kvpress.BasePress):
        def post_init_from_model(self, model: Any) -> None:
            for press in filter(None, presses.values()):
                press.post_init_from_model(model)

        def forward_hook(self, module: Any, input: Any, kwargs: dict[str, Any], output: Any) -> Any:
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            for name, press in presses.items():
                cache, masked, seconds = caches[name]
                begin = time.perf_counter()
                cache.update(layer.keys.clone(), layer.values.clone(), module.layer_idx)
                module.masked_key_indices = None
                if press is not None:
                    press.forward_hook(module, input, {**kwargs, "past_key_values": cache}, output)
                masked.append(module.masked_key_indices)
                caches[name] = Compressed(cache, masked, seconds + time.perf_counter() - begin)
            module.masked_key_indices = None
            return output

    return Together()
