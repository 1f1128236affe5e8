"""Trains the demo model in vlkv/mini/checkpoint: `python -m benchmarks.train_mini --out FOLDER`.

Three measures make training cheap enough for two CPU cores:

- A row has its images once, followed by several questions with their answers (branches). A static mask prevents each
  question from attending to the others, and all start at the same position. So the logits of a question are those that
  `vlkv.forward` computes for it alone.
- Early stages show the cells with digits and a random choice of the others, at their true positions. Later
  stages show more cells.
- Early stages have ledger pages with few entries.

The steps of a stage alternate between its tasks, so that one checkpoint learns all of them.

Axes: B rows of a batch · I images of a row · V vision tokens shown per image · T tokens of a row · t tokens of its
branches.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from benchmarks.train_data import (
    BLOCK,
    TASKS,
    VISION_START,
    Batch,
    Layout,
    Stage,
    Task,
    batches,
    make_batch,
    tokenizer,
    training_digits,
)
from vlkv import loading
from vlkv.families import init
from vlkv.families.family import VisionLanguageModel
from vlkv.files import replacing
from vlkv.mini import folder, pages


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


def log_probs(params: VisionLanguageModel, batch: Batch, layout: Layout) -> Float[Array, "B targets vocab"]:
    """Log-probabilities of the token after each branch token; the last branch token has none."""
    rows = len(batch.tokens)
    vision, cells = _vision(params, batch, layout.task.pooled)
    x = params.decoder.embedding(jnp.concatenate([_prefix(rows), batch.tokens], axis=1))
    x = jnp.concatenate([x[:, :VISION_START], vision, x[:, VISION_START:]], axis=1)
    first = jnp.broadcast_to(jnp.arange(VISION_START), (rows, VISION_START))
    text = jnp.broadcast_to(layout.positions, batch.tokens.shape)
    positions = jnp.concatenate([first, VISION_START + cells, text], axis=1)
    branches = sum(layout.lengths)
    mask = jnp.asarray(branch_mask(x.shape[1] - branches, layout.lengths))[None, None]

    def attend(i: int, carry: None, q: Array, k: Array, v: Array) -> tuple[None, Array]:
        return carry, jax.nn.dot_product_attention(q, k, v, mask=mask)

    _, x = params.decoder.walk(None, x, positions[..., None], attend)
    return jax.nn.log_softmax(params.decoder.logits(x[:, -branches:-1]))


def branch_mask(prefix: int, lengths: Sequence[int]) -> Bool[np.ndarray, "T T"]:
    """The attention mask of a row: a token attends to earlier tokens of the prefix and of its own branch."""
    branch = np.concatenate([np.full(prefix, -1), *(np.full(n, i) for i, n in enumerate(lengths))])
    past = np.tri(len(branch), dtype=bool)
    return past & ((branch[None, :] == -1) | (branch[:, None] == branch[None, :]))


def _prefix(rows: int) -> Int[np.ndarray, "B 3"]:
    return np.tile(tokenizer().encode("USER:").ids, (rows, 1))


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
        x = jnp.mean(x.reshape(rows, images, shown // BLOCK, BLOCK, -1), axis=3)
        sequence = sequence[..., ::BLOCK]
    return x.reshape(rows, -1, x.shape[-1]), sequence.reshape(rows, -1)


def loss(params: VisionLanguageModel, batch: Batch, layout: Layout) -> Float[Array, ""]:
    tokens, weights = jnp.asarray(batch.tokens), jnp.asarray(batch.weights)
    token = -jnp.take_along_axis(log_probs(params, batch, layout), tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(token * weights[:, 1:]) / jnp.sum(weights)


def start(seed: int, checkpoint: Path | None = None) -> VisionLanguageModel:
    """The weights of an earlier demo model, or random ones.

    Of these, the embeddings of positions and tokens are scaled up so that the first layers can tell them apart from the
    first step on.
    """
    if checkpoint is not None:
        structure = jax.tree.structure(init(folder.config(), jax.random.key(0)))
        leaves = jax.tree.leaves(loading.load_params(checkpoint))
        return jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
    params = init(folder.config(), jax.random.key(seed))
    assert isinstance(params, VisionLanguageModel)
    width = params.vision.position.weight.shape[1]
    positions = grid_positions(pages.GRID, width)  # training changes them like all other weights
    params.vision.position.weight.set_value(jnp.asarray(positions, jnp.float32))
    params.decoder.embedding.weight.set_value(params.decoder.embedding.weight[...] * 25)  # 0.02 -> 0.5
    for layer in params.decoder.layers:
        assert layer.down is not None
        for weight in (layer.out.weight, layer.down.weight):
            weight.set_value(weight[...] * (2 * len(params.decoder.layers)) ** -0.5)
    return params


def grid_positions(grid: int, width: int) -> Float[np.ndarray, "V D"]:
    """Initial position embeddings of a tower with a class token: sinusoids over the grid (Vaswani et al. 2017)."""
    wave = 2.0 ** -np.linspace(-1, 4, width // 4) * np.arange(grid)[:, None]
    side = np.concatenate([np.sin(wave), np.cos(wave)], axis=1)  # [grid, width / 2]
    y, x = np.divmod(np.arange(grid**2), grid)
    return np.concatenate([np.zeros((1, width)), np.concatenate([side[y], side[x]], axis=1)])


Score = Callable[[VisionLanguageModel, Batch, Layout], Array]  # compiled `log_probs`


def evaluate(params: VisionLanguageModel, task: Task, score: Score, count: int = 48) -> dict[str, float]:
    """Shares of correct answers ("exact", and "whole" for whole digit pages) and correct digits, on held-out pages.

    All cells of the `count` pages are shown.
    """
    stage = Stage(0, task.images * pages.GRID**2, (4, 10), 4, 6, ())
    count //= task.images
    layout, rng = Layout.of(stage, task), np.random.default_rng(1)
    names = ("exact", "digit", "whole") if task.kind == "digits" else ("exact", "digit")
    correct: dict[str, list[bool]] = {name: [] for name in names}
    for _ in range(count // stage.batch):
        batch = make_batch(pages.held_out_digits(), stage, layout, rng)
        best = np.asarray(score(params, batch, layout)).argmax(-1)
        target, weight = batch.tokens[:, 1:], np.asarray(batch.weights)[:, 1:] > 0
        right = best == target
        correct["digit"].extend(right[weight & (target > folder.EOS)])
        for b, answers in enumerate(exact_answers(right, weight, layout.lengths)):
            correct["whole" if task.kind == "digits" and b == 0 else "exact"].extend(answers)
    return {name: round(float(np.mean(values)), 4) for name, values in correct.items()}


def exact_answers(
    right: Bool[np.ndarray, "B targets"], asked: Bool[np.ndarray, "B targets"], lengths: Sequence[int]
) -> list[list[bool]]:
    """For each branch, whether the answers are right, of the rows that have a question there.

    Each token is predicted after the correct earlier tokens. For whole answers this is the same as greedy decoding,
    which gives the correct answer exactly if every token is the most likely one after the correct tokens before it.
    """
    parts = [slice(max(low - 1, 0), high - 1) for low, high in itertools.pairwise([0, *itertools.accumulate(lengths)])]
    return [(right | ~asked)[asked[:, part].any(1), part].all(1).tolist() for part in parts]


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
    optimizer, params = _optimizer(settings), start(settings.seed, checkpoint)
    tree, log, done = (params, optimizer.init(params)), _new_log(settings, machine, checkpoint), 0
    if (work / "state.npz").is_file():
        tree, log = restore(work / "state.npz", tree)
        done = log["steps"][-1]["step"]
        if log["settings"] != json.loads(json.dumps(dataclasses.asdict(settings))):
            log[f"settings from step {done}"] = dataclasses.asdict(settings)
        say(f"resumed at step {done}")

    @functools.partial(jax.jit, static_argnames="layout", donate_argnames="tree")
    def step(tree: tuple[VisionLanguageModel, Any], batch: Batch, layout: Layout) -> tuple[Any, Array]:
        params, state = tree
        value, gradient = jax.value_and_grad(loss)(params, batch, layout)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    score = jax.jit(log_probs, static_argnames="layout")
    digits, rng = training_digits(), np.random.default_rng((settings.seed, done))
    begun, before, losses, end = time.monotonic(), log["seconds"], [], 0
    for stage in settings.stages:
        end += stage.steps
        sources = {name: batches(digits, stage, TASKS[name], rng) for name in stage.turns}
        while done < end:
            name = stage.turns[done % len(stage.turns)]
            tree, value = step(tree, next(sources[name]), Layout.of(stage, TASKS[name]))
            losses.append(value)
            done += 1
            if done % 20 == 0:
                say(f"{done} {time.monotonic() - begun:.0f}s loss {np.mean(losses[-20:]):.4f}")
            if done % every == 0 or done == end:
                entry = {"step": done, "loss": round(float(np.mean(losses)), 4)}
                if done == end:
                    entry |= {name: evaluate(tree[0], TASKS[name], score) for name in dict.fromkeys(stage.turns)}
                log["steps"].append(entry)
                log["seconds"] = round(before + time.monotonic() - begun)
                say(json.dumps(entry))
                losses = []
                folder.write(out, tree[0], log)
                save(work / "state.npz", tree, log)


def _optimizer(settings: Settings) -> optax.GradientTransformation:
    schedule = optax.sgdr_schedule(
        dict(init_value=0.0, peak_value=peak, warmup_steps=settings.warmup, decay_steps=steps, end_value=peak / 50)
        for steps, peak in settings.cycles
    )
    matrices = functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1)  # only their weights decay
    adam = optax.adamw(schedule, b2=0.98, weight_decay=settings.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(settings.clip), adam)


def _new_log(settings: Settings, machine: str, checkpoint: Path | None) -> dict[str, Any]:
    return {
        "measured": "after each stage, per task: shares right on 48 sets of held-out pages: exact answers, digits, "
        "and whole pages (of digit pages); the stages from step 2350 on were planned after looking at them",
        "machine": machine,
        "start": "random weights" if checkpoint is None else "the weights of an earlier demo model",
        "settings": dataclasses.asdict(settings),
        "seconds": 0.0,
        "steps": [],
    }


def save(file: Path, tree: Any, log: Any) -> None:
    """Writes arrays and a log as one file, which replaces an earlier one only when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as partial, partial.open("wb") as stream:
        np.savez(stream, *jax.tree.leaves(tree), log=np.asarray(json.dumps(log)))


def restore(file: Path, like: Any) -> tuple[Any, Any]:
    """The arrays, in the structure of `like`, and the log that `save` has written."""
    leaves, structure = jax.tree.flatten(like)
    with np.load(file) as saved:
        arrays = [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(structure, arrays), json.loads(str(saved["log"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("mini-checkpoint"), help="the folder to write")
    parser.add_argument(
        "--work", type=Path, default=Path("mini-work"), help="folder of the state, from which a run resumes"
    )
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="an earlier demo model to start from")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--machine", default="", help="description of the machine, for the log")
    args = parser.parse_args()
    train(args.out, args.work, Settings(), checkpoint=args.start, every=args.every, machine=args.machine)


if __name__ == "__main__":
    main()
