"""Videos without an end: `Chat.watch` beside the whole conversation in one prompt, and beside a cache that keeps it."""

import dataclasses
import io
import itertools
import os
import runpy
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import vlkv
import vlkv.generation.chat
import vlkv.loading
from tests import models, programs, reference
from tests.policies.numpy_policies import infinipotv_head
from tests.processing.conftest import byte_tokenizer, noise, tiny_config, write_files
from vlkv import policies
from vlkv.cli import main
from vlkv.generation import decode
from vlkv.policies import compose
from vlkv.processing import Processor, Video, stream_video
from vlkv.processing.pictures import Read
from vlkv.processing.watching import Watching
from vlkv.tools.commands import conversation

QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
        "<|video_pad|>"]  # fmt: skip
SMOLVLM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>",
           "<end_of_utterance>"]  # fmt: skip
LIMITS = {"shortest_edge": 256, "longest_edge": 2**24}  # pixels, of a whole video in Qwen3-VL
PATCHES = dict(patch_size=4, merge_size=2, temporal_patch_size=2, size=LIMITS, image_mean=[0.5] * 3,
               image_std=[0.5] * 3)  # fmt: skip
SIDE = 42  # of the tower of the tiny SmolVLM
TILES = dict(do_image_splitting=False, resample=1, size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE},
             image_mean=[0.5] * 3, image_std=[0.5] * 3)  # fmt: skip
KINDS = {  # special tokens, names and settings of the processors, fields of the config
    "qwen2_5_vl": (QWEN, "Qwen2VL", PATCHES, dict(image_token_id=5, video_token_id=6)),
    "qwen3_vl": (QWEN, "Qwen3VL", PATCHES, dict(image_token_id=5, video_token_id=6)),
    "smolvlm": (SMOLVLM, "SmolVLM", TILES, dict(image_token_id=3)),
}
FPS = 4.0


def make_processor(kind: str, folder: Path) -> Processor:
    special, name, settings, fields = KINDS[kind]
    of_images = "Qwen2VL" if special is QWEN else name
    write_files(
        folder, byte_tokenizer(special), preprocessor_config={"image_processor_type": f"{of_images}ImageProcessor"}
        | settings, video_preprocessor_config={"video_processor_type": f"{name}VideoProcessor"} | settings,
    )  # fmt: skip
    return Processor.from_folder(folder, tiny_config(kind, **fields))


