"""A conversation about images: questions are answered from one compressed cache, which grows with the conversation."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vlkv.cache.pool import PackedCache
from vlkv.cache.resizing import resize
from vlkv.compression.checking import require_fit
from vlkv.compression.compose import compose
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.decode import check_positions, check_room, choose_token, next_token
from vlkv.generation.extend import extend
from vlkv.generation.nan import check_tokens
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs, single_key
from vlkv.policies.full import Full
from vlkv.processing import Processor
from vlkv.processing.images import Picture
from vlkv.processing.pictures import RowImages, Video, as_list, count
from vlkv.processing.prompts import context_part, end_of_answer, joined, literal, shared
from vlkv.processing.watching import Frames, Watching

_ANSWERS = 4  # a new cache has slots for this number of answers of the greatest length; it grows later
_ANY = "x"  # placeholder for a question or an answer
_REASONED = f"<think>\n{_ANY}\n</think>\n\n{_ANY}"  # an answer with reasoning, which a template may leave out
_extend = jax.jit(extend, donate_argnames="cache")


class Chat:
    """A conversation. Every question is answered with the images, earlier questions and answers in the cache.

        chat = vlkv.Chat(params, processor, "page.png", policy=policies.SnapKV(keep=0.2))
        print(chat.ask("what does row one say?"))
        print(chat.ask("what does row two say?"))

    The policy compresses the prompt of the first question. Later questions, their images, and all answers are not
    compressed, unless the policy evicts while decoding, or selects again: with `compose(SnapKV(budget=512), every=128)`
    a layer never has more than 640 entries, however long the conversation is.

    Templates of models that think leave the reasoning out of earlier turns. With such a template the chat keeps a copy
    of the cache before each answer. If the template then writes that answer in another way, the next question continues
    from the copy, and the cache is the same as if the reasoning had never been there.

    Attributes:
        cache: the cache of the conversation; None before the first question.
        turns: (question, answer) pairs so far.
    """

    cache: PackedCache | None
    turns: list[tuple[str, str]]

    def __init__(
        self,
        params: Model,
        processor: Processor,
        image: RowImages = None,
        *,
        policy: Policy | None = None,
        sampling: Greedy | None = None,
        key: PRNGKeyArray | None = None,
        query_agnostic: bool = False,
        context: str = "",
        keep_system: bool = False,
        after_turns: bool = False,
    ) -> None:
        """Starts a conversation.

        Args:
            params: the model.
            processor: of the same checkpoint.
            image: of the first question: an image, a list of images and videos, or None.
            policy: None: the full cache.
            sampling: None: `Greedy()`. Its `max_new_tokens` limits each answer.
            key: for random policies and for `Sample`.
            query_agnostic: compress the images and the context now, so that the kept entries do not depend on the first
                question.
            context: text that comes before the first question. `<image>` may mark the place of an image in it.
            keep_system: always keep all tokens before the first question and its images: the system prompt. The policy
                needs scope="all".
            after_turns: select entries again after each answer, and not only when the cache is full. The policy needs
                an interval, as in `compose(..., every=n)`; with it, memory is constant over any number of turns.

        Raises:
            InputError: another processor, an image that cannot be used, a policy that does not fit, a missing key, or
                NaN logits.
        """
        if not isinstance(processor, Processor):
            raise InputError("a chat needs vlkv's own processor: params, processor = vlkv.load(...)")
        self.params, self.processor = params, processor
        self.policy = Full() if policy is None else policy
        if keep_system:
            self.policy = compose(self.policy, first=self._system_tokens())
        if after_turns and not slots_of(self.policy).every:
            raise InputError("after_turns=True selects entries again: give a policy such as compose(..., every=128)")
        self._after_turns = after_turns
        self.sampling = (Greedy() if sampling is None else sampling).filled(params.config)
        self.cache, self.turns = None, []
        self._image, self._context, self._seen = image, context, ""  # _seen: the text that the cache holds
        # The text and a copy of the cache before the last answer, if the template may write the answer in another way.
        self._before_answer: tuple[str, PackedCache] | None = None
        # Numbers of images and videos of each question, also of the next one.
        self._shown = [count(as_list(image))]
        self._watching: Watching | None = None
        self._segment = False  # whether the next question already has frames in the cache
        key = self.sampling.require_key(single_key(key))
        require_fit(self.policy, params.decoder.full_layers, key)
        keys: Any = (None, None) if key is None else jax.random.split(key)
        self._policy_key, self._key = keys
        if query_agnostic:
            inputs = self._without_question()
            check_tokens(params, inputs, self._choose(self._begin(inputs), self._key)[:, None])

    def ask(self, question: str, on_text: Callable[[str], Any] | None = None, *, image: RowImages = None) -> str:
        """Answers a question, adds both to the cache, and returns the whole answer.

        Args:
            question: text; `<image>` may mark the place of an image. `\\<image>` is the word itself.
            on_text: called with each piece of the answer when it is decoded, for example
                `lambda text: print(text, end="", flush=True)`.
            image: new images and videos of a later question, as in `Chat`.

        Raises:
            InputError: an empty question, an image that cannot be used, a conversation beyond the model's limit, or NaN
                logits.
        """
        pictures = as_list(image)
        self._end_segment(question, pictures)
        fed, pieces = self._feed(question, pictures), []
        try:
            for piece in self.processor.pieces(self._decode(*fed)):
                pieces.append(piece)
                if on_text is not None:
                    on_text(piece)
        finally:  # also after an interruption, because the cache then holds the question and a part of the answer
            self.turns.append((question, "".join(pieces)))
            if self._after_turns and self.cache is not None:
                self.cache = jitted.recompress(self.cache)
        return self.turns[-1][1]

    def watch(self, frames: Frames, *, fps: float = 2.0, group: int = 8, reduce: Policy | None = None) -> None:
        """Adds the next frames of a video to the cache. Questions may be asked at any time, with `ask`.

            policy = policies.compose(policies.InfiniPotV(budget=4096), every=1024)
            chat = vlkv.Chat(params, processor, policy=policy, keep_system=True)
            for frame in camera:
                chat.watch(frame)

        A group of frames is fed when it is complete, and the rest of a group before a question. All groups have the
        same shapes, so nothing is compiled after the first one. The frames between two questions are one video in the
        prompt, whose positions are those that it would have as a whole: on the temporal axis of Qwen2.5-VL, its tokens
        per second times the seconds since the first of these frames. Times in the text (Qwen3-VL, SmolVLM) are those
        since the first frame of all. In SmolVLM, each group begins with the sentence that introduces a video.

        Args:
            frames: a picture, or a list, an array [frames, height, width, 3] or an iterator of them. An iterator may be
                endless; then this function returns when an exception stops it.
            fps: frames per second, the same in every call.
            group: number of frames that are fed together, the same in every call. Models that take two frames together
                need an even number.
            reduce: a method that drops tokens of each group before the decoder, such as `EVS(keep=0.25)` or `VidCom2`,
                as if the group were a whole video; the same in every call. None: the decoder reads all tokens.

        Raises:
            InputError: a model without videos, a policy that does not select again within a budget, a frame that cannot
                be used, or a video beyond the positions of the model.
        """
        if self._watching is None:
            if not slots_of(self.policy).every or self.policy.budget is None:
                raise InputError(
                    "a video has no end: give a policy that selects again within a budget of entries, such as "
                    "compose(InfiniPotV(budget=4096), every=1024)"
                )
            self._watching = Watching(self.processor, fps, group, reduce)
        self._watching.require_same(fps, group, reduce)
        for fed in self._watching.groups(frames):
            self._show(fed)

    def _show(self, group: Inputs) -> None:
        """Adds a group of frames to the cache, at the place of the next question's video."""
        assert self._watching is not None
        if not self._segment:
            self._begin_segment()
        self._extend(group, self._watching.reduce)

    def _begin_segment(self) -> None:
        """Adds the text before the next question's video to the cache."""
        images, videos = self._shown[-1]
        shown = [*self._shown[:-1], (images, videos + 1)]
        prompt, _, _ = self._written(_ANY, shown)
        assert self.processor.prompts.video_token is not None  # or the prompt could not be written
        before, mark, _ = prompt.rpartition(self.processor.prompts.video_token)
        if self.cache is None:
            pictures = self.processor.in_order(joined(self._context, _ANY), as_list(self._image))
            self._begin(self.processor.beginning(before, pictures))
        elif (end := self._continued(prompt, prompt, self._last_answer)) < len(before):
            self._extend(self.processor.extension([prompt[:end]], [before]))
        self._shown, self._seen, self._segment = shown, before + mark, True
        self._before_answer = None  # it has no frames

    def _end_segment(self, question: str, pictures: list[Picture | Video]) -> None:
        """Adds the frames that wait for a group to be complete, if the question can be asked."""
        if self._watching is None:
            return
        if pictures and (self._segment or self._watching.waiting):
            raise InputError("frames that were watched belong to this question: give images with the next one")
        self._written(question, [*self._shown[:-1], count(pictures)] if pictures else self._shown)
        for group in self._watching.rest():
            self._show(group)

    def _feed(self, question: str, pictures: list[Picture | Video]) -> tuple[Inputs, Float[Array, "1 vocab"]]:
        """Adds a question and its pictures to the cache. Returns what it has added, and the next token's logits."""
        if pictures and not self.turns:
            raise InputError("give the images of the first question to Chat(params, processor, image)")
        shown = [*self._shown[:-1], count(pictures)] if pictures else self._shown
        prompt, first, then = self._written(question, shown)
        repeated, certain = self._repeated(prompt, first, then, shown)
        if self.cache is None:
            fed = self._first(first, repeated)
            logits = self._begin(fed)
        else:
            end = self._continued(prompt, repeated, self._last_answer)
            new = self.processor.in_order(question, pictures) if pictures else []
            fed = self.processor.extension([prompt[:end]], [repeated], [new])
            logits = self._extend(fed)
        self._before_answer = None if certain else (repeated, jax.tree.map(jnp.copy, self.cache))
        if repeated != prompt:
            logits = self._extend(self.processor.extension([repeated], [prompt]))
        self._seen, self._shown, self._segment = prompt, [*shown, (0, 0)], False
        return fed, logits

    def _written(self, question: str, shown: list[tuple[int, int]]) -> tuple[str, str, list[Any]]:
        """The prompt of the conversation with this question, its first text, and its later turns."""
        questions, answers = [*(asked for asked, _ in self.turns), question], [answer for _, answer in self.turns]
        then = [(said, asked, *number) for said, asked, number in zip(answers, questions[1:], shown[1:], strict=True)]
        first = joined(self._context, questions[0])
        return self.processor.prompts.write(first, *shown[0], then), first, then

    @property
    def _last_answer(self) -> str:
        """The answer that the cache holds behind `_seen`."""
        return literal(self.turns[-1][1]) if self.turns and not self._segment else ""

    def _repeated(self, prompt: str, first: str, then: list[Any], shown: list[tuple[int, int]]) -> tuple[str, bool]:
        """The part of a prompt that later prompts repeat, and whether they repeat all of it and every answer."""
        replies = _ANY, _REASONED
        later = [self.processor.prompts.write(first, *shown[0], [*then, (reply, _ANY)]) for reply in replies]
        certain = all(text.startswith(prompt + reply) for text, reply in zip(later, replies, strict=True))
        alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(prompt, *later, strict=False))
        return prompt[: sum(1 for _ in alike)], certain

    def _continued(self, prompt: str, repeated: str, answer: str) -> int:
        """How much of a prompt the cache holds. If this is not how the last answer is written, from the copy on."""
        end = end_of_answer(prompt, len(self._seen), answer) if prompt.startswith(self._seen) else None
        if end is None and self._before_answer is not None and prompt.startswith(self._before_answer[0]):
            before, self.cache = self._before_answer
            end = len(before)
        if end is None or len(repeated) <= end:
            raise InputError("the chat template changes earlier turns: start a new Chat for this question")
        return end

    def _system_tokens(self) -> int:
        """Number of tokens before the first question and its images."""
        prompts = self.processor.prompts
        ids = [self.processor.encode(text) for text in (prompts.write(_ANY, 0), prompts.before_question(_ANY, 0))]
        return shared(ids[0], ids[1:])

    def _without_question(self) -> Inputs:
        """The inputs of the prompt up to the question; sets `_seen`."""
        text, prompts = joined(self._context, _ANY), self.processor.prompts
        self._seen = context_part(prompts, self._context, _ANY, *self._shown[0])
        if not (self._context or any(self._shown[0])):
            raise InputError("query_agnostic=True compresses what is before the question: give an image or a context")
        return self._first(text, self._seen)

    def _first(self, text: str, part: str) -> Inputs:
        """The inputs of the part of the first prompt that begins it."""
        inputs, prompt = self.processor(self._image, text), self.processor.prompts.write(text, *self._shown[0])
        if part == prompt:
            return inputs
        ids, beginning = (self.processor.encode(x, begin=False) for x in (prompt, part))
        count = shared(ids, [beginning])
        return inputs.with_ends([len(ids) - count], [beginning[count:]], self.processor.buckets)

    def _begin(self, inputs: Inputs) -> Float[Array, "1 vocab"]:
        check_room(self.params.config, inputs, self.sampling.max_new_tokens)
        sampling = dataclasses.replace(self.sampling, max_new_tokens=_ANSWERS * self.sampling.max_new_tokens)
        self.cache, logits = jitted.prefill(self.params, inputs, self.policy, sampling=sampling, key=self._policy_key)
        return logits

    def _extend(self, fed: Inputs, reduce: Policy | None = None) -> Float[Array, "1 vocab"]:
        assert self.cache is not None
        tokens = int(fed.valid.sum())
        capacity, need = self.cache.new_tokens, int(self.cache.used[0]) + tokens + self.sampling.max_new_tokens
        check_positions(self.params.config, self.cache, tokens + self.sampling.max_new_tokens)
        if (ids := self.cache.history) is not None and self.cache.reselection is not None:  # nothing but ids grows
            capacity, need = ids.shape[1], int(jnp.sum(ids[0] >= 0)) + tokens + self.sampling.max_new_tokens
        if need > capacity:
            self.cache = resize(self.cache, max(need, 2 * capacity))  # doubled, as every size must be compiled
        self.cache, logits = _extend(self.params, self.cache, fed, reduce)
        return logits

    def _choose(self, logits: Float[Array, "1 vocab"], key: Any) -> Int[Array, " 1"]:
        """The first token of an answer."""
        assert self.cache is not None
        chosen: Array = choose_token(logits, self.sampling, key, 0, self.cache.history)
        return chosen

    def _decode(self, fed: Inputs, logits: Float[Array, "1 vocab"]) -> Iterator[int]:
        """The answer's tokens without the stop token. Each is added to the cache, which contains `fed`."""
        key = None if self._key is None else jax.random.fold_in(self._key, len(self.turns))
        token, tokens = self._choose(logits, key), []
        for i in range(1, self.sampling.max_new_tokens + 1):
            tokens.append(int(token[0]))
            check_tokens(self.params, fed, np.array([tokens]))
            if tokens[-1] in (self.sampling.stop or ()):
                return
            assert self.cache is not None
            self.cache, following = next_token(self.params, self.cache, token, self.sampling, key, i)
            yield tokens[-1]
            token = following
