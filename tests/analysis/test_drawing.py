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
