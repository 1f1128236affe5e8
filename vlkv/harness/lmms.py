"""lmms-eval's model class: its requests to questions, our answers to its results.

Of two of its conventions one must know. `loglikelihood` gives the mean NEGATIVE log-probability per token, as its own
models do: its tasks of multiple choice take the least. And it adds "\\n\\n" to `until` wherever a task says nothing,
which would cut a chat model's answer after the first paragraph; like its own Qwen2-VL we do not stop there.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from PIL import Image
from tqdm import tqdm

from vlkv import loading, policies
from vlkv.commands.options import policy_from
from vlkv.errors import InputError
from vlkv.harness.answering import Answer, Answerer, Question, sampling_from
from vlkv.processing.pictures import Video

_STAGES = tuple(inspect.signature(policies.compose).parameters)[1:]
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


class Loss(NamedTuple):
    """What `loglikelihood` gives for each request, inside a GenerationResult.

    lmms-eval 0.7.3 makes a string of a bare pair, and of one that comes back from its response cache, and then cannot
    score it. So the pair comes wrapped, and calls itself blank, which keeps it out of that cache.
    """

    loss: float
    greedy: bool

    def strip(self) -> str:
        """Nothing."""
        return ""


class Vlkv(lmms):
    """`--model vlkv`.

    Args:
        pretrained: a checkpoint folder, or a hub id.
        policy: its name; see `vlkv policies`.
        batch_size: questions of a batch.
        max_new_tokens: bound on what tasks ask for: the cache's tail has that many slots.
        max_frames: of a video file, evenly spread.
        fps: frames a second of what they are spread over, for families that ask.
        dtype: of the weights; None: the checkpoint's.
        layout: "checkpoint" or "pad", see `vlkv.load`.
        seed: of sampling and of random policies.
        device: must be None: jax chooses (`JAX_PLATFORMS`).
        max_batch_size: must be None.
        options: of the policy: keep, budget, scope and its own; allocate, merge, step, reduce, store name another
            method's stage, as `--with` of `vlkv generate` does (`store=kivi(bits=4)`).

    Raises:
        InputError: an option that there is not, or a checkpoint that cannot be loaded.
    """

    is_simple = True
    device = "cpu"  # of the harness' own counters, where it runs several processes

    def __init__(
        self,
        pretrained: str,
        policy: str = "full",
        batch_size: int | str = 1,
        max_new_tokens: int | None = None,
        max_frames: int = 32,
        fps: float = 2.0,
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
        made = policy_from(_arguments(policy, options), lambda: processor.config)
        self.max_new_tokens, self.layout, self.max_frames, self.fps = max_new_tokens, layout, max_frames, fps
        self.model = Answerer(
            params=loading.load_params(pretrained, dtype=dtype), processor=processor, policy=made,
            batch_size=int(batch_size), seed=seed,
        )  # fmt: skip

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """One answer to each request; those with the same generation options share batches."""
        arguments = [request.args for request in requests]
        questions = [self._question(context, to_visual, *where) for context, _, to_visual, *where in arguments]
        return self._generate(questions, [options for _, options, *_ in arguments])

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        """Rounds whose next question the task makes from the answers before; each is read anew."""
        answers = []
        for request in requests:
            context, options, to_visual, to_text, *where = request.args
            question, said, info = self._question(context, to_visual, *where), [], None
            while True:
                said.append(self._generate([question], [options])[0].text)
                visuals, context, ended, said, info = to_text(
                    self._document(*where), previous_output=said, round_idx=len(said), previous_round_info=info
                )
                said = list(said)
                if ended:
                    break
                question = Question(context, self._pictures(visuals))
            answers.append(said)
        return answers

    def loglikelihood(self, requests: list[Instance]) -> list[GenerationResult]:
        """Mean negative log-probability per token, and whether greedy decoding would say the same."""
        groups: dict[Any, tuple[Question, list[str], list[int]]] = {}
        for i, request in enumerate(requests):
            if len(request.args) < 6:
                raise InputError("acc_mutual_info asks for answers without a question, which a chat model has not")
            context, target, to_visual, *where = request.args
            place = (context, *where)
            if place not in groups:
                groups[place] = (self._question(context, to_visual, *where), [], [])
            groups[place][1].append(target if isinstance(target, str) else str(target(self._document(*where))))
            groups[place][2].append(i)
        questions, texts, places = zip(*groups.values(), strict=True) if groups else ((), (), ())
        with self._progress(len(questions)) as bar:
            found = self._with(bar).likelihoods(questions, texts)
        results = {
            i: GenerationResult(Loss(-one.log_probability / one.tokens, one.greedy))
            for group, mine in zip(places, found, strict=True)
            for i, one in zip(group, mine, strict=True)
        }
        return [results[i] for i in range(len(requests))]

    def _generate(self, questions: Sequence[Question], options: Sequence[dict[str, Any]]) -> list[GenerationResult]:
        begin = time.perf_counter()
        results: dict[int, Answer] = {}
        kinds: dict[Any, list[int]] = {}
        for i, one in enumerate(options):
            kinds.setdefault(sampling_from(one, layout=self.layout, most=self.max_new_tokens), []).append(i)
        with self._progress(len(questions)) as bar:
            for (sampling, until), places in kinds.items():
                ends = [end for end in until if end != "\n\n"]
                answers = self._with(bar).answers([questions[i] for i in places], sampling, ends)
                results |= dict(zip(places, answers, strict=True))
        seconds, tokens = time.perf_counter() - begin, sum(answer.tokens for answer in results.values())
        log_metrics(
            total_elapsed_time=seconds, total_gen_tokens=tokens, avg_speed=tokens / seconds,
            additional_metrics={"cache_mib": max(answer.cache_bytes for answer in results.values()) / 2**20},
        )  # fmt: skip
        return [
            GenerationResult(answer.text, TokenCounts(input_tokens=answer.prompt_tokens, output_tokens=answer.tokens))
            for _, answer in sorted(results.items())
        ]

    def _progress(self, count: int) -> Any:
        return tqdm(total=count, disable=self.rank != 0, desc=f"vlkv, {type(self.model.policy).__name__}")

    def _with(self, bar: Any) -> Answerer:
        return dataclasses.replace(self.model, done=bar.update)

    def _document(self, number: int, task: str, split: str) -> Any:
        return self.task_dict[task][split][number]

    def _question(self, context: str, to_visual: Any, *where: Any) -> Question:
        return Question(context, lambda: self._pictures(to_visual(self._document(*where))))  # not all at once

    def _pictures(self, visuals: Iterable[Any] | None) -> tuple[Any, ...]:
        """What a task's `doc_to_visual` gives: pictures, arrays, paths of pictures or of videos; nested at times."""
        found: list[Any] = []
        for visual in visuals or ():
            if isinstance(visual, list | tuple):
                found += self._pictures(visual)
            elif isinstance(visual, np.ndarray) and visual.ndim == 3:
                found.append(Image.fromarray(visual))
            elif isinstance(visual, str | Path) and Path(visual).suffix.lower() not in _PICTURES:
                found.append(self._video(str(visual)))
            elif isinstance(visual, Image.Image | Video | str | Path):
                found.append(visual)
            elif visual is not None:
                raise InputError(f"the task shows a {type(visual).__name__}: pictures and videos can be read, no sound")
        return tuple(found)

    def _video(self, path: str) -> Video:
        from lmms_eval.models.model_utils.load_video import read_video  # noqa: PLC0415 (needs PyAV)

        frames = read_video(path, num_frm=self.max_frames)
        return Video(frames=[Image.fromarray(np.asarray(frame)) for frame in frames], fps=self.fps)


def _arguments(policy: str, options: dict[str, Any]) -> argparse.Namespace:
    """The same as `vlkv generate` would have parsed."""
    own = {name: options.pop(name, None) for name in ("keep", "budget", "scope")}
    parts = [f"{stage}={options.pop(stage)}" for stage in _STAGES if stage in options]
    return argparse.Namespace(
        policy=policy, **own, option=[f"{name}={value!r}" for name, value in options.items()], parts=parts
    )
