"""EVS and VidCom2, which compare the frames of a video, against float64 numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests import programs
from tests.families import forms, tiny
from tests.models import padded
from tests.policies.arrays import tokens_of
from vlkv import policies

WIDTH, LENGTH = 12, 64
# Frames as (lines, columns, newlines at the end of each line), with one text token before each; and for each frame its
# number in its video, or -1 for an image.
ROWS = (
    ([(2, 3, 0)] * 6, range(6)),
    ([(3, 3, 0)] + [(2, 2, 1)] * 7, (-1, 0, 1, 2, 3, 0, 1, 2)),
    ([(2, 3, 0), (3, 2, 0), (3, 2, 0), (3, 2, 0)], (-1, -1, 0, 1)),
    ([(3, 4, 0)], None),
    ([(2, 3, 0)] * 4, None),
)
reduce = jax.jit(lambda policy, tokens: policy.reduce(tokens, None, stage=0)[1])


def prompt(row, *, added=False, before=2):
    """Tokens with padding at both ends; a frame is like the one before, more in some patches than in others."""
    rng = np.random.default_rng(row)
    entries = [(-1, -1, -1)] * before
    views, numbers = ROWS[row]
    for number, (lines, columns, newlines) in enumerate(views):
        entries.append((-1, -1, -1))
        for line in range(lines):
            entries += [(number, line, column) for column in range(columns)] + [(number, -1, -1)] * newlines
    grid = np.array(entries + [(-1, -1, -1)] * (LENGTH - len(entries)))  # one length: one program for all rows
    vision, valid = grid[:, 0] >= 0, np.arange(len(grid)) >= before
    frame = None if numbers is None else jnp.asarray(np.where(vision, np.array(numbers)[grid[:, 0]], -1))
    valid[-3:] = False
    x = rng.normal(size=(len(grid), 4 * WIDTH)).astype(np.float32)
    for t in np.flatnonzero(grid[:, 1] >= 0):
        same = np.flatnonzero((grid == grid[t] - [1, 0, 0]).all(axis=1))
        if len(same):
            x[t] = x[same[0]] + rng.choice([0.05, 0.5, 1.5]) * x[t]
    more = {"frame": frame} if frame is not None else {}
    if added:
        more["added"] = x[:, WIDTH:].reshape(-1, 3, WIDTH).swapaxes(0, 1)
    tokens = tokens_of(x[:, :WIDTH], grid, valid=valid, positions=np.arange(len(grid))[:, None], **more)
    return tokens, valid, vision, grid, np.float64(x if added else x[:, :WIDTH])


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def evs(keep, x, grid, frames):
    """The kept tokens, as in vLLM: tokens without one before are worth 255, and a stable sort.

    `frames`: for each view, its number in its video.
    """
    vision, worth = np.flatnonzero(grid[:, 0] >= 0), []
    for t in vision:
        number, line, _ = grid[t]
        same = np.flatnonzero((grid == grid[t] - [1, 0, 0]).all(axis=1))
        follows = line >= 0 and frames is not None and frames[number] > 0
        worth.append(1 - cosine(x[t], x[same[0]]) if follows else 255.0)
    first, count = np.flatnonzero(np.array(worth) == 255), max(1, int(keep * len(vision)))
    if len(first) > count:  # our own rule
        return vision[first[np.arange(count) * len(first) // count]]
    return np.sort(vision[np.argsort(-np.array(worth), kind="stable")[:count]])


@pytest.mark.default("True")
@pytest.mark.parametrize("added", [False, True])
def test_evs_keeps_what_vllm_keeps(added):
    for keep, row in itertools.product((0.1, 0.3, 0.71), range(len(ROWS))):
        tokens, valid, vision, grid, x = prompt(row, added=added)
        kept = np.asarray(reduce(policies.EVS(keep=keep), tokens))
        np.testing.assert_array_equal(kept[~vision], valid[~vision])
        np.testing.assert_array_equal(np.flatnonzero(kept & vision), evs(keep, x, grid, ROWS[row][1]))


@pytest.mark.default("qwen3_vl")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_evs_on_a_video_of_a_model(family):
    """A video of three frames after an image of equal size, in a whole model: what vLLM keeps of the video.

    The image is kept, because it has no frame before it; neither is it one for the video.
    """
    params, rng = tiny.make_model(family), np.random.default_rng(0)
    c, frame = params.config, [forms.VIDEO] * 6
    marked = [forms.START, *frame, forms.END]
    video = [*marked, 8, *marked, 9, *marked] if family == "qwen3_vl" else [forms.START, *frame * 3, forms.END]
    batch = vlkv.Inputs.from_hf({
        **padded([[3, 4, forms.START, *[forms.IMAGE] * 6, forms.END, *video, 5, 6, 7]]),
        "image_grid_thw": [(1, 4, 6)], "pixel_values": rng.normal(size=(24, *c.vision.patch_shape)),
        "video_grid_thw": [(3, 4, 6)], "pixel_values_videos": rng.normal(size=(3 * 24, *c.vision.patch_shape)),
    }, c)  # fmt: skip
    embedded = jax.jit(lambda params, batch: params.embed(batch))(params, batch)
    features = [embedded.x[0], *([] if embedded.added is None else embedded.added[0])]
    x = np.concatenate([np.float64(x) for x in features], axis=-1)
    assert len(features) == (3 if family == "qwen3_vl" else 1)
    layer = programs.read_prompt(params, batch, policies.EVS(keep=0.6)).layers[0]
    source = np.asarray(layer.source[0])[np.asarray(layer.valid[0] & layer.is_vision[0])]
    np.testing.assert_array_equal(source, evs(0.6, x, batch.grid[0], (-1, 0, 1, 2)))
    assert len(source) == 14


def vidcom2(policy, x, grid, frames):
    """Kept tokens, their numbers per frame (one after the other, by Webster), those of the authors' code, a tie."""
    patch = np.flatnonzero(grid[:, 1] >= 0)
    quiet = np.argsort(x[patch].var(axis=0), kind="stable")[: int(policy.channels * x.shape[1])]
    unit = x[:, quiet] / np.linalg.norm(x[:, quiet], axis=1, keepdims=True)
    own = [patch[grid[patch, 0] == number] for number in range(grid[:, 0].max() + 1)]

    def near(t, centre):
        return sum(np.exp(-((unit[t] - centre) ** 2).sum() / (2 * 2.0**k)) for k in range(-3, 2))

    begins = [i for i in range(len(own)) if frames is None or frames[i] <= 0] + [len(own)]
    to_video, share = [], []
    for begin, end in itertools.pairwise(begins):  # one video, or an image
        centre = unit[np.concatenate(own[begin:end])].mean(axis=0)
        values = [np.array([near(t, centre) for t in frame]) for frame in own[begin:end]]
        unique = np.array([-one.mean() for one in values])
        weight = np.exp((unique - unique.max()) / policy.temperature)
        to_video += values
        share += list(1 + weight / weight.sum() - 1 / len(values))
    to_frame = [np.array([near(t, unit[frame].mean(axis=0)) for t in frame]) for frame in own]
    share = np.array(share)
    newlines = np.flatnonzero((grid[:, 0] >= 0) & (grid[:, 1] < 0))
    count = max(1, int(np.floor(policy.keep * (len(patch) + len(newlines)) + 0.5)))
    size, numbers = np.array([len(frame) for frame in own]), np.zeros(len(own), int)
    least = np.inf
    for left in range(max(0, count - len(newlines)), -1, -1):
        want = np.where(numbers == 0, np.inf, share * size / (numbers + 0.5))
        want = np.where(numbers < size, want, -1)
        if left:
            least = want.max()
            numbers[want.argmax()] += 1
    near_tie = want.max() > 0.9999 * least  # two frames with equal rights to the last token
    kept = [frame[np.argsort(a + b)[:n]] for frame, a, b, n in zip(own, to_video, to_frame, numbers, strict=True)]
    released = np.clip(np.round(np.minimum(policy.keep * share, 1) * size), 1, size)
    return np.sort(np.concatenate([*kept, newlines[:count]])), numbers, released, near_tie


@pytest.mark.default("{}")
@pytest.mark.parametrize("options", [{}, {"channels": 1.0, "temperature": 0.1}], ids=str)
def test_vidcom2(options):
    """Decisions are those of the formulas; the numbers are those of the authors' code if their sum is the budget."""
    decided = equal = 0
    for keep, row in itertools.product((0.2, 0.4, 0.75), range(len(ROWS))):
        policy = policies.VidCom2(keep=keep, **options)
        tokens, valid, vision, grid, x = prompt(row)
        kept = np.asarray(reduce(policy, tokens))
        wanted, numbers, released, near_tie = vidcom2(policy, x, grid, ROWS[row][1])
        np.testing.assert_array_equal(kept[~vision], valid[~vision])
        assert (kept & vision).sum() == len(wanted)
        if not near_tie:
            np.testing.assert_array_equal(np.flatnonzero(kept & vision), wanted)
            decided += 1
        if not near_tie and released.sum() == numbers.sum():
            np.testing.assert_array_equal(numbers, released)
            equal += 1
    assert decided >= 6 and equal >= 3, (decided, equal)