def frames_of(count: int, seed: int = 0) -> list[np.ndarray]:
    """A square that moves over noise: most patches do not change from frame to frame."""
    frames = []
    for i in range(count):
        frame = np.array(noise(16, 24, seed))
        frame[4 * (i // 3 % 6) :][:4, 4 * (i // 18 % 4) :][:, :4] = 255
        frames.append(frame)
    return frames


def rows(inputs: vlkv.Inputs) -> dict[str, np.ndarray]:
    """Tokens and positions of a row without padding."""
    return {name: np.asarray(getattr(inputs, name))[0, inputs.valid[0]] for name in ("tokens", "positions")}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("fps", [FPS, 0.7])
def test_groups_have_the_tokens_and_positions_of_the_whole_video(kind, fps, tmp_path):
    """Frames come one by one and in lists; after 26 of them, the last pair of frames has one frame."""
    processor, frames = make_processor(kind, tmp_path), frames_of(27)
    watching, groups = Watching(processor, fps, 4), []
    for some in (frames[0], np.stack(frames[1:12]), frames[12], iter(frames[13:])):
        groups += list(watching.groups(some))
    groups += list(watching.rest())
    assert len(groups) == 7 and len({str(jax.tree.map(np.shape, group)) for group in groups}) == 1, "equal shapes"
    whole, end = rows(processor(Video(frames, fps), "<video>what?")), 0
    begin = int(np.flatnonzero(whole["tokens"] == QWEN.index("<|vision_start|>"))[0]) + 1
    next_position = whole["positions"][begin - 1].max() + 1
    for group in map(rows, groups):
        part = slice(begin + end, begin + end + len(group["tokens"]))
        np.testing.assert_array_equal(group["tokens"], whole["tokens"][part])
        np.testing.assert_array_equal(group["positions"] + next_position, whole["positions"][part])
        next_position, end = next_position + group["positions"].max() + 1, part.stop - begin
    assert whole["tokens"][begin + end] == QWEN.index("<|vision_end|>")
    assert whole["positions"][begin + end].max() == next_position


def test_times_are_those_since_the_first_frame(tmp_path):
    """In the text of SmolVLM and Qwen3-VL, also after hours and after a question, with groups of equal shapes."""
    for kind in ("smolvlm", "qwen3_vl"):
        (tmp_path / kind).mkdir()
        processor, said = make_processor(kind, tmp_path / kind), []
        watching = Watching(processor, 0.001, 2)
        for _ in range(3):
            groups = [*watching.groups(frames_of(5)), *watching.rest()]
            assert len({str(jax.tree.map(np.shape, group)) for group in groups}) == 1
            said += [processor.tokenizer.decode(rows(group)["tokens"], stop=()) for group in groups]
        if kind == "smolvlm":
            assert said[0].startswith("You are provided the following series of two frames from a 0:33:20 [H:MM:SS] "
                                      "video.\n\nFrame from 00:00:")  # fmt: skip
            assert "of one frames from a 4:10:00 [H:MM:SS] video.\n\nFrame from 233:20:" in said[8]
        else:
            assert [text.split("<")[1] for text in said][-3:] == [
                "10500.0 seconds>", "12500.0 seconds>", "14000.0 seconds>"]  # fmt: skip


# --- beside a reference that keeps all frames -------------------------------------------------------------------------


class Step(NamedTuple):
    """What the cache is after some tokens have been fed."""

    end: int  # number of the token after them
    tail: int  # number of the first token in the tail
    kept: dict[tuple[int, int], np.ndarray]  # by layer and head: numbers of the tokens in the pool
    out: np.ndarray  # logits, or the next token


class Recorder:
    """Wraps what feeds tokens to a chat's cache. Tokens are numbered from the beginning, without padding."""

    def __init__(self, monkeypatch) -> None:
        self.steps: list[Step] = []
        self.answers: list[int] = []  # tokens of all answers
        self.bytes: list[tuple[int, int]] = []  # of the cache and of the process
        for name in ("_extend", "next_token"):
            monkeypatch.setattr(vlkv.generation.chat, name, self.wrapped(getattr(vlkv.generation.chat, name)))
        begin = vlkv.Chat._begin

        def first(chat, inputs):
            self.prompt, self.padded = int(inputs.valid.sum()), inputs.valid.shape[1]
            return begin(chat, inputs)

        monkeypatch.setattr(vlkv.Chat, "_begin", first)

    def wrapped(self, function):
        def call(params, cache, *args):
            if len(args) > 2:
                self.answers.append(int(args[0][0]))
            cache, out = function(params, cache, *args)
            tail = self.prompt + int(cache.reselection.before[0]) - self.padded
            self.steps.append(Step(tail + int(cache.used[0]), tail, self.kept(cache), np.asarray(out)[0]))
            self.bytes.append((cache.bytes, resident()))
            return cache, out

        return call

    def kept(self, cache) -> dict[tuple[int, int], np.ndarray]:
        start, extent, token = (np.asarray(x)[:, 0] for x in (cache.start, cache.extent, cache.token[None]))
        made = {}
        for layer, head in np.ndindex(start.shape):
            number = token[0, head, start[layer, head] :][: extent[layer, head]]
            made[layer, head] = np.where(number < self.padded, number, number - self.padded + self.prompt)
        return made


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@jax.jit
def embed(params, inputs):
    return params.embed(inputs)


def masked(params, inputs: vlkv.Inputs, prompt: int, steps: list[Step], select=None) -> tuple[np.ndarray, list[bool]]:
    """Logits after each token of a conversation, from a cache that keeps all entries, masked as the steps say.

    Also whether `select` chooses what the steps say, each time: a function of the layer, keys, values, and tokens.
    """
    embedded: Any = embed(params, inputs)
    valid, decoder = inputs.valid[0], params.decoder
    x, positions = np.asarray(embedded.x, np.float64)[0, valid], np.asarray(inputs.positions)[0, valid]
    positions = positions[:, 0] if positions.shape[1] == 1 else positions
    added = () if embedded.added is None else np.asarray(embedded.added, np.float64)[0][:, valid]
    first, same = Step(prompt, 0, {}, np.empty(0)), []
    for i, layer in enumerate(decoder.layers):
        q, k, v = reference._project(layer, x, positions, decoder.rope)
        attended, groups = np.zeros_like(q), q.shape[1] // k.shape[1]
        for before, step in itertools.pairwise([first._replace(end=0), first, *steps]):
            rows = np.arange(before.end, step.end)
            for head in range(k.shape[1]):
                queries = slice(head * groups, (head + 1) * groups)
                keys = np.append(step.kept.get((i, head), []), np.arange(step.tail, step.end)).astype(int)
                logits = np.einsum("tnh,sh->nts", q[rows, queries], k[keys, head]) / np.sqrt(q.shape[-1])
                weights = reference._softmax(np.where(keys <= rows[:, None], logits, -np.inf))
                attended[rows, queries] = np.einsum("nts,sh->tnh", weights, v[keys, head])
                if select is not None and before.tail < step.tail:
                    held = np.append(before.kept.get((i, head), []), np.arange(before.tail, step.tail)).astype(int)
                    same += np.isin(step.kept[i, head], held[select(i, k[held, head], v[held, head], held)]).tolist()
        x = reference._close(layer, reference._finish(layer, x, attended), added[i] if i < len(added) else None)
    return reference._logits(decoder, x), same


def read_in_groups(processor: Processor, video: Video) -> Read:
    """The frames of a video: in SmolVLM each group is a video of its own, in other models all are one."""
    if processor.config.family != "smolvlm":
        return processor.pictures.read(video)
    begins = range(0, len(video.frames), GROUP)
    parts = [(video.frames[i : i + GROUP], video.seconds[i : i + GROUP]) for i in begins]
    reads = [processor.pictures.read(Video(frames, FPS, times, begin=0)) for frames, times in parts]
    arrays = {name: np.concatenate([read.arrays[name] for read in reads]) for name in reads[0].arrays}
    return Read(arrays=arrays, tokens=sum(r.tokens for r in reads), text="".join(r.text for r in reads))


def whole_conversation(processor: Processor, videos: list[Video], questions: list[str], answers: list[list[int]]):
    """One prompt with each question after its video, in which the answers are these tokens."""
    reads = [read_in_groups(processor, video) for video in videos]
    prompt = processor.prompts.write(questions[0], 0, 1, [("ANSWER", asked, 0, 1) for asked in questions[1:]])
    ids: list[int] = []
    texts = [processor.prompts.write(questions[0], 0, 1), *prompt.split("ANSWER")[1:]]
    for text, video, read, answer in zip(texts, videos, reads, answers, strict=True):
        part = processor.encode(processor._spell_out(text, [video], [read]), begin=False)
        ids += [*processor._repeated(part, [video], [read]), *answer]
    return processor.batch([np.array(ids)], reads)


def compiled() -> int:
    """Number of programs that feed tokens to a chat's cache."""
    return EXTEND._cache_size() + decode._next_token._cache_size() + decode._recompress._cache_size()


EXTEND = vlkv.generation.chat._extend
NEW, GROUP = 4, 6
CASES = {
    "qwen2_5_vl": compose(policies.SnapKV(budget=48, window=8), every=80),
    "smolvlm": compose(policies.SnapKV(budget=96, window=8), every=512),
    "qwen3_vl": compose(policies.InfiniPotV(budget=64), every=144),
}


@pytest.mark.default("qwen3_vl-60")
@pytest.mark.parametrize(
    ("kind", "frames"),
    [(kind, 60) for kind in CASES] + [pytest.param(f"qwen{n}_vl", 3000, marks=pytest.mark.slow) for n in ("2_5", "3")],
)
def test_answers_are_those_of_a_reference_that_keeps_all_frames(kind, frames, tmp_path, monkeypatch):
    """The same choices by masks, in float64. Two questions, of which the first comes within a group of frames."""
    processor = make_processor(kind, tmp_path)
    params, sampling = models.random_model(processor.config), vlkv.Greedy(max_new_tokens=NEW, stop=())
    recorder, clip = Recorder(monkeypatch), frames_of(frames)
    chat = vlkv.Chat(params, processor, policy=CASES[kind], sampling=sampling, keep_system=True)
    halves, programs = [clip[: frames // 2 - 3], clip[frames // 2 - 3 :]], []
    for half, question in zip(halves, ("what?", "and now?"), strict=True):
        for frame in half:
            chat.watch(frame, fps=FPS, group=GROUP)
            programs.append(compiled())
        chat.ask(question)
    assert len(set(programs[6 : len(halves[0])])) == 1, "nothing is compiled after the first group"
    assert len(set(programs[len(halves[0]) + 6 :])) == 1, "nor after the first group that follows a question"
    assert len({of_cache for of_cache, _ in recorder.bytes}) == 1
    if frames > 1000:
        # The first question and its answer have compiled their programs before.
        after = recorder.bytes[3 * len(recorder.bytes) // 5 :]
        assert max(after)[1] < 1.01 * min(after)[1], "resident memory of the process"

    later = [(len(halves[0]) + i) / FPS for i in range(len(halves[1]))]
    videos = [Video(halves[0], FPS), Video(halves[1], FPS, later)]
    answers = [recorder.answers[:NEW], recorder.answers[NEW:]]
    whole = whole_conversation(processor, videos, ["what?", "and now?"], answers)
    grid, window = np.asarray(whole.grid)[0, whole.valid[0]], (7, 3)  # of two layers

    def infinipot(layer: int, k: np.ndarray, v: np.ndarray, held: np.ndarray) -> np.ndarray:
        """The best entries by the method's equations; the tokens of the system prompt are always kept."""
        scores = infinipotv_head(k, v, grid[held], np.ones(len(k), bool), 32, window[layer], 0.25)
        scores[held < chat.policy.slots.first] = np.inf
        return np.argsort(-scores, kind="stable")[:64]

    select = infinipot if kind == "qwen3_vl" else None
    expected, same = masked(params, whole, recorder.prompt, recorder.steps, select)
    assert select is None or np.mean(same) > 0.99
    assert int(whole.valid.sum()) == len(expected) == recorder.steps[-1].end
    assert int(whole.positions.max()) + 1 == int(chat.cache.next_position[0, 0])
    for step in recorder.steps:
        logits = expected[step.end - 1]
        if step.out.ndim:
            np.testing.assert_allclose(step.out, logits, atol=1e-4)
        else:
            assert logits.max() - logits[step.out] < 1e-4
    pool = max(len(kept) for kept in recorder.steps[-1].kept.values())
    assert pool == CASES[kind].budget < len(expected) / 4


@pytest.mark.full
@pytest.mark.parametrize("query_agnostic", [False, True])
def test_a_video_follows_the_images_of_the_first_question(query_agnostic, tmp_path):
    """Beside one prompt; nothing is evicted yet. Then images are given with a later question."""
    processor = make_processor("qwen2_5_vl", tmp_path)
    params, image, frames = models.random_model(processor.config), noise(24, 16), frames_of(7)
    options = {"policy": compose(policies.KeyDiff(budget=256), every=512), "query_agnostic": query_agnostic}
    chat = vlkv.Chat(params, processor, image, sampling=vlkv.Greedy(max_new_tokens=NEW, stop=()), **options)
    chat.watch(frames, fps=FPS, group=4)
    answer = chat.ask("what?")
    whole = processor([image, Video(frames, FPS)], "what?")
    expected = programs.generate(params, whole, policy=policies.Full(), sampling=chat.sampling)
    assert answer == processor.decode(np.asarray(expected.tokens))[0]
    assert int(chat.cache.next_position[0, 0]) == int(whole.positions.max()) + 1 + NEW
    chat.ask("and this?", image=image)
    chat.watch(frames, fps=FPS, group=4)
    chat.ask("now?")
    assert len(chat.turns) == 3


@pytest.mark.parametrize("reduce", [policies.EVS(keep=0.4), policies.VidCom2(keep=0.3)], ids=type)
def test_a_group_is_reduced_like_a_prompt(reduce, tmp_path):
    """One group that is the whole video, and a question, beside a prompt that is reduced before the decoder."""
    processor = make_processor("qwen3_vl", tmp_path)
    params, frames = models.random_model(processor.config), frames_of(8)
    whole = processor(Video(frames, FPS), "what?")
    _, expected = programs.prefill(params, whole, reduce, new_tokens=1)
    prompt = processor.prompts.write("what?", 0, 1)
    before, mark, _ = prompt.partition("<|video_pad|>")
    (group,) = Watching(processor, FPS, 8).groups(frames)
    cache, _ = programs.prefill(params, processor.beginning(before, []), policies.Full(), new_tokens=256)
    cache, _ = programs.extend(params, cache, group, reduce)
    cache, logits = programs.extend(params, cache, processor.extension([before + mark], [prompt]))
    assert int(cache.used[0]) < int(whole.valid.sum()) - 20
    assert int(cache.next_position[0, 0]) == int(whole.positions.max()) + 1
    np.testing.assert_allclose(logits, expected, atol=1e-4)


# --- commands, files and errors ---------------------------------------------------------------------------------------


@pytest.fixture
def tiny_qwen(tmp_path, monkeypatch):
    """A model that `vlkv.load` and commands find under any name."""
    (tmp_path / "model").mkdir()
    processor = make_processor("qwen3_vl", tmp_path / "model")
    params = models.random_model(processor.config)
    monkeypatch.setattr(vlkv.loading, "load_processor", lambda model: processor)
    monkeypatch.setattr(vlkv.loading, "load_params", lambda model, dtype=None: params)
    monkeypatch.setattr(vlkv, "load", lambda model: (params, processor))
    return params, processor


def encoded(frames: list[np.ndarray], rate: int) -> bytes:
    """A lossless video that can be read from a pipe."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.fixture
def pipe(monkeypatch):
    """Makes bytes the standard input, which cannot seek."""

    def feed(content: bytes) -> io.BufferedReader:
        reader, writer = os.pipe()
        threading.Thread(target=lambda: (os.write(writer, content), os.close(writer))).start()
        stdin = open(reader)  # noqa: SIM115
        monkeypatch.setattr("sys.stdin", stdin)
        return stdin.buffer

    return feed


def test_a_stream_is_read_at_equal_distances(tmp_path, pipe):
    """At each time the latest frame, from a pipe, a file and a folder."""
    frames = frames_of(11)
    content = encoded(frames, 4)
    (tmp_path / "clip.mkv").write_bytes(content)
    for fps, wanted in ((2.0, range(0, 11, 2)), (8.0, [i // 2 for i in range(21)]), (3.0, [0, 1, 2, 4, 5, 6, 8, 9])):
        for source in (tmp_path / "clip.mkv", pipe(content)):
            found = list(stream_video(source, fps))
            assert [int(np.argmax([(np.asarray(one) == frame).all() for frame in frames])) for one in found] == [
                int(np.argmax([(frames[i] == frame).all() for frame in frames])) for i in wanted
            ]
    (tmp_path / "folder").mkdir()
    for i in range(3):
        (tmp_path / "folder" / f"{i}.png").touch()
    assert [path.stem for path in stream_video(tmp_path / "folder", 4.0)] == ["0", "0", "1", "1", "2"]
    (tmp_path / "none.mkv").write_bytes(b"no video")
    with pytest.raises(vlkv.InputError, match="not a video"):
        list(stream_video(tmp_path / "none.mkv", 2.0))


def test_the_chat_command_watches_a_pipe(tiny_qwen, pipe, capsys, monkeypatch):
    """Questions during the video and after it."""

    class Chat:
        def __init__(self, params, processor, image, **options):
            self.said = []

        def watch(self, frame, **options):
            assert options == {"fps": 4.0, "group": 6, "reduce": policies.EVS(keep=0.5)}
            self.said.append(np.asarray(frame).sum())

        def ask(self, question, on_text):
            on_text(f"{question}{self.said}")

    monkeypatch.setattr(conversation, "Chat", Chat)
    frames = frames_of(20)
    pipe(encoded(frames, 4))
    given = [
        "--video",
        "-",
        "--fps",
        "4",
        "--group",
        "6",
        "--reduce",
        "evs(keep=0.5)",
        "--question",
        "A",
        "--question",
        "B",
        "--ask-every",
        "3",
    ]
    assert main(["chat", "--model", "m", *given]) == 0
    sums = [frame.sum() for frame in frames]
    expected = [f"[3 s] A{sums[:12]}", f"[3 s] B{sums[:12]}", f"A{sums}", f"B{sums}"]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.full
def test_the_example_watches(tiny_qwen, monkeypatch, capsys, root):
    monkeypatch.setattr("sys.argv", ["endless_video.py", "m", "20"])
    runpy.run_path(str(root / "examples" / "endless_video.py"), run_name="__main__")
    assert "10 s of video" in capsys.readouterr().out


def test_what_cannot_be_watched_is_refused(tiny_qwen, refused):
    again = compose(policies.KeyDiff(budget=64), every=80)
    for policy, reason in (
        (None, "budget"),
        (policies.KeyDiff(budget=9), "again"),
        (compose(policies.KeyDiff(keep=0.5), every=80), "budget"),
    ):
        with pytest.raises(vlkv.InputError, match=reason):
            vlkv.Chat(*tiny_qwen, policy=policy).watch(frames_of(1))
    chat = vlkv.Chat(*tiny_qwen, policy=again)
    for options, reason in (({"fps": 0}, "positive"), ({"group": 0}, "at least 1"), ({"group": 3}, "multiple of 2")):
        with pytest.raises(vlkv.InputError, match=reason):
            vlkv.Chat(*tiny_qwen, policy=again).watch(frames_of(3), **options)
    chat.watch(frames_of(2), fps=FPS, group=2)
    with pytest.raises(vlkv.InputError, match=r"fps=4\.0, group=2"):
        chat.watch(frames_of(2), fps=FPS, group=4)
    with pytest.raises(vlkv.InputError, match="reduce=None"):
        chat.watch(frames_of(2), fps=FPS, group=2, reduce=policies.EVS(keep=0.5))
    with pytest.raises(vlkv.InputError, match="before the decoder"):
        vlkv.Chat(*tiny_qwen, policy=again).watch(frames_of(8), reduce=policies.FastV(keep=0.5, layer=1))
    chat.watch(frames_of(1), fps=FPS, group=2)
    before = chat.cache.next_position
    for question, image, reason in (("what?", noise(16, 16), "next one"), (" ", None, "empty")):
        with pytest.raises(vlkv.InputError, match=reason):
            chat.ask(question, image=image)
    assert chat.cache.next_position is before, "the frame still waits for a group to be complete"
    params, processor = (
        models.tiny_llava(),
        dataclasses.replace(tiny_qwen[1], prompts=dataclasses.replace(tiny_qwen[1].prompts, video_token=None)),
    )
    with pytest.raises(vlkv.InputError, match="does not support videos"):
        vlkv.Chat(params, processor, policy=again).watch(frames_of(8))
    model = ["chat", "--model", "m"]
    refused(main, *model, "--video", "-", says="--question")
    refused(main, *model, "--ask-every", 3, says="--video and --question")
    refused(main, *model, "--reduce", "evs(keep=0.5)", says="give --video")
    refused(main, *model, "--video", "none.mp4", says="no such file")
