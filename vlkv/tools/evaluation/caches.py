"""The caches of a batch of prompts under several policies, of which most share one prefill.

Policies that reduce the prompt, cap the layers or compress during the answer have their own.

Axes: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax

from vlkv.compression.checking import needs_own_prompt
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.begin import Begun
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.tools.evaluation.batching import Batch
from vlkv.tools.evaluation.compiling import Call, call
from vlkv.tools.evaluation.keeps import budget, share_programs

Compress = Callable[
    [Model, Inputs, Sequence[Policy], Sequence[int], int, Greedy, int, Batch], Iterator[tuple[int, int, Begun]]
]  # the result of `compressed`, and its arguments without `call`


def compressed(
    params: Model,
    inputs: Inputs,
    plan: Sequence[Policy],
    todo: Sequence[int],
    new_tokens: int,
    sampling: Greedy,
    seed: int,
    batch: Batch,
    call: Call = call,
) -> Iterator[tuple[int, int, Begun]]:
    """For each policy index in `todo`: the index, the bytes of its cache, and the cache.

    All keeps of a method share one program, which allocates the cache of the largest keep. The bytes returned are those
    of a cache for the policy's own keep. `call` calls the programs, or compiles them (`compiling`), which gives shapes.
    """
    key = jax.random.split(jax.random.fold_in(jax.random.key(seed), batch.number))[0]
    # A shared prefill stores the queries of all layers, which does not pay off for a single policy.
    sharing = [
        i for i, policy in enumerate(plan)
        if not (needs_own_prompt(policy) or policy.cap is not None or slots_of(policy).answer)
    ]  # fmt: skip
    programs, prompt = share_programs(plan), None
    if len(sharing) > 1 and set(sharing) & set(todo):
        observers = tuple(dict.fromkeys(programs[i] for i in sharing))
        prompt = call(jitted.read_prompt, params, inputs, observers=observers, new_tokens=new_tokens)
    for i in todo:
        policy, program = plan[i], programs[i]
        if i in sharing and prompt is not None:
            table = budget(policy, program, prompt)
            cache = call(jitted.fill_cache_with, prompt, program, table, new_tokens=new_tokens, key=key)
            size = cache.bytes
            if table is not None:  # the program is that of a larger keep
                own = jitted.fill_cache_with.eval_shape(prompt, policy, None, new_tokens=new_tokens, key=key)
                size = own.bytes
            yield i, size, Begun(cache=cache, logits=prompt.logits)
        else:
            begun = call(jitted.begin, params, inputs, policy, sampling=sampling, new_tokens=new_tokens, key=key)
            yield i, begun.cache.bytes, begun
