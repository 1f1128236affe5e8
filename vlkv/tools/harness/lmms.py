"""The model class for lmms-eval: converts its requests to questions, and answers to its results.

Two conventions of lmms-eval matter. `loglikelihood` returns the mean NEGATIVE log-probability per token, as in its own
models, because its multiple-choice tasks choose the smallest value. And it adds "\\n\\n" to `until` if a task does not
set it. This would cut an answer after its first paragraph, so we ignore it, like lmms-eval's own Qwen2-VL.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from PIL import Image

from vlkv import loading
from vlkv.compression.slots import STAGES
from vlkv.errors import InputError
from vlkv.processing import Video, read_video
from vlkv.terminal import progress_bar
from vlkv.tools.commands.options import policy_of
from vlkv.tools.harness.answering import Answer, Answerer, Question, sampling_from

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".jp2", ".avif", ".tga")


class Loss(NamedTuple):
    """The result of `loglikelihood` for one request; returned inside a GenerationResult.

    lmms-eval 0.7.3 converts a plain pair to a string, and cannot score one from its response cache. `strip` makes this
    one look like an empty answer, because empty answers are not cached.
    """

    loss: float
    greedy: bool

    def strip(self) -> str:
        """An empty text."""
        return ""


class Vlkv(lmms):
    """The model `--model vlkv` of lmms-eval.

    Args:
        pretrained: a checkpoint folder, or a hub id.
        policy: name of the policy; see `vlkv policies`.
        batch_size: questions per batch.
        max_new_tokens: limit on the new tokens that tasks request. The cache has a slot for each of them.
        max_frames: limit on the frames of a video file; the frames are evenly spread.
        fps: frames per second of these frames, for families that use it; None: as in the file.
        dtype: of the weights; None: as in the checkpoint.
        layout: "checkpoint" or "pad", see `vlkv.load`.
        seed: for sampling and random policies.
        device: must be None or "auto", because jax chooses the device (`JAX_PLATFORMS`).
        max_batch_size: must be None.
        options: options of the policy: keep, budget, scope and its own. allocate, merge, step, reduce, store and smooth
            replace a stage, as in `compose` (`store=kivi(bits=4)`).

    Raises:
        InputError: an option is unknown, or the checkpoint cannot be loaded.
    """

    is_simple = True
    device = "cpu"  # where lmms-eval puts its own counters if it runs several processes

    def __init__(
        self,
        pretrained: str,
        policy: str = "full",
        batch_size: int | str = 1,
        max_new_tokens: int | None = None,
        max_frames: int = 32,
        fps: float | None = None,
        dtype: str | None = None,
        layout: Any = "checkpoint",
        seed: int = 0,
        device: str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1 or max_batch_size is not None:
            raise InputError(f"batch_size={batch_size!r} must be a whole number of at least 1, without max_batch_size")
        if device not in (None, "auto"):
            raise InputError(f"device={device!r}: jax chooses the device; set JAX_PLATFORMS=cpu, cuda or tpu instead")
        processor = loading.load_processor(pretrained, layout=layout)
        compression = policy_of(*_text(policy, options), lambda: processor.config)
        self.max_new_tokens, self.layout, self.max_frames, self.fps = max_new_tokens, layout, max_frames, fps
        params = loading.load_params(pretrained, dtype=dtype)
        self.model = Answerer(
            params=params, processor=processor, policy=compression, batch_size=int(batch_size), seed=seed
        )

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """One answer to each request. Requests with the same generation options share batches."""
        arguments = [request.args for request in requests]
        questions = [self._question(context, to_visual, *document) for context, _, to_visual, *document in arguments]
        return self._generate(questions, [options for _, options, *_ in arguments])

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        """Several rounds: the task makes the next question from the earlier answers. Each round is prefilled anew."""
        answers = []
        for request in requests:
            context, options, to_visual, to_text, *document = request.args
            question, rounds, info = self._question(context, to_visual, *document), [], None
            while True:
                rounds.append(self._generate([question], [options])[0].text)
                visuals, context, ended, rounds, info = to_text(
                    self._document(*document), previous_output=rounds, round_idx=len(rounds), previous_round_info=info
                )
                rounds = list(rounds)
                if ended:
                    break
                question = Question(context, self._pictures(visuals))
            answers.append(rounds)
        return answers

    def loglikelihood(self, requests: list[Instance]) -> list[GenerationResult]:
        """Mean negative log-probability per token, and whether greedy decoding gives the same tokens."""
        groups: dict[Any, tuple[Question, list[str], list[int]]] = {}
        for i, request in enumerate(requests):
            if len(request.args) < 6:
                raise InputError("acc_mutual_info is not supported: it needs answers without a question")
            context, target, to_visual, *document = request.args
            question = self._question(context, to_visual, *document)
            _, targets, indices = groups.setdefault((context, *document), (question, [], []))
            targets.append(target if isinstance(target, str) else str(target(self._document(*document))))
            indices.append(i)
        with self._progress(len(groups)) as model:
            questions, texts, _ = zip(*groups.values(), strict=True) if groups else ((), (), ())
            likelihoods = model.likelihoods(questions, texts)
        results: dict[int, GenerationResult] = {}
        for (_, _, indices), of_question in zip(groups.values(), likelihoods, strict=True):
            for i, likely in zip(indices, of_question, strict=True):
                results[i] = GenerationResult(Loss(-likely.log_probability / likely.tokens, likely.greedy))
        return [results[i] for i in range(len(requests))]

    def _generate(self, questions: Sequence[Question], options: Sequence[dict[str, Any]]) -> list[GenerationResult]:
        jax.block_until_ready(self.model.params)
        begin = time.perf_counter()
        results: dict[int, Answer] = {}
        groups: dict[Any, list[int]] = {}
        for i, each in enumerate(options):
            groups.setdefault(sampling_from(each, layout=self.layout, most=self.max_new_tokens), []).append(i)
        with self._progress(len(questions)) as model:
            for (sampling, until), indices in groups.items():
                ends = [end for end in until if end != "\n\n"]
                answers = model.answers([questions[i] for i in indices], sampling, ends)
                results |= dict(zip(indices, answers, strict=True))
        seconds, tokens = time.perf_counter() - begin, sum(answer.tokens for answer in results.values())
        speed = {"total_elapsed_time": seconds, "total_gen_tokens": tokens, "avg_speed": tokens / seconds}
        largest = max(answer.cache_bytes for answer in results.values())
        log_metrics(**speed, additional_metrics={"cache_mib": largest / 2**20})
        return [
            GenerationResult(answer.text, TokenCounts(input_tokens=answer.prompt_tokens, output_tokens=answer.tokens))
            for _, answer in sorted(results.items())
        ]

    @contextmanager
    def _progress(self, count: int) -> Iterator[Answerer]:
        """The model, with a progress bar that counts its questions."""
        with progress_bar(f"vlkv, {type(self.model.policy).__name__}", count, hidden=self.rank != 0) as advance:
            yield dataclasses.replace(self.model, done=advance)

    def _document(self, number: int, task: str, split: str) -> Any:
        return self.task_dict[task][split][number]

    def _question(self, context: str, to_visual: Any, *document: Any) -> Question:
        # Pictures are loaded batch by batch, not all at once.
        return Question(context, lambda: self._pictures(to_visual(self._document(*document))))

    def _pictures(self, visuals: Iterable[Any] | None) -> tuple[Any, ...]:
        """Converts the result of `doc_to_visual`: pictures, arrays, paths of pictures or videos, and lists of these."""
        pictures: list[Any] = []
        for visual in visuals or ():
            if isinstance(visual, list | tuple):
                pictures += self._pictures(visual)
            elif isinstance(visual, np.ndarray) and visual.ndim == 3:
                pictures.append(Image.fromarray(visual))
            elif isinstance(visual, str | Path) and Path(visual).suffix.lower() not in _PICTURES:
                video = read_video(str(visual), self.max_frames)
                pictures.append(video if self.fps is None else Video(video.frames, self.fps))
            elif isinstance(visual, Image.Image | Video | str | Path):
                pictures.append(visual)
            elif visual is not None:
                raise InputError(f"the task shows a {type(visual).__name__}; only pictures and videos are supported")
        return tuple(pictures)


def _text(policy: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of the policy, composed if options name stages, and its other options.

    lmms-eval splits its arguments at commas, so stages are arguments of their own here.
    """
    parts = [f"{stage}={options.pop(stage)}" for stage in (*STAGES, "smooth") if stage in options]
    return f"compose({', '.join([policy, *parts])})" if parts else policy, options
