"""Batches of prompts, and their caches under several policies.

Rows of a batch have the same number of turns and similar images and lengths, so that few shapes are compiled. The same
file and settings give the same batches, so a resumed run gives the same answers. Most policies share one prefill.

Axes: B rows of a batch.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax

from vlkv.compression.candidates import Plan
from vlkv.compression.checking import needs_own_prompt
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.begin import Begun
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.tools.evaluation.keeps import budget, share_programs
from vlkv.tools.evaluation.records import Record

# Programs that are compiled at a time: few, because each needs memory, and on a CPU memory maps, which `make_room`
# counts only when the next program is traced. XLA's compiler for a CPU uses little more than one core for a program.
AT_A_TIME = min(4, os.cpu_count() or 1)


class Batch(NamedTuple):
    """Groups of rows. Rows of a group share the prompt up to their question. The last groups may be padding."""

    number: int
    groups: tuple[tuple[int, ...], ...]  # indices of records
    real: int  # number of groups that are not padding

    @property
    def rows(self) -> list[int]:
        """Indices of all records of the batch, without padding."""
        return [row for group in self.groups[: self.real] for row in group]


def batches(records: Sequence[Record], size: int, shared: Callable[[Record], str] | None) -> list[Batch]:
    """Divides all records into batches of `size` groups.

    `shared` returns the prompt of a record up to its question; records with the same images, videos and such prompt
    form one group. Without it every record is a group of its own.
    """
    groups: dict[object, list[int]] = {}
    for row, record in enumerate(records):
        prompt = (row,) if shared is None else (record.images, record.videos, shared(record))
        groups.setdefault((len(record.turns), prompt), []).append(row)

    def shape(group: list[int]) -> tuple[int, ...]:
        first = records[group[0]]
        length = len(first.context) + sum(len(turn.question) for turn in first.turns)
        return len(first.turns), len(first.images) + len(first.videos), len(group), length, group[0]

    result: list[Batch] = []
    for _, same_turns in itertools.groupby(sorted(groups.values(), key=shape), key=lambda group: shape(group)[0]):
        members = [tuple(group) for group in same_turns]
        for begin in range(0, len(members), size):
            part = members[begin : begin + size]
            result.append(Batch(len(result), tuple([*part, *part[-1:] * (size - len(part))]), len(part)))
    return result


class Work(NamedTuple):
    """A batch whose caches are to be made."""

    params: Model
    inputs: Inputs
    batch: Batch
    new_tokens: int
    sampling: Greedy
    seed: int


Compress = Callable[[Work, Sequence[Policy], Sequence[int]], Iterator[tuple[int, int, Begun]]]  # such as `compressed`
Call = Callable[..., Any]  # calls its first argument, a jitted function, with the others


def call(function: Any, *arguments: Any, **options: Any) -> Any:
    """Calls a function."""
    return function(*arguments, **options)


def compressed(
    work: Work, plan: Sequence[Policy], todo: Sequence[int], call: Call = call
) -> Iterator[tuple[int, int, Begun]]:
    """For each policy index in `todo`: the index, the bytes of its cache, and the cache.

    All keeps of a method share one program, which allocates the cache of the largest keep. The bytes returned are those
    of a cache for the policy's own keep. `call` calls the programs, or compiles them (`compiling`), which gives shapes.
    """
    params, inputs, batch, new, sampling, seed = work
    key = jax.random.split(jax.random.fold_in(jax.random.key(seed), batch.number))[0]
    # A shared prefill stores the queries of all layers, which does not pay off for a single policy.
    sharing = [
        i
        for i, policy in enumerate(plan)
        if not (needs_own_prompt(policy) or policy.cap is not None or slots_of(policy).answer)
    ]
    programs, prompt = share_programs(plan), None
    if len(sharing) > 1 and set(sharing) & set(todo):
        observers = tuple(dict.fromkeys(programs[i] for i in sharing))
        prompt = call(jitted.read_prompt, params, inputs, observers=observers, new_tokens=new)
    for i in todo:
        policy, program = plan[i], programs[i]
        if i in sharing and prompt is not None:
            table = budget(policy, program, prompt)
            cache = call(jitted.fill_cache_with, prompt, program, table, new_tokens=new, key=key)
            size = cache.bytes
            if table is not None:  # the program is that of a larger keep
                size = jitted.fill_cache_with.eval_shape(prompt, policy, None, new_tokens=new, key=key).bytes
            yield i, size, Begun(cache=cache, logits=prompt.logits)
        else:
            layers, most = params.decoder.full_layers, sampling.max_new_tokens
            alone = Plan.of(policy, inputs, key, layers=layers, new_tokens=new, answer=most)
            begun = call(jitted.begin, params, inputs, alone, sampling=sampling, key=key)
            yield i, begun.cache.bytes, begun


@contextlib.contextmanager
def compiling(params: Model, known: dict[Any, Any]) -> Iterator[Call]:
    """Yields a `Call` that compiles instead of computing, and returns the shapes of the results.

    When the context ends, all programs are compiled, and jax uses them where the functions are called with arrays of
    the same shapes. There an error of the compiler is raised, and not here. The model is on one device. `known` has the
    shapes of the results of programs that are compiled already; new ones are added.
    """
    leaf = jax.tree.leaves(params)[0]
    placed = leaf.sharding if leaf.committed else None  # results of jit are committed if an argument is
    running: set[Future[Any]] = set()

    def compile(function: Any, *arguments: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((arguments, options))
        key = function, structure, tuple(getattr(x, "shape", x) for x in leaves)
        if key not in known:
            if len(running) == AT_A_TIME:
                running.difference_update(wait(running, return_when=FIRST_COMPLETED).done)
            traced = function.trace(*arguments, **options)
            running.add(threads.submit(traced.lower().compile))
            known[key] = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed, weak_type=x.weak_type),
                traced.out_info,
            )
        return known[key]

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        yield compile
