"""kvpress' side: one prefill in transformers for several presses, and greedy answers. Needs the extra `peers`.

A press changes the cache after a layer's attention, so the hidden states of a prefill do not depend on it. This is why
one prefill serves all presses: each press' own hook gets a cache of its own. tests/benchmarks/real/test_quality.py
compares the result with kvpress' own `with press(model)`. A press that runs the model again after the prefill (KVzip)
is used as kvpress does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from vlkv import policies
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.policies import Policy
from vlkv.processing import Processor
from vlkv.tools.evaluation import dialogue
from vlkv.tools.evaluation.records import Record


def available() -> str | None:
    """The reason why kvpress cannot be used here; None if it can."""
    try:
        import kvpress  # noqa: PLC0415 (heavy and optional, as torch and transformers below)
        import torch  # noqa: F401, PLC0415
    except ImportError as error:
        return f"{error.name} is missing: pip install '.[peers]'"
    except Exception as error:  # kvpress changes internals of transformers, so it can fail in many ways
        return f"kvpress does not work with this transformers ({type(error).__name__}): pip install '.[peers]'"
    del kvpress
    return None


class Press(NamedTuple):
    """How kvpress' counterpart of a policy is made."""

    make: Callable[[Any, float, Any], Any]  # of the package, the share that is removed, and the policy
    needs: Mapping[str, Any] = {}  # the values of options that the press does not have


def _snapkv(kvpress: Any, ratio: float, policy: Any) -> Any:
    return kvpress.SnapKVPress(ratio, window_size=policy.window, kernel_size=policy.kernel)


_MEAN = {"pooling": "avg"}
PRESSES: Mapping[type[Policy], Press] = {
    policies.Full: Press(lambda kvpress, ratio, policy: None),
    policies.SnapKV: Press(_snapkv, _MEAN),
    policies.PyramidKV: Press(
        lambda kvpress, ratio, policy: kvpress.PyramidKVPress(
            ratio, window_size=policy.window, kernel_size=policy.kernel, beta=policy.beta
        ),
        {**_MEAN, "variant": "paper"},
    ),
    policies.StreamingLLM: Press(lambda kvpress, ratio, policy: kvpress.StreamingLLMPress(ratio, n_sink=policy.sinks)),
    policies.TOVA: Press(lambda kvpress, ratio, policy: kvpress.TOVAPress(ratio), {"recent": 1, "evict": False}),
    policies.Knorm: Press(lambda kvpress, ratio, policy: kvpress.KnormPress(ratio)),
    policies.KeyDiff: Press(lambda kvpress, ratio, policy: kvpress.KeyDiffPress(ratio)),
    # Without safeguards, which differ: kvpress' is each head's best entries, ours a part of the budget.
    policies.AdaKV: Press(
        lambda kvpress, ratio, policy: kvpress.AdaKVPress(_snapkv(kvpress, ratio, policy), alpha_safeguard=0.0),
        {**_MEAN, "safeguard": 0.0},
    ),
    policies.ExpectedAttention: Press(
        lambda kvpress, ratio, policy: kvpress.ExpectedAttentionPress(
            ratio, n_future_positions=policy.ahead, n_sink=policy.sinks, use_covariance=policy.covariance,
            use_vnorm=policy.value_norm, epsilon=policy.epsilon,
        ),
    ),
    policies.CriticalKV: Press(
        lambda kvpress, ratio, policy: kvpress.CriticalKVPress(_snapkv(kvpress, ratio, policy)),
        {**_MEAN, "first_share": 0.5, "epsilon": 1e-4},
    ),
    # The mean attention of the later rows, as in the press.
    policies.RoCo: Press(
        lambda kvpress, ratio, policy: kvpress.ObservedAttentionPress(ratio),
        {"recent": 0, "spread": 0.0, "evict": False},
    ),
    policies.KVzip: Press(lambda kvpress, ratio, policy: kvpress.KVzipPress(ratio, n_sink=policy.sinks)),
}  # fmt: skip


def press_of(policy: Policy) -> Callable[[float], Any]:
    """Makes kvpress' press with the options of a policy, from the share that is removed; None for the full cache.

    Raises:
        InputError: kvpress has no such press.
    """
    press, name = PRESSES.get(type(policy)), policies.text_of(policy, scope=True)
    if press is None:
        raise InputError(f"{name}: kvpress has no such method, or under another definition")
    if policy.scope != "all" and policy.facts.selects:
        raise InputError(f"{name}: kvpress compresses all tokens: give --scope all")
    others = [f"{key}={value!r}" for key, value in press.needs.items() if getattr(policy, key) != value]
    if others:
        raise InputError(f"{name}: kvpress' press has other options: give {', '.join(others)}")

    def make(ratio: float) -> Any:
        import kvpress  # noqa: PLC0415

        return press.make(kvpress, ratio, policy)

    return make


class Split(NamedTuple):
    """A prompt as both sides get it."""

    inputs: Inputs  # what is prefilled and compressed
    ids: Int[np.ndarray, " T"]  # the same without padding
    fed: Int[np.ndarray, " t"]  # ids that follow before the answer; they are not compressed


