"""Trains the miniature: many questions about one page in one pass, few tokens at first.

Axes: B pages · V vision tokens shown · T tokens of a row · N, K, H as in the decoder.

Three things make it cheap enough for two CPU cores:

- A row holds the image once and after it several questions with their answers. A static mask keeps each
  question from seeing the others, and each starts at the same position, so every one is exactly the row that
  `vlkv.forward` sees.
- Early stages show the cells with digits and a random choice of the others, at their true positions. The last
  stage shows whole pages.
- Early stages have pages of few, short rows. Reading whole pages gives many targets per page; row questions
  alone learn nothing for a long time.
"""

from __future__ import annotations

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

from vlkv.families import init
from vlkv.families.llava import Llava
from vlkv.mini import folder, pages
from vlkv.mini.pages import Digits, Page

_VISION_START = 3  # <s> user :
_TEXT_START = _VISION_START + pages.GRID**2


@dataclasses.dataclass(frozen=True)
class Stage:
    """One part of the curriculum; `cells` is the number of vision tokens that a page may show."""

    steps: int
    cells: int
    rows: tuple[int, int]
    length: tuple[int, int]
    row_questions: int  # besides the whole page
    batch: int = 32


@dataclasses.dataclass(frozen=True)
class Settings:
    """A training run; the defaults made the shipped checkpoint."""

    stages: tuple[Stage, ...] = (
        Stage(600, 24, (1, 3), (2, 4), 0),
        Stage(900, 48, (2, 5), (2, 5), 1),
        Stage(1200, 144, (2, 5), (2, 5), 2),
    )
    learning_rate: float = 1.5e-3
    warmup: int = 50
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0

    @property
    def steps(self) -> int:
        """All steps together."""
        return sum(stage.steps for stage in self.stages)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Pages with their questions and answers, all of one static shape."""

    patches: Float[np.ndarray | Array, "B V 8 8"]  # normalised grey
    cells: Int[np.ndarray | Array, "B V"]
    tokens: Int[np.ndarray | Array, "B text"]  # the branches, one after the other
    weights: Float[np.ndarray | Array, "B text"]  # 1 where the token is part of an answer, 0 for prompts and padding


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the branches of a row lie; static, so that the mask is a constant of the compiled step."""

    lengths: tuple[int, ...]

    @classmethod
    def of(cls, stage: Stage) -> Layout:
        """Room for the longest answers of a stage."""
        page = 4 + stage.rows[1] * (stage.length[1] + 1)  # digits and a separator or </s> per row
        return cls((1 + page, *(9 + stage.length[1],) * stage.row_questions))

    @property
    def positions(self) -> Int[np.ndarray, " text"]:
        """What RoPE sees: every branch follows the image."""
        return np.concatenate([_TEXT_START + np.arange(n) for n in self.lengths])

    def mask(self, vision: int) -> Bool[np.ndarray, "T T"]:
        """Who may see whom: the causal past that is the image or the same branch."""
        prefix = _VISION_START + vision
        branch = np.concatenate([np.full(prefix, -1), *(np.full(n, i) for i, n in enumerate(self.lengths))])
        past = np.tri(len(branch), dtype=bool)
        return past & ((branch[None, :] == -1) | (branch[:, None] == branch[None, :]))


def log_probs(params: Llava, batch: Batch, layout: Layout) -> Float[Array, "B targets vocab"]:
    """Log-probabilities of every branch token's successor."""
    x = params.decoder.embedding(jnp.concatenate([_prefix(len(batch.tokens)), batch.tokens], axis=1))
    x = jnp.concatenate([x[:, :_VISION_START], _see(params, batch), x[:, _VISION_START:]], axis=1)
    first = jnp.broadcast_to(jnp.arange(_VISION_START), (len(batch.tokens), _VISION_START))
    text = jnp.broadcast_to(layout.positions, batch.tokens.shape)
    positions = jnp.concatenate([first, _VISION_START + batch.cells, text], axis=1)[..., None]
    mask = jnp.asarray(layout.mask(batch.cells.shape[1]))[None, None]
    x = params.decoder.walk(x, positions, lambda i, q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask))
    return jax.nn.log_softmax(params.decoder.logits(x[:, -batch.tokens.shape[1] : -1]))


def _prefix(rows: int) -> Int[np.ndarray, "B 3"]:
    return np.tile(_tokenizer().encode("USER:").ids, (rows, 1))


def _see(params: Llava, batch: Batch) -> Float[Array, "B V D"]:
    """The tower and the projector, on the cells that are shown."""
    tower = params.vision
    place = tower.position.weight[...]
    x = jnp.einsum("bvyx,dcyx->bvd", batch.patches, tower.patch[...]) + place[1 + batch.cells]
    first = jnp.broadcast_to(tower.class_token[...] + place[0], (len(x), 1, x.shape[-1]))
    x = tower.first_norm(jnp.concatenate([first, x], axis=1))
    for block in tower.blocks:
        x = block(x)
    return params.projector(x[:, 1:])


