"""The picture of kept patches, against what the cache holds."""

import numpy as np
import pytest
from PIL import Image

import vlkv
from tests import programs
from vlkv import analysis, policies
from vlkv.analysis import drawing


@pytest.fixture(scope="module")
def asked(miniature):
    params, processor = vlkv.load(miniature(layers=2, grid=6))
    image = np.full((48, 96, 3), 255, np.uint8)
    image[:, 24:72] = 128  # the middle, which the processor cuts out
    return params, processor(image, "what does row one say?"), image


@pytest.mark.full
def test_the_picture_is_of_what_the_cache_holds(asked, monkeypatch):
    params, inputs, image = asked
    drawn = []
    monkeypatch.setattr(drawing, "draw", lambda title, base, panels, subtitle: drawn.extend([base, *panels, subtitle]))
    policy = policies.SnapKV(keep=0.3, scope="vision")
    vlkv.draw_survivors(params, inputs, image, [policies.Full(), policy], question="what?", evidence=(13, 14))
    base, full, some, subtitle = drawn
    assert subtitle == "Question: what?" and full.note == "36 of 36, 100% of evidence"
    np.testing.assert_array_equal(some.frame, [[2, 1], [2, 2]])
    assert base.size == (96, 96) and abs(np.asarray(base, float) - 128).max() < 40, "the middle"
    assert (full.kept == 1).all() and full.kept.shape == (6, 6)
    assert full.name == "Full 100%" and some.name == "SnapKV 30%" and "scope vision" in some.answer
    cache, _ = programs.prefill(params, inputs, policy, sampling=vlkv.Greedy(max_new_tokens=1))
    expected = np.zeros((6, 6))
    for layer in np.asarray(analysis.held_by_head(cache, inputs.tokens.shape[1]))[0]:
        for head in layer:
            for token in np.flatnonzero(head & inputs.is_vision[0]):
                expected[tuple(inputs.grid[0, token, 1:])] += 1 / (len(layer) * cache.extent.shape[0])
    np.testing.assert_allclose(some.kept, expected, atol=1e-6)
    assert 0 < expected.sum() < 36
    assert some.note == f"{expected.sum():.0f} of 36, {expected[2, 1:3].mean():.0%} of evidence"


def test_bad_input_is_named(asked):
    params, inputs, image = asked
    with pytest.raises(vlkv.InputError, match="plan is empty"):
        vlkv.draw_survivors(params, inputs, image, [])
    with pytest.raises(vlkv.InputError, match=r"give a list of policies, such as \[policy\]"):
        vlkv.draw_survivors(params, inputs, image, policies.Full())
    with pytest.raises(vlkv.InputError, match="1 images on a grid"):
        vlkv.draw_survivors(params, inputs, image, [policies.Full()], number=1)
    with pytest.raises(vlkv.InputError, match="one of crop, stretch and pad"):
        vlkv.draw_survivors(params, inputs, image, [policies.Full()], fit="zoom")
    with pytest.raises(vlkv.InputError, match="evidence: the inputs have 36 vision tokens, counted from 0"):
        vlkv.draw_survivors(params, inputs, image, [policies.Full()], evidence=[36])


def test_what_is_kept_looks_as_in_the_image():
    """A kept patch is unchanged, in the picture too; the others have no colour and little contrast."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 48, 3), np.uint8)
    pixels[:, :, 0] //= 2  # colourful
    image, share = Image.fromarray(pixels), np.zeros((6, 6), np.float32)
    share[:3] = 1
    shown = np.asarray(drawing.overlaid(image, share), float)
    np.testing.assert_array_equal(shown[:24], pixels[:24])
    assert shown[24:].std(axis=2).mean() < 0.2 * pixels[24:].std(axis=2).mean()
    assert np.ptp(shown[24:].mean(axis=2)) < 0.3 * np.ptp(pixels[24:].mean(axis=2)) and shown[24:].min() > 90
    white, few = Image.new("RGB", (48, 48), "white"), np.full((6, 6), 1 / 60, np.float32)
    levels = [np.asarray(drawing.overlaid(white, x)).mean() for x in (np.zeros((6, 6)), few, np.full((6, 6), 0.5))]
    assert levels[0] < 190 and levels[0] + 5 < levels[1] < levels[2] - 20 < 235, "one of sixty heads can be seen"
    picture = np.asarray(
        drawing.draw("t", image, [drawing.Panel("a", "b", "", "c", x, None) for x in (share, 0 * share)], "s")
    )
    inside = picture[200:300, 40:300].astype(float), picture[200:300, 410:670].astype(float)
    assert inside[0].std(axis=2).mean() > 4 * inside[1].std(axis=2).mean()


def test_five_panels_are_one_row_and_eight_are_two_equal_rows():
    def drawn(count, answer="1 2 3"):
        image, kept = Image.new("RGB", (48, 48), "white"), np.zeros((6, 6), np.float32)
        return drawing.draw("t", image, [drawing.Panel("a", answer, "right", "c", kept, None)] * count, "s")

    one, four, five, eight = (drawn(count).size for count in (1, 4, 5, 8))
    assert five[1] == one[1] and five[0] - four[0] == four[0] - drawn(3).size[0]
    assert eight[0] == four[0] and eight[1] > five[1]
    for count in (1, 3):  # the legend is not cut
        panels = [drawing.Panel("a", "b", "", "c", None, np.array([[1, 1]]))] * count
        legend = np.asarray(drawing.draw("t", Image.new("RGB", (48, 48), "white"), panels, "s"))[-60:]
        assert (legend[:, -drawing._GAP :] == 255).all()
    # A long answer is cut, so the gap beside a panel stays white.
    picture = np.asarray(drawn(2, "a long answer " * 20))
    edge = drawing._GAP + drawing._SIDE
    assert (picture[125:500, edge + 2 : edge + drawing._GAP - 2] == 255).all()
