"""Our side: compresses the cache of one prompt with several policies, and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from vlkv.buckets import Buckets, round_up
from vlkv.compression.compose import at_keep
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.decode import check_room
from vlkv.generation.prompt import Prompt
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.policies import Policy
from vlkv.processing import Processor
from vlkv.tools.evaluation.keeps import budget
from vlkv.tools.evaluation.peers import Answer, Split

NEW = 20  # tokens of an answer: two numbers of seven digits, with a token per digit, or four names of variables
_QUESTIONS = Buckets(text=(128, 256, 512))  # coarse, so that most questions share programs
T = TypeVar("T")


class Ours:
    """A model in vlkv."""

    def __init__(self, params: Model, processor: Processor) -> None:
        self.params, self.processor = params, processor
        self.compiled: set[Hashable] = set()

    def prefill(self, prompt: Split, policy: Policy | None = None) -> tuple[Prompt, float]:
        """Queries, keys and values of a prompt, and the seconds. `policy` as in `read_prompt`."""
        check_room(self.params.config, prompt.inputs, self._capacity(prompt))
        run = partial(jitted.read_prompt, self.params, prompt.inputs, policy, new_tokens=self._capacity(prompt))
        return self._timed(("prefill", policy, *self._shape(prompt)), run)

    def answer(self, prompt: Split, read: Prompt, program: Policy) -> Answer:
        """Compresses the prompt and decodes greedily.

        The number of kept entries is rounded down, as in kvpress, so that all layers have equally many of them.

        Args:
            prompt: the prompt.
            read: of `prefill`.
            program: the policy, whose compiled program serves prompts of all lengths.
        """
        key, capacity = (program, *self._shape(prompt)), self._capacity(prompt)
        length, policy = len(prompt.ids), program
        if program.keep is not None:
            policy = at_keep(program, max(1, int(program.keep * length)) / length)
        table = budget(policy, program, read)
        random = jax.random.key(0)
        compress = partial(jitted.fill_cache_with, read, program, table, new_tokens=capacity, key=random)
        cache, compress_seconds = self._timed(("compress", *key), compress)
        size = sum(x.nbytes for x in jax.tree.leaves((cache.k, cache.v)))
        kept, logits = float(np.mean(np.asarray(cache.counts))), read.logits
        if len(prompt.fed):
            batch = {"input_ids": prompt.fed[None], "attention_mask": np.ones((1, len(prompt.fed)), np.int32)}
            more = Inputs.from_hf(batch, self.params.config, _QUESTIONS)
            cache, logits = jax.block_until_ready(jitted.extend(self.params, cache, more))
        sampling = Greedy(max_new_tokens=NEW)
        run = partial(jitted.decode, self.params, cache, logits, sampling=sampling)
        (tokens, lengths), decode_seconds = self._timed(("decode", *key), run)
        return Answer(np.asarray(tokens)[0, : int(lengths[0])].tolist(), kept, size, compress_seconds, decode_seconds)

    def _capacity(self, prompt: Split) -> int:
        return NEW + round_up(len(prompt.fed), _QUESTIONS.text)

    def _shape(self, prompt: Split) -> tuple[Hashable, ...]:
        return prompt.inputs.tokens.shape, prompt.inputs.max_text, self._capacity(prompt)

    def _timed(self, key: Hashable, run: Callable[[], T]) -> tuple[T, float]:
        """The result and the seconds, without those of compilation: the first run of a program is repeated."""
        if key not in self.compiled:
            jax.block_until_ready(run())
            self.compiled.add(key)
        begin = time.perf_counter()
        result: Any = jax.block_until_ready(run())
        return result, time.perf_counter() - begin