def split(processor: Processor, record: Record, *, agnostic: bool) -> Split:
    """The whole prompt; if `agnostic`, only the part before the question is prefilled."""
    inputs, fed = dialogue.first_inputs(processor, [[record]], query_agnostic=agnostic, frames=1)
    return Split(inputs, np.asarray(inputs.tokens[0])[np.asarray(inputs.valid[0])], fed[0][0])


class Answer(NamedTuple):
    """An answer, and the cache from which it was decoded."""

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
        """The compressed caches by name, the logits of the first new token, and the seconds without the presses'.

        Args:
            ids: the tokens.
            presses: by name; None for the full cache.
        """
        import kvpress  # noqa: PLC0415
        from transformers import DynamicCache  # noqa: PLC0415

        made = {name: Compressed(DynamicCache(), [], 0.0) for name in presses}
        again = {name: press for name, press in presses.items()
                 if press is not None and type(press).__call__ is not kvpress.BasePress.__call__}  # fmt: skip
        watching = {name: x for name, x in presses.items() if isinstance(x, kvpress.ObservedAttentionPress)}
        others = {name: press for name, press in presses.items() if name not in again | watching}
        tokens = self.torch.from_numpy(ids[None].astype(np.int64))
        for attention, group in (("eager", watching), ("sdpa", others)):  # only "eager" returns attention weights
            self.model.set_attn_implementation(attention)
            if group:
                begin = time.perf_counter()
                with self.torch.inference_mode(), _shared(group, made)(self.model):
                    logits = self.model(tokens, past_key_values=DynamicCache(), logits_to_keep=1).logits[0, -1]
                seconds = time.perf_counter() - begin - sum(made[name].seconds for name in group)
        for name, press in again.items():
            begin = time.perf_counter()
            with self.torch.inference_mode(), press(self.model):
                logits = self.model(tokens, past_key_values=made[name].cache, logits_to_keep=1).logits[0, -1]
                seconds = time.perf_counter() - begin
            spent = time.perf_counter() - begin - seconds
            made[name] = Compressed(made[name].cache, [x.masked_key_indices for x in self.attentions], spent)
        return made, logits, seconds

    def answer(self, prompt: Split, made: Compressed, logits: Any, stop: Sequence[int], new: int) -> Answer:
        """Feeds the ids after the prompt and decodes greedily. The cache is used up.

        The ids are fed together; one by one if layers have different numbers of entries, which have no common mask, or
        if entries are masked, for which kvpress needs a key that no query of a head agrees with.

        Args:
            prompt: the prompt, whose number of tokens is the next position.
            made: the compressed cache.
            logits: of the first new token, if nothing is fed.
            stop: tokens that end the answer.
            new: limit on the tokens of the answer.
        """
        length, fed = len(prompt.ids), prompt.fed
        kept = [layer.keys.shape[1] * layer.keys.shape[2] for layer in made.cache.layers]
        masked = [0 if x is None else len(x[0]) for x in made.masked]
        heads = made.cache.layers[0].keys.shape[1]
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in made.cache.layers)
        for attention, entries in zip(self.attentions, made.masked, strict=True):
            attention.masked_key_indices = entries
        tokens: list[int] = []
        margins: list[float] = []
        with self.torch.inference_mode():
            for part in list(fed[:, None]) if len(set(kept)) > 1 or any(masked) else [fed]:
                if len(part):
                    logits, length = self._step(part.tolist(), length, made.cache), length + len(part)
            begin = time.perf_counter()
            while True:
                best = self.torch.topk(logits, 2)
                tokens.append(int(best.indices[0]))
                margins.append(float(best.values[0] - best.values[1]))
                if len(tokens) == new or tokens[-1] in stop:
                    break
                logits = self._step(tokens[-1:], length + len(tokens) - 1, made.cache)
            seconds = time.perf_counter() - begin
        mean = float(np.mean([(a - b) / heads for a, b in zip(kept, masked, strict=True)]))
        return Answer(tokens, mean, size, made.seconds, seconds, margins)

    def _step(self, tokens: list[int], position: int, cache: Any) -> Any:
        """Logits after more tokens, the first of which has this position."""
        ids, places = (self.torch.tensor([x]) for x in (tokens, range(position, position + len(tokens))))
        return self.model(ids, past_key_values=cache, position_ids=places, logits_to_keep=1).logits[0, -1]


def _shared(presses: Mapping[str, Any], made: dict[str, Compressed]) -> Any:
    """A press that runs several presses on copies of the cache, and adds their caches, masks and seconds to `made`."""
    import kvpress  # noqa: PLC0415

    class Shared(kvpress.BasePress):
        def post_init_from_model(self, model: Any) -> None:
            for press in presses.values():
                if press is not None:
                    press.post_init_from_model(model)

        def forward_hook(self, module: Any, input: Any, kwargs: dict[str, Any], output: Any) -> Any:
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            for name, press in presses.items():
                cache = made[name].cache
                begin = time.perf_counter()
                cache.update(layer.keys.clone(), layer.values.clone(), module.layer_idx)
                module.masked_key_indices = None
                if press is not None:
                    press.forward_hook(module, input, {**kwargs, "past_key_values": cache}, output)
                made[name].masked.append(module.masked_key_indices)
                seconds = made[name].seconds + time.perf_counter() - begin
                made[name] = made[name]._replace(seconds=seconds)
            module.masked_key_indices = None
            return output

    return Shared()
