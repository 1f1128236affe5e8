"""Trains a vision-language model to read document pages: `python -m benchmarks.train_reader FOLDER`.

The model is a LLaVA: a small ViT and a projector, both with random weights, before SmolLM2-135M-Instruct, which
`python -m benchmarks.real` writes. `benchmarks.documents` makes the pages. The command writes

    FOLDER/model        the model, which `vlkv.load` reads; also that of an unfinished run
    FOLDER/log.jsonl    loss, and the share of the held-out questions that are answered exactly
    FOLDER/state.npz    weights and moments, from which the same command resumes an interrupted run

The plan for 30 minutes on one H100; these are estimates, because no such run has been made. A page of the default size,
384 pixels, has 576 tokens, and a row has 3 + 576 + 8 x 40 = 899.

- Products per row: 6 x 899 x 106e6 weights of the decoder = 0.57 TFLOP, its attention 12 x 30 x 899^2 x 576 = 0.17, the
  tower 6 x 577 x 14e6 = 0.05, logits 6 x 320 x 28e6 = 0.05. 48 rows: 41 TFLOP, or 0.16 s at 250 TFLOP/s.
- Attention with a mask is not fused: 48 x 9 x 899^2 logits in float32, written or read about 12 times in each of 30
  layers, are 0.5 TB, or 0.15 s at 3.35 TB/s.
- So a step takes about 0.3 s, and 5,000 steps take 26 minutes, with compilation less than 30. They show 240,000 pages
  with 1.9 million questions.
- Pages: 160 per second. A core makes about 25 pages of this size per second; 16 cores make 400.
- Memory: 48 x 899 tokens x 30 layers x 25 kB for the backward pass = 32 GB, weights and moments 2 GB, a few copies of
  48 x 320 x 49,152 logits in float32 (3 GB each).

Axes: B rows of a batch · t tokens of the branches of a row · V vision tokens of a page.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8
from tokenizers import Tokenizer

from benchmarks import training
from benchmarks.documents import pages
from benchmarks.real import folders
from vlkv import loading, sharding
from vlkv.config import Raw
from vlkv.errors import InputError
from vlkv.families import abstract, config_from_hf, init
from vlkv.files import read_json, replacing, replacing_folder, require_json, write_json
from vlkv.mini.folder import processor_files, save_weights
from vlkv.terminal import OneLineParser, guarded

PATCH, _HEAD_DIM = 16, 64
LENGTH = 40  # tokens of a branch: a question with its answer
SPARE = "<empty_output>"  # a token of SmolLM2 for code notebooks, which becomes the image token
BEFORE, QUESTION, END = "<|im_start|>user\n", "\n{}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Weights = dict[str, Array]  # by path


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a training run. They must be the same when it is resumed."""

    steps: int = 5000
    batch: int = 48  # pages
    rate: float = 1e-3  # peak learning rate of tower and projector; the decoder's is a fifth
    size: int = 384  # pixels per side of a page
    questions: int = 8  # per page
    frozen: bool = False  # the decoder is not trained
    width: int = 384  # of the tower
    layers: int = 8  # of the tower
    seed: int = 0


class Batch(NamedTuple):
    """Pages with questions and answers."""

    pixels: UInt8[np.ndarray | Array, "B size size"]
    tokens: Int[np.ndarray | Array, "B t"]  # the branches, concatenated
    weights: Float[np.ndarray | Array, "B t"]  # 1 where the token is part of an answer, 0 for prompts and padding


class Asked(NamedTuple):
    """A page and questions about it, with their answers."""

    pixels: UInt8[np.ndarray, "size size"]
    questions: tuple[tuple[str, str], ...]


