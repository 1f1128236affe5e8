"""Trains the demo model in vlkv/mini/checkpoint: `python -m benchmarks.train_mini --out FOLDER`.

One row has many questions about a page, and early stages show only a part of the page.

Axes: B rows of a batch · I images of a row · V vision tokens shown per image · T tokens of a row.

Three measures make training cheap enough for two CPU cores:

- A row has its images once, followed by several questions with their answers (branches). A static mask prevents each
  question from attending to the others, and all start at the same position. So the logits of a question are those that
  `vlkv.forward` computes for it alone.
- Early stages show the cells with digits and a random choice of the others, at their true positions. Later
  stages show more cells.
- Early stages have ledger pages with few entries.

The steps of a stage alternate between its tasks, so that one checkpoint learns all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from vlkv import loading
from vlkv.families import init
from vlkv.families.family import VisionLanguageModel
from vlkv.mini import folder, pages
from vlkv.mini.pages import Digits, Entry, Page

_VISION_START = 3  # <s> user :
_BLOCK = 4  # cells whose features an average-pooled grid replaces by their mean: 2 x 2


@dataclasses.dataclass(frozen=True)
class Task:
    """The task of one training step.

    A prompt shows `images` pages with different tags, so that a question need not name the page. `pooled` replaces the
    features of every block of 2 x 2 cells by their mean, at the position of the first cell of the block.
    """

    kind: str  # "ledger" or "digits"
    images: int = 1
    pooled: bool = False


TASKS = {
    "ledger": Task("ledger"),
    "digits": Task("digits"),
    "pooled": Task("ledger", pooled=True),
    "several": Task("ledger", images=3),
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One part of the curriculum. `cells` is the number of cells that a row shows."""

    steps: int
    cells: int
    entries: tuple[int, int]  # smallest and largest number of entries of a ledger page
    questions: int  # about a ledger page; half as many about a digit page, including one about the whole page
    batch: int
    turns: tuple[str, ...]  # names of `TASKS`: the tasks of successive steps, repeated

    def shown(self, task: Task) -> int:
        """Number of cells of each image whose patches the model is given; the others are left out to train faster."""
        if task.pooled:
            return _BLOCK * max(4 * self.entries[1], self.cells // _BLOCK)  # an entry is in at most 4 blocks
        return self.cells // task.images


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a training run. The defaults are those of the shipped checkpoint; its log lists what changed."""

    stages: tuple[Stage, ...] = (
        Stage(300, 44, (3, 6), 6, 12, ("ledger", "ledger", "digits")),
        Stage(2050, 84, (4, 10), 8, 16, (*("ledger", "digits") * 2, "ledger", "pooled")),
        Stage(
            850, 192, (4, 10), 8, 8, ("ledger", "digits", "digits", "ledger", "pooled", "digits", "ledger", "several")
        ),
        Stage(
            1200, 192, (4, 10), 8, 8, ("digits", "ledger", "digits", "several", "digits", "ledger", "digits", "pooled")
        ),
        Stage(1000, 192, (4, 10), 8, 8, (*("digits", "ledger", "digits") * 3, "digits", "several", "pooled")),
        Stage(450, 576, (4, 10), 8, 5, (*("digits", "ledger") * 3, "digits", "several", "ledger", "pooled")),
    )
    # Steps and peak learning rate of each cycle.
    cycles: tuple[tuple[int, float], ...] = ((3200, 2.5e-3), (1200, 6e-4), (1000, 6e-4), (450, 4e-4))
    warmup: int = 30  # steps at the start of each cycle; then the learning rate falls along a cosine
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Pages with their questions and answers, in arrays of static shape."""

    patches: Float[np.ndarray | Array, "B I V 8 8"]  # normalised grey
    cells: Int[np.ndarray | Array, "B I V"]
    tokens: Int[np.ndarray | Array, "B text"]  # the branches, concatenated
    weights: Float[np.ndarray | Array, "B text"]  # 1 where the token is part of an answer, 0 for prompts and padding


@dataclasses.dataclass(frozen=True)
class Layout:
    """The lengths of the branches of a row. Static, so that the mask is a constant of the compiled step."""

    task: Task
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, stage: Stage, task: Task) -> Layout:
        """The layout with capacity for the longest questions and answers: prompt, digits, separators and </s>."""
        if task.kind == "digits":
            return cls(task, (5 + 5 * 6, *(9 + 5,) * (stage.questions // 2 - 1)))
        return cls(task, (8 + 6,) * stage.questions)

    @property
    def positions(self) -> Int[np.ndarray, " text"]:
        """RoPE positions: every branch continues after the images."""
        start = _VISION_START + self.task.images * pages.GRID**2
        return np.concatenate([start + np.arange(n) for n in self.lengths])

    def mask(self, vision: int) -> Bool[np.ndarray, "T T"]:
        """The attention mask: a token attends to earlier tokens of the images and of its own branch."""
        prefix = _VISION_START + vision
        branch = np.concatenate([np.full(prefix, -1), *(np.full(n, i) for i, n in enumerate(self.lengths))])
        past = np.tri(len(branch), dtype=bool)
        return past & ((branch[None, :] == -1) | (branch[:, None] == branch[None, :]))


def log_probs(params: VisionLanguageModel, batch: Batch, layout: Layout) -> Float[Array, "B targets vocab"]:
    """Log-probabilities of the token after each branch token; the last branch token has none."""
    rows = len(batch.tokens)
    vision, cells = _vision(params, batch, layout.task.pooled)
    x = params.decoder.embedding(jnp.concatenate([_prefix(rows), batch.tokens], axis=1))
    x = jnp.concatenate([x[:, :_VISION_START], vision, x[:, _VISION_START:]], axis=1)
    first = jnp.broadcast_to(jnp.arange(_VISION_START), (rows, _VISION_START))
    text = jnp.broadcast_to(layout.positions, batch.tokens.shape)
    positions = jnp.concatenate([first, _VISION_START + cells, text], axis=1)[..., None]
    mask = jnp.asarray(layout.mask(vision.shape[1]))[None, None]
    x = params.decoder.walk(x, positions, lambda i, q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask))
    return jax.nn.log_softmax(params.decoder.logits(x[:, -batch.tokens.shape[1] : -1]))


def _prefix(rows: int) -> Int[np.ndarray, "B 3"]:
    return np.tile(_tokenizer().encode("USER:").ids, (rows, 1))


def _vision(params: VisionLanguageModel, batch: Batch, pooled: bool) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
    """The vision tokens of the shown cells, and the indices of these cells among the cells of all images of the row."""
    rows, images, shown = batch.cells.shape
    tower = params.vision
    position = tower.position.weight[...]
    cells, patches = (x.reshape(rows * images, *x.shape[2:]) for x in (batch.cells, batch.patches))
    x = jnp.einsum("bvyx,dcyx->bvd", patches, tower.patch[...]) + position[1 + cells]
    first = jnp.broadcast_to(tower.class_token[...] + position[0], (len(x), 1, x.shape[-1]))
    x = tower.first_norm(jnp.concatenate([first, x], axis=1))
    for block in tower.blocks:
        x = block(x)
    x = params.projector(x[:, 1:])
    offset = pages.GRID**2 * jnp.arange(images)[:, None]
    sequence = jnp.asarray(batch.cells) + offset
    if pooled:
        x = jnp.mean(x.reshape(rows, images, shown // _BLOCK, _BLOCK, -1), axis=3)
        sequence = sequence[..., ::_BLOCK]
    return x.reshape(rows, -1, x.shape[-1]), sequence.reshape(rows, -1)


def loss(params: VisionLanguageModel, batch: Batch, layout: Layout) -> Float[Array, ""]:
    """Mean negative log-likelihood of the answer tokens."""
    target = batch.tokens[:, 1:, None]
    token = -jnp.take_along_axis(log_probs(params, batch, layout), target, axis=-1)[..., 0]
    return jnp.sum(token * batch.weights[:, 1:]) / jnp.sum(batch.weights)


def start(seed: int, checkpoint: Path | None = None) -> VisionLanguageModel:
    """Initial weights for training.

    Args:
        seed: for random weights. The embeddings of positions and tokens are scaled up so that the first layers can tell
            them apart from the first step on.
        checkpoint: folder of an earlier demo model, whose weights are used instead.
    """
    if checkpoint is not None:
        loaded = loading.load_params(checkpoint)
        return jax.tree.unflatten(jax.tree.structure(init(folder.config(), jax.random.key(0))),
                                  [jnp.asarray(leaf) for leaf in jax.tree.leaves(loaded)])  # fmt: skip
    params = init(folder.config(), jax.random.key(seed))
    assert isinstance(params, VisionLanguageModel)
    width = params.vision.position.weight.shape[1]
    # Sinusoidal positions over the grid (Vaswani et al. 2017); training changes them like all other weights.
    wave = 2.0 ** -np.linspace(-1, 4, width // 4) * np.arange(pages.GRID)[:, None]
    side = np.concatenate([np.sin(wave), np.cos(wave)], axis=1)  # [24, width / 2]
    y, x = np.divmod(np.arange(pages.GRID**2), pages.GRID)
    grid = np.concatenate([side[y], side[x]], axis=1)
    positions = np.concatenate([np.zeros((1, width)), grid])
    params.vision.position.weight.set_value(jnp.asarray(positions, jnp.float32))
    params.decoder.embedding.weight.set_value(params.decoder.embedding.weight[...] * 25)  # 0.02 -> 0.5
    for layer in params.decoder.layers:
        for weight in (layer.out.weight, layer.down.weight):
            weight.set_value(weight[...] * (2 * len(params.decoder.layers)) ** -0.5)
    return params


def training_digits() -> Digits:
    """All digits except the held-out ones. Only this function uses scikit-learn."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return Digits((data.images[: -pages.HELD_OUT] / 16).astype(np.float32), data.target[: -pages.HELD_OUT])


def vary(digits: Digits, rng: np.random.Generator) -> Digits:
    """Augments the digits: small random rotations, shears, scales, shifts, changes of brightness, and noise."""
    n = len(digits.label)
    transform = np.eye(2) + rng.normal(0, 0.1, (n, 2, 2))
    middle = (pages.CELL - 1) / 2
    pixel = np.mgrid[: pages.CELL, : pages.CELL].reshape(2, -1) - middle
    place = np.einsum("nij,jp->nip", transform, pixel) + rng.normal(0, 0.4, (n, 2, 1)) + middle
    corner = np.floor(place).astype(int)
    fraction = place - corner  # weights of bilinear interpolation
    padded = np.pad(digits.ink, [(0, 0), (4, 4), (4, 4)])
    ink = np.zeros((n, pages.CELL**2))
    for dy, wy in ((0, 1 - fraction[:, 0]), (1, fraction[:, 0])):
        for dx, wx in ((0, 1 - fraction[:, 1]), (1, fraction[:, 1])):
            row, column = np.clip(corner + [[dy], [dx]] + 4, 0, pages.CELL + 7).transpose(1, 0, 2)
            ink += wy * wx * padded[np.arange(n)[:, None], row, column]
    ink = ink * rng.uniform(0.75, 1.15, (n, 1)) + rng.normal(0, 0.04, ink.shape)
    return Digits(np.clip(ink, 0, 1).reshape(-1, pages.CELL, pages.CELL).astype(np.float32), digits.label)


def batches(digits: Digits, stage: Stage, task: Task, rng: np.random.Generator) -> Iterator[Batch]:
    """Yields random batches of one task without end."""
    layout = Layout.of(stage, task)
    while True:
        yield _batch(vary(digits, rng), stage, layout, rng)


def _batch(digits: Digits, stage: Stage, layout: Layout, rng: np.random.Generator) -> Batch:
    rows = [compose_row(make_pages(digits, stage, layout.task, rng), stage, layout, rng) for _ in range(stage.batch)]
    return Batch(*(np.stack(column) for column in zip(*rows, strict=True)))


def make_pages(digits: Digits, stage: Stage, task: Task, rng: np.random.Generator) -> list[Page]:
    """The pages of one row. Each of the ten tags is on at most one of them."""
    if task.kind == "digits":
        return [pages.digit_page(digits, rng)]
    fewest, most = (max(1, n // task.images) for n in stage.entries)
    tags = np.array_split(rng.permutation(10), task.images)
    return [pages.ledger_page(digits, rng, entries=(fewest, most), tags=some.tolist()) for some in tags]


def compose_row(
    shown: list[Page], stage: Stage, layout: Layout, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The patches, cells, tokens and weights of one row; see `Batch`."""
    cells = np.stack([_choose_cells(page, stage.shown(layout.task), layout.task.pooled, rng) for page in shown])
    patches = np.stack([_patches(page)[chosen] for page, chosen in zip(shown, cells, strict=True)])
    tokens = [np.zeros(n, np.int32) for n in layout.lengths]
    weights = [np.zeros(n, np.float32) for n in layout.lengths]
    for i, entry in enumerate(_asked(shown, layout, rng)):
        ids, first = branch(entry.question, entry.answer)
        tokens[i][: len(ids)] = ids
        weights[i][first : len(ids)] = 1
    return patches, cells.astype(np.int32), np.concatenate(tokens), np.concatenate(weights)


def _choose_cells(page: Page, count: int, pooled: bool, rng: np.random.Generator) -> Int[np.ndarray, " V"]:
    """The cells with digits and random others, in order. If `pooled`, whole blocks, ordered block by block."""
    places = np.arange(pages.GRID**2)
    if pooled:
        y, x = np.divmod(places, pages.GRID)
        block = y // 2 * (pages.GRID // 2) + x // 2
        size = _BLOCK
    else:
        block, size = places, 1
    needed = np.unique(block[list(page.cells)])
    others = np.setdiff1d(block, needed)
    chosen = np.sort(np.concatenate([needed, rng.permutation(others)[: count // size - len(needed)]]))
    return np.argsort(block, kind="stable").reshape(-1, size)[chosen].reshape(-1)


def _patches(page: Page) -> Float[np.ndarray, "cells 8 8"]:
    grid = page.pixels.reshape(pages.GRID, pages.CELL, pages.GRID, pages.CELL).transpose(0, 2, 1, 3)
    return grid.reshape(-1, pages.CELL, pages.CELL).astype(np.float32) / 127.5 - 1


def _asked(shown: list[Page], layout: Layout, rng: np.random.Generator) -> list[Entry]:
    """Different entries in random order. For a digit page, the entry of the whole page is the first."""
    entries = [entry for page in shown for entry in page.entries]
    whole = int(layout.task.kind == "digits")
    order = [*range(whole), *(whole + rng.permutation(len(entries) - whole))]
    return [entries[i] for i in order[: len(layout.lengths)]]


@functools.cache
def _tokenizer() -> Any:
    return folder.tokenizer()


@functools.lru_cache(maxsize=2**16)
def branch(question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a question and its answer, from after the image to </s>, and the index where the answer starts."""
    prompt = _tokenizer().encode(f"{question} ASSISTANT:", add_special_tokens=False).ids
    return [*prompt, *_tokenizer().encode(answer, add_special_tokens=False).ids, folder.EOS], len(prompt)


Score = Callable[[VisionLanguageModel, Batch, Layout], Array]  # compiled `log_probs`


def evaluate(params: VisionLanguageModel, task: Task, score: Score, count: int = 48) -> dict[str, float]:
    """Shares of correct answers ("exact", and "whole" for whole digit pages) and correct digits, on held-out pages.

    Each token is predicted after the correct earlier tokens. For whole answers this is the same as greedy decoding,
    which gives the correct answer exactly if every token is the most likely one after the correct tokens before it.

    Args:
        params: the model.
        task: the task.
        score: compiled `log_probs`.
        count: number of pages. All their cells are shown.
    """
    stage = Stage(0, task.images * pages.GRID**2, (4, 10), 4, 6, ())
    count //= task.images
    layout, rng = Layout.of(stage, task), np.random.default_rng(1)
    bounds = np.cumsum([0, *layout.lengths])
    names = ("exact", "digit", "whole") if task.kind == "digits" else ("exact", "digit")
    correct: dict[str, list[bool]] = {name: [] for name in names}
    for _ in range(count // stage.batch):
        batch = _batch(pages.held_out_digits(), stage, layout, rng)
        best = np.asarray(score(params, batch, layout)).argmax(-1)
        target, weight = batch.tokens[:, 1:], batch.weights[:, 1:] > 0
        right = best == target
        correct["digit"].extend(right[weight & (target > folder.EOS)])
        for b, (low, high) in enumerate(itertools.pairwise(bounds)):
            part = slice(max(low - 1, 0), high - 1)
            asked = weight[:, part].any(1)  # rows with few entries have empty branches
            name = "whole" if task.kind == "digits" and b == 0 else "exact"
            correct[name].extend((right | ~weight)[asked, part].all(1))
    return {name: round(float(np.mean(values)), 4) for name, values in correct.items()}


def train(
    out: Path,
    work: Path,
    settings: Settings,
    *,
    checkpoint: Path | None = None,
    every: int = 200,
    machine: str = "",
    say: Callable[[str], None] = print,
) -> None:
    """Trains the demo model. A run that was interrupted resumes at its last saved state.

    Args:
        out: the checkpoint folder to write, in the format that `vlkv.load` reads.
        work: folder of the saved state.
        settings: stages and optimiser.
        checkpoint: an earlier demo model to start from, instead of random weights.
        every: steps between two writes of checkpoint and state. The end of a stage is also written, with its quality.
        machine: description of the machine, for the log.
        say: prints a line.
    """
    schedule = optax.sgdr_schedule(
        {"init_value": 0.0, "peak_value": peak, "warmup_steps": settings.warmup, "decay_steps": steps,
         "end_value": peak / 50}
        for steps, peak in settings.cycles
    )  # fmt: skip
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(schedule, b2=0.98, weight_decay=settings.weight_decay,
                    mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    )  # fmt: skip
    params = start(settings.seed, checkpoint)
    state = optimizer.init(params)
    log: dict[str, Any] = {
        "measured": "after each stage, per task: shares right on 48 sets of held-out pages: exact answers, digits, "
        "and whole pages (of digit pages); the stages from step 2350 on were planned after looking at them",
        "machine": machine,
        "start": "random weights" if checkpoint is None else "the weights of an earlier demo model",
        "settings": dataclasses.asdict(settings),
        "seconds": 0.0,
        "steps": [],
    }
    done = 0
    if (work / "state.npz").is_file():
        params, state = _restore(work / "state.npz", (params, state))
        log = json.loads((work / "log.json").read_text())
        done = log["steps"][-1]["step"]
        if log["settings"] != json.loads(json.dumps(dataclasses.asdict(settings))):
            log[f"settings from step {done}"] = dataclasses.asdict(settings)
        say(f"resumed at step {done}")

    @functools.partial(jax.jit, static_argnames="layout", donate_argnames=("params", "state"))
    def step(
        params: VisionLanguageModel, state: Any, batch: Batch, layout: Layout
    ) -> tuple[VisionLanguageModel, Any, Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch, layout)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    score = jax.jit(log_probs, static_argnames="layout")
    digits = training_digits()
    rng = np.random.default_rng((settings.seed, done))
    begun, before, losses, end = time.monotonic(), log["seconds"], [], 0
    for stage in settings.stages:
        end += stage.steps
        sources = {name: batches(digits, stage, TASKS[name], rng) for name in stage.turns}
        while done < end:
            name = stage.turns[done % len(stage.turns)]
            params, state, value = step(params, state, next(sources[name]), Layout.of(stage, TASKS[name]))
            losses.append(value)
            done += 1
            if done % 20 == 0:
                say(f"{done} {time.monotonic() - begun:.0f}s loss {np.mean(losses[-20:]):.4f}")
            if done % every == 0 or done == end:
                entry = {"step": done, "loss": round(float(np.mean(losses)), 4)}
                if done == end:
                    entry |= {name: evaluate(params, TASKS[name], score) for name in dict.fromkeys(stage.turns)}
                log["steps"].append(entry)
                log["seconds"] = round(before + time.monotonic() - begun)
                say(json.dumps(entry))
                losses = []
                folder.write(out, params, log)
                _save(work, (params, state), log)


def _save(work: Path, tree: Any, log: dict[str, Any]) -> None:
    work.mkdir(parents=True, exist_ok=True)
    np.savez(work / "new.npz", *jax.tree.leaves(tree))
    (work / "new.npz").rename(work / "state.npz")
    (work / "log.json").write_text(json.dumps(log))


def _restore(file: Path, like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    with np.load(file) as saved:
        return jax.tree.unflatten(structure, [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(leaves))])


def main() -> None:
    """Reads the options and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("mini-checkpoint"), help="the folder to write")
    parser.add_argument(
        "--work", type=Path, default=Path("mini-work"), help="folder of the state, from which a run resumes"
    )
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="an earlier demo model to start from")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--machine", default="", help="description of the machine, for the log")
    options = parser.parse_args()
    train(
        options.out, options.work, Settings(), checkpoint=options.start, every=options.every,
        machine=options.machine,
    )  # fmt: skip


if __name__ == "__main__":
    main()
