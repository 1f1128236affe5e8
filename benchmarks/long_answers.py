"""Long answers with a bounded cache: do methods that select again beat random entries and the newest ones?

    python -m benchmarks.long_answers smollm2 --rounds 1   answer the tasks, and resume an interrupted run
    python -m benchmarks.long_answers mini --rounds 1      likewise; sorting, too
    python -m benchmarks.long_tables                       write the tables of docs/forever.md

    copy    a list of 200 words, and its copy. The right words are fed, and an item is right if it was the most likely
            one: after a wrong word of its own, this model leaves the list, with the full cache too
    count   goes on counting from twenty numbers, in steps of 1, 5 or 10
    chain   walks six times around a chain of 25 words that the prompt has shown twice
    page    the demo model reads four or five rows of digits aloud

The full cache fails in `sorting` (100 words in alphabetical order; a walk along 60 pairs in random order; the right
words are fed) and in reading the entries of ledger pages in a conversation, so no other method is asked.

Answers are decoded greedily, except those of copy. The score is the longest common subsequence of items, as a share.
All methods have the same number of slots in a layer: a share of the tokens of prompt and answer, including the tail.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import vlkv
from benchmarks.real import folders
from vlkv import policies
from vlkv.mini import CHECKPOINT, pages
from vlkv.policies import Policy, compose
from vlkv.tools.evaluation.journal import Store

FOLDER = Path(__file__).parent / "results" / "forever"
CONTROLS = ("RandomAttention", "Random", "StreamingLLM")
# The order in which shares (percent) and methods are measured, so that an interrupted run has a table of these.
SHARES = (20, 50, 10, 30)
FIRST = ("Full", *CONTROLS, "SnapKV", "RKV", "TriAttention", "TOVA", "H2O", "KeyDiff")
TASKS = ("copy", "count", "chain", "sort", "pairs")  # of SmolLM2
_NEAR = ("PyramidKV", "CAKE", "DuoAttention", "CSP", "BACON", "MixKV", "Damage")  # scores of a window
_OTHERS = ("QFilters", "FlashCache", "InfiniPotV", "LookM", "MEDA", "VLCache")
_ITEM = {"count": r"[,\s]+", "chain": "\n", "page": r"\s*/\s*"}  # what separates items


class Question(NamedTuple):
    """A prompt and the right continuation."""

    prompt: str
    answer: str
    fed: bool = False  # whether the right tokens are fed, whatever the model would say


def plan(slots: int, every: int) -> dict[str, Policy]:
    """All methods with so many slots. Methods that evict in every step have no tail, so their budget is larger."""
    again = partial(compose, every=every)
    budget: dict[str, Any] = {"budget": slots - every}
    near: dict[str, Any] = {**budget, "window": 8}  # rows that observe, of those in the tail
    return {
        "StreamingLLM": policies.StreamingLLM(budget=slots, evict=True),
        "RandomAttention": policies.RandomAttention(**budget, interval=every),
        "Random": again(policies.Random(**budget)),
        "SnapKV": again(policies.SnapKV(**near)),
        "RKV": policies.RKV(**near, interval=every),
        "TriAttention": policies.TriAttention(**budget, interval=every),
        "TOVA": policies.TOVA(budget=slots),
        "H2O": policies.H2O(budget=slots),
        "KeyDiff": again(policies.KeyDiff(**budget)),
        "AdaKV": again(policies.AdaKV(**near)),
        "ChunkKV": again(policies.ChunkKV(**near)),
        "LagKV": again(policies.LagKV(**budget, lag=8)),
        "Knorm": again(policies.Knorm(**budget)),
        "ExpectedAttention": again(policies.ExpectedAttention(**budget)),
        "TriAttention (prompt too)": policies.TriAttention(**budget, interval=every, keep_prompt=False),
        "H2O (periodic)": again(policies.H2O(**budget, evict=False)),
        "RoCo (periodic)": again(policies.RoCo(**budget, evict=False)),
        "AirCache (text too)": again(policies.AirCache(**budget, scope="all")),
        "TGVKV (text too)": again(policies.TGVKV(**budget, scope="all")),
        **{name: again(policies.make(name, **near)) for name in _NEAR},
        **{name: again(policies.make(name, **budget)) for name in _OTHERS},
    }


def words(processor: Any) -> list[str]:
    """Frequent words that are one token, with and without a space before them, and begin differently."""
    found: dict[str, str] = {}
    for number in range(260, 8000):
        text = processor.tokenizer.decode([number])
        if re.fullmatch(" [a-z]{4,8}", text) and len(processor.tokenizer.encode(text[1:], add_special=False)) == 1:
            found.setdefault(text[1:5], text[1:])
    return sorted(found.values())


def question(task: str, number: int, known: Sequence[str]) -> Question:
    """The question of a task with this number."""
    rng = np.random.default_rng([TASKS.index(task), number])
    chosen = [str(word) for word in rng.choice(known, 200, replace=False)]
    if task == "copy":
        return Question(" ".join(chosen) + f"\n\n{chosen[0]}", _spaced(chosen[1:]), fed=True)
    if task == "sort":
        first, *others = sorted(chosen[:100])
        return Question(f"{' '.join(chosen[:100])}\n\nIn alphabetical order: {first}", _spaced(others), fed=True)
    if task == "pairs":
        pairs = [f"{a} {b}\n" for a, b in itertools.pairwise(chosen[:61])]
        return Question("".join(rng.permutation(pairs)) + f"\nChain: {chosen[0]}", _spaced(chosen[1:61]), fed=True)
    if task == "chain":
        lap = "\n".join(chosen[:25]) + "\n"
        return Question(lap * 2, lap * 6)
    step, separator = (1, 10, 5)[number % 3], (", ", "\n")[number % 2]
    start = int(rng.integers(100, 500))
    numbers = [f"{start + step * i}{separator}" for i in range(100)]
    return Question("".join(numbers[:20]).rstrip(" "), "".join(numbers[20:]))


def _spaced(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)


def common(got: Sequence[str], wanted: Sequence[str]) -> float:
    """The longest common subsequence of two lists, as a share of the wanted one."""
    longest = np.zeros(len(wanted) + 1, int)
    for item in got:
        match = np.append(0, longest[:-1] + (np.asarray(wanted) == item))
        longest = np.maximum.accumulate(np.maximum(longest, match))
    return longest[-1] / len(wanted)


@partial(jax.jit, static_argnames="new")
def predicted(params: Any, inputs: Any, policy: Policy, fed: Any, key: Any, *, new: int) -> Any:
    """The most likely tokens [B, new] of an answer. The next step gets them, or those of `fed` that are not -1."""
    cache, logits = vlkv.prefill(params, inputs, policy, new_tokens=new, key=key)

    def step(carry: tuple[Any, Any], right: Any) -> tuple[tuple[Any, Any], Any]:
        cache, logits = carry
        best = jnp.argmax(logits, axis=-1)
        return vlkv.decode_step(params, cache, jnp.where(right >= 0, right, best)), best

    return jax.lax.scan(step, (cache, logits), fed.T)[1].T


def items(task: str, text: str) -> list[str]:
    """The items of an answer. The last of those that could go on for ever is left out, because it may be cut."""
    found = [item for item in re.split(_ITEM[task], text) if item]
    return found if task == "page" else found[:-1]


def score(task: str, right: Question, tokens: np.ndarray, tokenizer: Any, stop: Sequence[int]) -> float:
    """The share of right items of an answer."""
    wanted = np.asarray(tokenizer.encode(right.answer, add_special=False))[: len(tokens)]
    if right.fed:  # every item is one token
        return float(np.mean(tokens[: len(wanted)] == wanted))
    got = tokens[np.cumsum(np.isin(tokens, stop)) == 0]
    return common(*(items(task, tokenizer.decode(x.tolist())) for x in (got, wanted)))


class Model(NamedTuple):
    """What is asked of a model. The settings are part of the results."""

    tasks: tuple[str, ...]
    final: int  # tokens of prompt and answer together, of which a method has a share as slots
    new: int  # tokens of the answer, at most
    every: int  # slots of the tail; 0: only the full cache answers
    rows: int  # questions of a task in a round


MODELS = {
    "smollm2": Model(("copy", "count", "chain"), final=400, new=300, every=16, rows=8),
    "mini": Model(("page",), final=614, new=30, every=8, rows=25),
    "sorting": Model(("sort", "pairs"), final=201, new=100, every=0, rows=8),
}


def asked(model: str, processor: Any, number: int) -> tuple[list[tuple[str, Question]], Any]:
    """The questions of a round, and their inputs."""
    rows, encode = MODELS[model].rows, partial(processor.tokenizer.encode, add_special=False)
    if model == "mini":
        rng = np.random.default_rng([614, number])
        shown = [pages.digit_page(pages.held_out_digits(), rng, rows=(4, 5), length=(4, 5)) for _ in range(rows)]
        found = [("page", Question(pages.READ_PAGE, page.entries[0].answer)) for page in shown]
        return found, processor([[page.image] for page in shown], [pages.READ_PAGE] * rows)
    known = words(processor)
    found = [(t, question(t, number * rows + i, known)) for t in MODELS[model].tasks for i in range(rows)]
    prompts = padded([encode(each.prompt) for _, each in found], 0)
    return found, {"input_ids": prompts, "attention_mask": prompts > 0}


def answer_all(model: str, rounds: int) -> None:
    """Answers what is missing of so many rounds, all methods in the first round before the second one begins."""
    vlkv.keep_programs()
    folder = CHECKPOINT if model == "mini" else folders.written()
    (tasks, final, new, every, rows), results = MODELS[model], stored(model)
    params, processor = vlkv.load(folder, dtype="float32")
    stop = vlkv.Greedy().filled(params.config).stop or ()
    cells = [(100, "Full", policies.Full())]
    cells += [(share, *each) for share in SHARES if every for each in plan(final * share // 100, every).items()]
    cells.sort(key=lambda cell: cell[1] not in FIRST)
    for number in range(rounds):
        found, inputs = asked(model, processor, number)
        inputs, texts = vlkv.Inputs.of(inputs, params.config), [each.answer if each.fed else "" for _, each in found]
        fed = padded([processor.tokenizer.encode(text, add_special=False) for text in texts], -1, new)
        if model == "mini" and ("ledger alone", 100, "Full", number) not in results.entries:
            where = {"share": 100, "name": "Full", "round": number}
            results.append({"task": t, **where, "scores": x} for t, x in ledger(params, processor, number).items())
        for share, name, policy in cells:
            if any((task, share, name, number) not in results.entries for task in tasks):
                best = predicted(params, inputs, policy, jnp.asarray(fed), jax.random.key(number), new=new)
                answers = zip(found, np.asarray(best), strict=True)
                found_scores = [score(*question, tokens, processor.tokenizer, stop) for question, tokens in answers]
                each = np.reshape(found_scores, (len(tasks), rows)).round(4).tolist()
                where = {"share": share, "name": name, "round": number}
                results.append({"task": t, **where, "scores": x} for t, x in zip(tasks, each, strict=True))
                print(number, share, name, *(round(100 * np.mean(x)) for x in each), flush=True)
    results.close()


def ledger(params: Any, processor: Any, number: int) -> dict[str, list[float]]:
    """Which entries of three ledger pages the full cache reads exactly: asked in one conversation, and each alone."""
    shown, _, _ = pages.held_out_set(np.random.default_rng([3, number]))
    images, entries = [page.image for page in shown], [entry for page in shown for entry in page.entries]
    sampling, asked = vlkv.Greedy(max_new_tokens=8), [entry.question for entry in entries]
    chat = vlkv.Chat(params, processor, images, sampling=sampling)
    alone = vlkv.answer(params, processor, [images] * len(asked), asked, sampling=sampling)
    answers = {"ledger in turn": [chat.ask(each) for each in asked], "ledger alone": alone}
    return {name: [float(a == b.answer) for a, b in zip(each, entries, strict=True)] for name, each in answers.items()}


def padded(rows: Sequence[Any], fill: int, length: int = 0) -> np.ndarray:
    """Rows of unequal lengths as an array, padded on the right to at least `length`."""
    array = np.full((len(rows), max(length, *map(len, rows))), fill)
    for place, row in zip(array, rows, strict=True):
        place[: len(row)] = row
    return array


def stored(model: str) -> Store:
    """The results of a model so far."""
    settings = {"model": model, **MODELS[model]._asdict()}
    return Store(FOLDER / f"{model}.jsonl", settings, ("task", "share", "name", "round"))


def main() -> None:
    """Answers the questions of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=1, help="(default: %(default)s)")
    args = parser.parse_args()
    answer_all(args.model, args.rounds)


if __name__ == "__main__":
    main()