def raw_config(text: Raw, image_token: int, s: Settings) -> dict[str, Any]:
    """The `config.json` of a LLaVA with a new tower and the decoder whose `config.json` is `text`."""
    vision = dict(model_type="clip_vision_model", hidden_size=s.width, intermediate_size=4 * s.width,
                  projection_dim=s.width, num_hidden_layers=s.layers + 1, num_attention_heads=s.width // _HEAD_DIM,
                  image_size=s.size, patch_size=PATCH, num_channels=3, hidden_act="quick_gelu",
                  layer_norm_eps=1e-5)  # fmt: skip
    return dict(model_type="llava", architectures=["LlavaForConditionalGeneration"], dtype="float32",
                image_token_index=image_token, image_seq_length=(s.size // PATCH) ** 2,
                projector_hidden_act="gelu", multimodal_projector_bias=True, vision_feature_layer=-2,
                vision_feature_select_strategy="default", tie_word_embeddings=bool(text.get("tie_word_embeddings")),
                text_config={k: v for k, v in text.items() if k != "architectures"}, vision_config=vision)  # fmt: skip


class Reader:
    """The model's structure: joins weights to a model, and makes arrays of questions."""

    def __init__(self, text: Path, s: Settings) -> None:
        """`text` is the folder of a text model with SmolLM2's tokenizer."""
        if not (text / "tokenizer.json").is_file():
            raise InputError(f"{text}: no tokenizer.json: give the folder of a SmolLM2 model")
        self.text, self.settings, self.tokenizer = text, s, Tokenizer.from_file(str(text / "tokenizer.json"))
        image_token = self.tokenizer.token_to_id(SPARE)
        if image_token is None:
            raise InputError(f"{text}: its tokenizer has no {SPARE}: give the folder of a SmolLM2 model")
        self.raw = raw_config(require_json(text / "config.json"), image_token, s)
        self.config = config_from_hf(self.raw, read_json(text / "generation_config.json"))
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(abstract(self.config))
        self.names = tuple(sharding.path_name(path) for path, _ in leaves)

    def start(self) -> Weights:
        """The weights before the first step: random ones, and the decoder's."""
        params: Any = init(self.config, jax.random.key(self.settings.seed))
        grid = training.grid_positions(self.config.vision.grid, self.settings.width)
        params.vision.position.weight.set_value(jnp.asarray(grid, jnp.float32))
        params.decoder = loading.load_params(self.text, dtype=jnp.float32).decoder
        return dict(zip(self.names, jax.tree.leaves(params), strict=True))

    def model(self, weights: Weights) -> Any:
        """The model with these weights."""
        return jax.tree.unflatten(self.structure, [weights[name] for name in self.names])

    def logits(
        self, weights: Weights, batch: Batch, dtype: DTypeLike = jnp.bfloat16
    ) -> Float[Array, "B targets vocab"]:
        """Logits of the token after each branch token, computed in `dtype`; the last branch token has none."""
        model = self.model({name: weight.astype(dtype) for name, weight in weights.items()})
        pixels = (batch.pixels.astype(jnp.float32) / 127.5 - 1).astype(dtype)
        pixels = jnp.broadcast_to(pixels[:, None], (len(pixels), 3, *pixels.shape[1:]))
        vision = model.projector(model.vision.with_attention(pixels, ())[0])
        first = np.tile(self.ids(BEFORE), (len(pixels), 1))
        before, text = (model.decoder.embedding(jnp.asarray(ids)) for ids in (first, batch.tokens))
        lengths = (LENGTH,) * (batch.tokens.shape[1] // LENGTH)
        start = first.shape[1] + vision.shape[1]
        positions = np.concatenate([np.arange(start), *(start + np.arange(n) for n in lengths)])
        return training.branch_logits(
            model.decoder, jnp.concatenate([before, vision, text], axis=1),
            jnp.broadcast_to(jnp.asarray(positions), (len(pixels), len(positions))), lengths,
            jax.checkpoint(jax.nn.dot_product_attention),
        )  # fmt: skip

    def loss(self, trained: Weights, fixed: Weights, batch: Batch) -> Float[Array, ""]:
        """Mean negative log-likelihood of the answers' tokens."""
        log_probs = jax.nn.log_softmax(self.logits(trained | fixed, batch))
        return training.mean_loss(log_probs, batch.tokens, batch.weights)

    def batch(self, asked: Sequence[Asked], branches: int) -> Batch:
        """The arrays of some pages, with space for a number of questions per page."""
        tokens = np.zeros((len(asked), branches * LENGTH), np.int32)
        weights = np.zeros(tokens.shape, np.float32)
        for row, page in enumerate(asked):
            for i, (question, answer) in enumerate(page.questions):
                prompt, said = self.ids(QUESTION.format(question)), self.ids(answer + END)
                if len(prompt) + len(said) > LENGTH:
                    raise InputError(f"{question!r} with its answer has more than {LENGTH} tokens")
                begin, first, end = np.cumsum([i * LENGTH, len(prompt), len(said)])
                tokens[row, begin:end], weights[row, first:end] = [*prompt, *said], 1
        return Batch(np.stack([page.pixels for page in asked]), tokens, weights)

    def ids(self, text: str) -> list[int]:
        """The tokens of a part of a prompt."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def write(self, folder: Path, weights: Weights) -> None:
        """Writes the model as a folder in transformers' form, which appears or changes only when it is complete."""
        tokens = (read_json(self.text / "tokenizer_config.json") or {}) | {"processor_class": "LlavaProcessor"}
        with replacing_folder(folder) as fresh:
            made = processor_files(self.settings.size, PATCH)
            for name, content in {"config.json": self.raw, "tokenizer_config.json": tokens, **made}.items():
                write_json(fresh / name, content)
            shutil.copy(self.text / "generation_config.json", fresh)
            tokenizer = (self.text / "tokenizer.json").read_text(encoding="utf-8").replace(f'"{SPARE}"', '"<image>"')
            (fresh / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
            (fresh / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
            save_weights(fresh, self.model(weights), self.raw)


def training_pages(step: int, s: Settings) -> list[Asked]:
    """The pages of one step, each with random questions: they depend on nothing but the step and the settings."""
    asked = []
    for number in range(step * s.batch, (step + 1) * s.batch):
        page = pages.page(number, s.size)
        chosen = np.random.default_rng([s.seed, number]).permutation(len(page.questions))[: s.questions]
        asked.append(Asked(page.pixels, tuple(page.questions[i] for i in chosen)))
    return asked


def made_ahead(first: int, s: Settings, workers: int) -> Iterator[list[Asked]]:
    """`training_pages` of the steps from `first` on, made by other processes before they are needed.

    Args:
        first: the first step.
        s: the settings.
        workers: number of processes; 0: this process makes them.
    """
    if not workers:
        yield from (training_pages(step, s) for step in range(first, s.steps))
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Future[list[Asked]]] = deque()
        for step in range(first, s.steps):
            waiting.append(pool.submit(training_pages, step, s))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        yield from (one.result() for one in waiting)


@functools.cache
def held_out_pages(size: int, count: int) -> list[Asked]:
    """The first held-out pages of a size with their committed questions."""
    asked = pages.held_out(size)[:count]
    return [Asked(pages.page(i, size, held_out=True).pixels, (one,)) for i, one in enumerate(asked)]


def train(
    out: Path, text: Path, s: Settings, *, every: int = 500, workers: int = 0, held_out: int = pages.COUNT,
    say: Callable[[str], None] = print,
) -> str:  # fmt: skip
    """Trains the model. A run that was interrupted resumes at its last saved state.

    Args:
        out: the folder to write.
        text: the folder of the text model.
        s: the settings.
        every: steps between two writes of model and state, with the accuracy on held-out pages.
        workers: number of processes that make pages; 0: this process makes them.
        held_out: number of held-out questions.
        say: prints a line.

    Returns:
        The path of the model.

    Raises:
        InputError: the folder contains a run with other settings; no pages of this size; no SmolLM2 tokenizer.
    """
    examined = held_out_pages(s.size, held_out)
    reader = Reader(text, s)
    trained = reader.start()
    fixed = {name: trained.pop(name) for name in reader.names if s.frozen and name.startswith("decoder.")}
    schedule = optax.warmup_cosine_decay_schedule(0.0, s.rate, min(200, s.steps // 10), s.steps, s.rate / 50)
    optimizer = optax.chain(
        training.make_optimizer(schedule, clip=1.0, weight_decay=0.05),
        optax.masked(optax.scale(0.2), {name: name.startswith("decoder.") for name in trained}),
    )
    state, file = optimizer.init(trained), out / "state.npz"
    log: list[dict[str, Any]] = []
    begin: dict[str, Any] = {"settings": dataclasses.asdict(s), "text model": text.name}
    if file.is_file():
        (trained, state), (before, *log) = training.restore(file, (trained, state))
        if before != begin:
            raise InputError(f"{out} contains a run with other settings, {before}: repeat them or give another folder")
    done, seconds = (log[-1]["step"], log[-1]["seconds"]) if log else (0, 0.0)
    out.mkdir(parents=True, exist_ok=True)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(trained: Weights, state: Any, fixed: Weights, batch: Batch) -> tuple[Weights, Any, Array]:
        value, gradient = jax.value_and_grad(reader.loss)(trained, fixed, batch)
        updates, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, value

    predict = jax.jit(lambda weights, batch: jnp.argmax(reader.logits(weights, batch), axis=-1))
    with replacing(out / "log.jsonl") as partial:  # lines after the saved state are dropped
        partial.write_text("".join(json.dumps(line) + "\n" for line in (begin, *log)), encoding="utf-8")
    started, losses = time.monotonic(), []
    for asked in made_ahead(done, s, workers):
        trained, state, value = update(trained, state, fixed, reader.batch(asked, s.questions))
        losses.append(value)
        done += 1
        whole = done % every == 0 or done == s.steps
        if done % min(20, every) and not whole:
            continue
        line = {"step": done, "loss": round(float(np.mean(losses)), 4)}
        if whole:
            right: list[bool] = []
            for first in range(0, len(examined), s.batch):
                batch = reader.batch(examined[first : first + s.batch], 1)
                best = np.asarray(predict(trained | fixed, batch))
                right += training.exact_answers(best, batch.tokens, batch.weights, (LENGTH,))[0]
            line["exact"] = round(float(np.mean(right)), 4)
        line["seconds"] = round(seconds + time.monotonic() - started, 1)
        losses = []
        log.append(line)
        with (out / "log.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        say(json.dumps(line))
        if whole:
            training.save(file, (trained, state), [begin, *log])
            reader.write(out / "model", trained | fixed)
    return str(out / "model")


def main() -> int:
    """Reads the options and trains."""
    parser = OneLineParser(prog="python -m benchmarks.train_reader", description=(__doc__ or "").partition(":")[0])
    s = Settings()
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to write")
    parser.add_argument("--decoder", type=Path, help="folder of a SmolLM2 model (default: that of benchmarks.real)")
    parser.add_argument("--steps", type=int, default=s.steps)
    parser.add_argument("--batch", type=int, default=s.batch, help="pages of a step")
    parser.add_argument("--rate", type=float, default=s.rate, help="learning rate; the decoder's is a fifth")
    parser.add_argument("--size", type=int, default=s.size, choices=pages.SIZES, help="pixels per side of a page")
    parser.add_argument("--questions", type=int, default=s.questions, help="per page")
    parser.add_argument("--frozen", action="store_true", help="do not train the decoder")
    parser.add_argument("--every", type=int, default=500, help="steps between saved states")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that make pages")
    args: argparse.Namespace = parser.parse_args()

    def run() -> str:
        bad = [name for name in ("steps", "batch", "rate", "questions", "every") if not getattr(args, name) > 0]
        if bad or args.workers < 0:
            raise InputError(f"--{bad[0]} must be greater than 0" if bad else "--workers must be at least 0")
        settings = Settings(args.steps, args.batch, args.rate, args.size, args.questions, args.frozen)
        text = folders.written() if args.decoder is None else args.decoder
        return train(args.folder, text, settings, every=args.every, workers=args.workers)

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