def loss(params: Llava, batch: Batch, layout: Layout) -> Float[Array, ""]:
    """Mean negative log-likelihood of the answer tokens."""
    target = batch.tokens[:, 1:, None]
    token = -jnp.take_along_axis(log_probs(params, batch, layout), target, axis=-1)[..., 0]
    return jnp.sum(token * batch.weights[:, 1:]) / jnp.sum(batch.weights)


def start(seed: int) -> Llava:
    """Random weights, with positions and tokens loud enough to be told apart from the first step on."""
    params = init(folder.config(), jax.random.key(seed))
    assert isinstance(params, Llava)
    width = params.vision.position.weight.shape[1]
    # Fixed waves over the grid, as in the first transformers; training changes them like any other weight.
    wave = 2.0 ** -np.linspace(-1, 4, width // 4) * np.arange(pages.GRID)[:, None]
    side = np.concatenate([np.sin(wave), np.cos(wave)], axis=1)  # [12, width / 2]
    y, x = np.divmod(np.arange(pages.GRID**2), pages.GRID)
    grid = np.concatenate([side[y], side[x]], axis=1)
    places = np.concatenate([np.zeros((1, width)), grid])
    params.vision.position.weight.set_value(jnp.asarray(places, jnp.float32))
    params.decoder.embedding.weight.set_value(params.decoder.embedding.weight[...] * 25)  # 0.02 -> 0.5
    for layer in params.decoder.layers:
        for weight in (layer.out.weight, layer.down.weight):
            weight.set_value(weight[...] * (2 * len(params.decoder.layers)) ** -0.5)
    return params


def training_digits() -> Digits:
    """All digits but the held-out block; the only use of scikit-learn."""
    from sklearn.datasets import load_digits  # noqa: PLC0415

    data = load_digits()
    return Digits((data.images[: -pages.HELD_OUT] / 16).astype(np.float32), data.target[: -pages.HELD_OUT])


def vary(digits: Digits, rng: np.random.Generator) -> Digits:
    """The same digits a little turned, sheared, scaled, moved, darkened and dirtied."""
    n = len(digits.label)
    turn = np.eye(2) + rng.normal(0, 0.1, (n, 2, 2))
    middle = (pages.CELL - 1) / 2
    pixel = np.mgrid[: pages.CELL, : pages.CELL].reshape(2, -1) - middle
    place = np.einsum("nij,jp->nip", turn, pixel) + rng.normal(0, 0.4, (n, 2, 1)) + middle
    corner = np.floor(place).astype(int)
    part = place - corner
    padded = np.pad(digits.ink, [(0, 0), (4, 4), (4, 4)])
    ink = np.zeros((n, pages.CELL**2))
    for dy, wy in ((0, 1 - part[:, 0]), (1, part[:, 0])):
        for dx, wx in ((0, 1 - part[:, 1]), (1, part[:, 1])):
            row, column = np.clip(corner + [[dy], [dx]] + 4, 0, pages.CELL + 7).transpose(1, 0, 2)
            ink += wy * wx * padded[np.arange(n)[:, None], row, column]
    ink = ink * rng.uniform(0.75, 1.15, (n, 1)) + rng.normal(0, 0.04, ink.shape)
    return Digits(np.clip(ink, 0, 1).reshape(-1, pages.CELL, pages.CELL).astype(np.float32), digits.label)


def batches(digits: Digits, stage: Stage, rng: np.random.Generator) -> Iterator[Batch]:
    """Endless random batches of a stage."""
    layout = Layout.of(stage)
    while True:
        varied = vary(digits, rng)
        rows = [pages.compose(varied, rng, rows=stage.rows, length=stage.length) for _ in range(stage.batch)]
        made = [compose_row(page, stage, layout, rng) for page in rows]
        yield Batch(*(np.stack(column) for column in zip(*made, strict=True)))


def compose_row(
    page: Page, stage: Stage, layout: Layout, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One page's patches, cells, tokens and weights: the whole page, then questions about different rows."""
    others = np.setdiff1d(np.arange(pages.GRID**2), page.cells)
    cells = np.sort(np.concatenate([page.cells, rng.permutation(others)[: stage.cells - len(page.cells)]]))
    grid = page.pixels.reshape(pages.GRID, pages.CELL, pages.GRID, pages.CELL).transpose(0, 2, 1, 3)
    patches = grid.reshape(-1, pages.CELL, pages.CELL)[cells].astype(np.float32) / 127.5 - 1
    asked: list[int | None] = [None, *rng.permutation(len(page.rows))[: stage.row_questions].tolist()]
    tokens = [np.zeros(n, np.int32) for n in layout.lengths]
    weights = [np.zeros(n, np.float32) for n in layout.lengths]
    for i, row in enumerate(asked):
        ids, first = branch(pages.question(row), page.answer(row))
        tokens[i][: len(ids)] = ids
        weights[i][first : len(ids)] = 1
    return patches, cells.astype(np.int32), np.concatenate(tokens), np.concatenate(weights)


@functools.cache
def _tokenizer() -> Any:
    return folder.tokenizer()


@functools.lru_cache(maxsize=2**16)
def branch(question: str, answer: str) -> tuple[list[int], int]:
    """Ids from after the image to </s>, and where the answer starts."""
    prompt = _tokenizer().encode(f"{question} ASSISTANT:", add_special_tokens=False).ids
    return [*prompt, *_tokenizer().encode(answer, add_special_tokens=False).ids, folder.EOS], len(prompt)


Score = Callable[[Llava, Batch, Layout], Array]  # `log_probs`, compiled


def evaluate(params: Llava, rows: list[Page], score: Score) -> dict[str, float]:
    """Shares of whole pages, rows and digits read right, on complete pages.

    Teacher-forced, which for exact answers is the same as greedy decoding: an answer comes out whole exactly
    when every token is the likeliest after the right ones before it.
    """
    stage = Stage(0, pages.GRID**2, (2, 5), (2, 5), 2)
    layout, rng = Layout.of(stage), np.random.default_rng(0)
    bounds = np.cumsum([0, *layout.lengths])
    totals: dict[str, list[float]] = {"page": [], "row": [], "digit": []}
    digit_ids = [folder.VOCABULARY.index(digit) for digit in "0123456789"]
    for i in range(0, len(rows), stage.batch):
        made = [compose_row(page, stage, layout, rng) for page in rows[i : i + stage.batch]]
        batch = Batch(*(np.stack(column) for column in zip(*made, strict=True)))
        best = np.asarray(score(params, batch, layout)).argmax(-1)
        target, weight = batch.tokens[:, 1:], batch.weights[:, 1:] > 0
        right = best == target
        totals["digit"].extend(right[weight & np.isin(target, digit_ids)])
        for b, (low, high) in enumerate(itertools.pairwise(bounds)):
            part = slice(max(low - 1, 0), high - 1)
            totals["row" if b else "page"].extend((right | ~weight)[:, part].all(1))
    return {name: float(np.mean(values)) for name, values in totals.items()}


def train(
    out: Path,
    work: Path,
    settings: Settings,
    *,
    every: int = 200,
    machine: str = "",
    say: Callable[[str], None] = print,
) -> None:
    """Trains; every few steps saves a whole checkpoint in `out` and the state, to resume from, in `work`."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, settings.warmup, settings.steps, settings.learning_rate / 50
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(schedule, b2=0.98, weight_decay=settings.weight_decay,
                    mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    )  # fmt: skip
    params = start(settings.seed)
    state = optimizer.init(params)
    log: dict[str, Any] = {
        "measured": "page, row, digit: shares read right on 256 pages of held-out digits; nothing was chosen by them",
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "seconds": 0.0,
        "steps": [],
    }
    done = 0
    if (work / "state.npz").is_file():
        params, state = _restore(work / "state.npz", (params, state))
        log = json.loads((work / "log.json").read_text())
        done = log["steps"][-1]["step"]
        say(f"resumed at step {done}")

    @functools.partial(jax.jit, static_argnames="layout", donate_argnames=("params", "state"))
    def step(params: Llava, state: Any, batch: Batch, layout: Layout) -> tuple[Llava, Any, Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch, layout)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    score = jax.jit(log_probs, static_argnames="layout")
    digits = training_digits()
    rng = np.random.default_rng((settings.seed, done))
    held_out_rng = np.random.default_rng(1)
    held_out = [pages.compose(pages.held_out_digits(), held_out_rng) for _ in range(256)]
    begun, before, losses, end = time.monotonic(), log["seconds"], [], 0
    for stage in settings.stages:
        end += stage.steps
        source, layout = batches(digits, stage, rng), Layout.of(stage)
        while done < end:
            params, state, value = step(params, state, next(source), layout)
            losses.append(value)
            done += 1
            if done % 20 == 0:
                say(f"{done} {time.monotonic() - begun:.0f}s loss {np.mean(losses[-20:]):.4f}")
            if done % every == 0 or done == settings.steps:
                entry = {"step": done, "loss": float(np.mean(losses)), **evaluate(params, held_out, score)}
                log["steps"].append({name: round(number, 4) for name, number in entry.items()})
                log["seconds"] = round(before + time.monotonic() - begun)
                say(json.dumps(log["steps"][-1]))
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
