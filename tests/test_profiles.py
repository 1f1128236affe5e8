"""Offline profiles: measured against float64 numpy, their analyses by hand, files, and the command."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import vlkv
from vlkv import InputError, loading
from vlkv.analysis import profiles
from vlkv.cli import main
from vlkv.mini import pages
from vlkv.policies import PrefixKV

from . import reference
from .models import CONFIG, embed, tiny_llava, unequal_batch


@pytest.fixture(scope="module")
def params():
    return tiny_llava()


def importance(q, k):
    """Head-mean column sums of the causal attention, normalised; q [T,N,H], k [T,K,H]."""
    total = np.zeros(len(q))
    for n in range(q.shape[1]):
        logits = np.float64(q[:, n]) @ np.float64(k[:, n * k.shape[1] // q.shape[1]]).T / np.sqrt(q.shape[-1])
        e = np.tril(np.exp(logits - logits.max(axis=1, keepdims=True)))
        total += (e / e.sum(axis=1, keepdims=True)).sum(axis=0)
    return total / total.sum()


def budgets(cumulative, total, least):
    """Raises the threshold until the next token needed is one too many: lists of P_l(1), P_l(2), ..."""
    granted = [least] * len(cumulative)
    while sum(granted) < total:
        reached = {i: c[granted[i] - 1] if granted[i] else 0 for i, c in enumerate(cumulative) if granted[i] < len(c)}
        granted[min(reached, key=lambda i: (reached[i], i))] += 1
    return granted


@pytest.mark.full
@pytest.mark.parametrize(("scope", "least"), [("all", 2), ("vision", 1)])
def test_ratios_and_curves_of_every_sample(params, scope, least):
    batches = [unequal_batch(padding="left"), unequal_batch(padding="right", seed=1)]
    policy = PrefixKV(keep=0.2, scope=scope)
    if scope == "vision":  # the last row has no image
        with pytest.raises(InputError, match="sample 2 has no tokens in scope"):
            profiles.measure(params, batches, policy)
        batches = [dataclasses.replace(b, **{name: getattr(b, name)[:2] for name in
                   ("tokens", "positions", "valid", "vision_index", "grid")}) for b in batches]  # fmt: skip
    ratios = profiles.measure(params, iter(batches), policy)
    rows = len(batches[0].valid)
    assert ratios.shape == (2 * rows, CONFIG.decoder.layers)
    for number, batch in enumerate(batches):
        x = np.asarray(embed(params, batch))
        curves = np.asarray(jax.jit(profiles.curves)(params, batch, policy))
        for row in range(rows):
            valid = batch.valid[row]
            inside = batch.is_vision[row][valid] if scope == "vision" else np.ones(valid.sum(), bool)
            _, layers = reference.prefill(params.decoder, x[row, valid])
            expected = []
            for q, k, _ in layers:
                mass = importance(q, k)[inside]
                expected.append(np.cumsum(np.sort(mass / mass.sum())[::-1]))
            count = inside.sum()
            granted = budgets(expected, int(np.floor(0.2 * len(layers) * count + 0.5)), least)
            np.testing.assert_allclose(ratios[number * rows + row], np.array(granted) / count, rtol=1e-6)
            np.testing.assert_allclose(curves[row][:, :count], expected, rtol=1e-4)
            assert np.isposinf(curves[row][:, count:]).all()


def test_no_samples_make_no_profile(params):
    with pytest.raises(InputError, match="no profile="):
        profiles.measure(params, [unequal_batch()], PrefixKV(keep=0.2, profile=(0.2, 0.2, 0.2)))
    with pytest.raises(InputError, match="at least one sample"):
        profiles.measure(params, [], PrefixKV(keep=0.2))


RATIOS = np.array([[0.1, 0.3], [0.3, 0.1], [0.5, 0.5]])


def test_what_the_tables_compare():
    np.testing.assert_allclose(profiles.aggregate(RATIOS), [0.3, 0.3])
    np.testing.assert_allclose(profiles.spread(RATIOS), [np.sqrt(0.08 / 3)] * 2)
    np.testing.assert_allclose(profiles.distance(RATIOS, np.array([0.1, 0.3])), [0.2, 0.4 / 3])
    np.testing.assert_allclose(profiles.by_number(RATIOS, (1, 2)), [[0.1, 0.3], [0.2, 0.2]])
    groups = profiles.by_group(RATIOS, ["ocr", "vqa", "ocr"])
    assert list(groups) == ["ocr", "vqa"]
    np.testing.assert_allclose(groups["ocr"], [0.3, 0.4])
    with pytest.raises(InputError, match="of 4 samples cannot be made from 3"):
        profiles.by_number(RATIOS, (4,))
    with pytest.raises(InputError, match="2 groups for 3 samples"):
        profiles.by_group(RATIOS, ["ocr", "vqa"])


def test_the_search_cut_short():
    """p = 1/2 keeps 1 and 2 of 4 tokens, p = 3/4 keeps 2 and 3, p = 5/8 keeps 1 and 3: half of all."""
    cumulative = np.array([[0.7, 0.8, 0.9, 1.0], [0.25, 0.5, 0.75, 1.0]])
    for options, ratios, steps in (
        ({}, [0.25, 0.75], 3),
        ({"tolerance": 0.25}, [1 / 3, 2 / 3], 1),
        ({"steps": 2}, [0.4, 0.6], 2),
    ):
        got, taken = profiles.search(cumulative, 0.5, **options)
        np.testing.assert_allclose(got, ratios)
        assert taken == steps
    padded = np.pad(cumulative, [(0, 0), (0, 3)], constant_values=np.inf)
    np.testing.assert_allclose(profiles.search(padded, 0.5)[0], [0.25, 0.75])


def test_a_saved_profile_is_read_by_its_own_model_only(tmp_path):
    path, ratios = tmp_path / "profile.json", np.array([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]])
    profiles.save(path, ratios, PrefixKV(keep=0.2), CONFIG, name="tiny")
    content = profiles.save(path, ratios, PrefixKV(keep=0.2), CONFIG, name="tiny")  # again
    assert json.loads(path.read_text()) == content
    assert list(tmp_path.iterdir()) == [path]
    assert (content["keep"], content["samples"], content["aggregation"]) == (0.2, 2, "mean")
    assert content["model"]["name"] == "tiny" and content["model"]["width"] == 32
    profile = profiles.load(path, CONFIG)
    assert profile == pytest.approx((0.2, 0.2, 0.2))
    PrefixKV(keep=0.2, profile=profile).check_model(3)
    other = dataclasses.replace(CONFIG, decoder=dataclasses.replace(CONFIG.decoder, width=64))
    with pytest.raises(InputError, match="measured on 'tiny', another model: width 32, here 64"):
        profiles.load(path, other)
    with pytest.raises(InputError, match='measured with scope="all", but the policy has scope="vision"'):
        profiles.load(path, CONFIG, scope="vision")
    with pytest.raises(InputError, match="no such folder"):
        profiles.save(tmp_path / "none" / "p.json", ratios, PrefixKV(keep=0.2), CONFIG, name="tiny")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "not a profile"),
        ("[1]", "not a profile"),
        ('{"shares": [0.1]}', "not a profile"),
        ({"shares": [0.1, 0.2]}, "shares must be 3 fractions"),
        ({"shares": [0.1, 0.2, 2]}, "shares must be 3 fractions"),
        ({"shares": [0.1, 0.2, "x"]}, "shares must be 3 fractions"),
    ],
)
def test_a_damaged_profile_is_named(tmp_path, change, said):
    path = tmp_path / "profile.json"
    content = profiles.save(path, np.full((1, 3), 0.2), PrefixKV(keep=0.2), CONFIG, name="tiny")
    path.write_text(change if isinstance(change, str) else json.dumps(content | change))
    with pytest.raises(InputError, match=said):
        profiles.load(path, CONFIG)
    path.unlink()
    with pytest.raises(InputError, match="no such profile"):
        profiles.load(path, CONFIG)


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    """Two held-out pages on disk."""
    paths = []
    for seed in (2, 5):
        page = pages.digit_page(pages.held_out_digits(), np.random.default_rng(seed), rows=(seed, seed))
        paths.append(str(tmp_path / f"{seed}.png"))
        page.image.save(paths[-1])
    return paths


def test_the_command_measures_the_miniature(capsys, monkeypatch, tmp_path, images, miniature):
    monkeypatch.setattr(loading, "MINI", miniature())
    layers = vlkv.load_processor(miniature()).config.decoder.layers
    out = tmp_path / "profile.json"
    command = ["profile", "--model", "mini", "--images", *images, "--prompts", "read the page", "--keep", "0.2"]
    assert main([*command, "--out", str(out), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(out.read_text())
    assert content["samples"] == 2 and content["model"]["layers"] == len(content["shares"]) == layers
    assert np.mean(content["shares"]) == pytest.approx(0.2, abs=0.006)  # whole tokens
    assert max(content["spread"]) > 0
    assert main([*command, "--out", str(out)]) == 0
    assert f"{content['shares'][-1]:.4f}" in capsys.readouterr().out
    share = repr(tuple(content["shares"]))
    answer = ["generate", "--model", str(miniature()), "--image", images[0], "--prompt", "read the page", "--json"]
    policy = ["--policy", f"PrefixKV(profile={share})", "--keep", "0.2", "--max-new-tokens", "2"]
    assert main([*answer, *policy]) == 0
    result = json.loads(capsys.readouterr().out)
    kept = np.array(result["kept_per_layer"])
    assert abs(kept - np.array(content["shares"]) * result["prompt_tokens"]).max() < 1.01


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--keep", "2"], "keep=2.0 must lie in"),
        (["--out", "/no/such/folder/p.json"], "no such folder"),
        (["--prompts", "a", "b", "c"], "3 prompts for 2 images"),
        (["--images", "/no/such/image.png"], "/no/such/image.png"),
    ],
)
def test_a_bad_argument_is_one_line(capsys, tmp_path, images, change, said):
    command = ["profile", "--model", "mini", "--images", *images, "--prompts", "read", "--keep", "0.2"]
    assert main([*command, "--out", str(tmp_path / "p.json"), *change]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
