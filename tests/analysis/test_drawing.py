"""The picture of kept patches, against what the cache holds."""

import numpy as np
import pytest

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
    monkeypatch.setattr(drawing, "draw", lambda title, base, panels, subtitle: drawn.extend([base, *panels]))
    policy = policies.SnapKV(keep=0.3, scope="vision")
    vlkv.draw_survivors(params, inputs, image, [policies.Full(), policy])
    base, full, some = drawn
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


def test_bad_input_is_named(asked):
    params, inputs, image = asked
    with pytest.raises(vlkv.InputError, match="plan is empty"):
        vlkv.draw_survivors(params, inputs, image, [])
    with pytest.raises(vlkv.InputError, match="1 images on a grid"):
        vlkv.draw_survivors(params, inputs, image, [policies.Full()], number=1)
    with pytest.raises(vlkv.InputError, match="one of crop, stretch and pad"):
        vlkv.draw_survivors(params, inputs, image, [policies.Full()], fit="zoom")


def test_the_picture_is_drawn(asked):
    """Two panels side by side, of which the second is paler."""
    *_, image = asked
    kept = [np.ones((6, 6), np.float32), np.zeros((6, 6), np.float32)]
    base = drawing.fitted(drawing.open_image(image), (6, 6), "stretch")
    picture = drawing.draw("t", base, [drawing.Panel("a", "b", "", "c", x, None) for x in kept], "s")
    half = np.asarray(picture, np.float32).std(axis=2)
    assert half[:, : picture.width // 2].mean() > 4 * half[:, picture.width // 2 :].mean()
