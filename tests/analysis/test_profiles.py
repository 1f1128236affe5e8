"""Offline profiles: measured against float64 numpy, their analyses by hand, files, and the command."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from tests import reference
from tests.models import CONFIG, SMALL, embed, unequal_batch
from tests.policies import numpy_policies
from vlkv import InputError, loading
from vlkv.analysis import profiles
from vlkv.cli import main
from vlkv.mini import pages
from vlkv.policies import PrefixKV


@pytest.mark.full
@pytest.mark.parametrize("scope", ["all", "vision"])
def test_ratios_and_curves_of_every_sample(params, scope):
    batches = [unequal_batch(padding="left"), unequal_batch(padding="right", seed=1)]
    policy = PrefixKV(keep=0.2, scope=scope)
    if scope == "vision":  # the last row has no image
        with pytest.raises(InputError, match="sample 2 has no tokens in scope"):
            profiles.measure(params, batches, policy)
        batches = [dataclasses.replace(b, **{name: getattr(b, name)[:2] for name in
                   ("tokens", "positions", "valid", "vision_index", "grid")}) for b in batches]  # fmt: skip
    ratios = profiles.measure(params, iter(batches), policy)
    rows = len(batches[0].valid)
    assert ratios.shape == (2 * rows, SMALL.decoder.layers)
    for number, batch in enumerate(batches):
        x = np.asarray(embed(params, batch))
        curves = np.asarray(jax.jit(profiles.curves)(params, batch, policy))
        for row in range(rows):
            valid = batch.valid[row]
            inside = batch.is_vision[row][valid] if scope == "vision" else np.ones(valid.sum(), bool)
            _, layers = reference.prefill(params.decoder, x[row, valid])
            q, k = (np.stack([np.swapaxes(layer[i], 0, 1) for layer in layers]) for i in (0, 1))
            prompt = numpy_policies.Prompt(q, k, batch.is_vision[row][valid], scope, keep=0.2)
            _, granted, scores = numpy_policies.prefixkv(prompt)
            mass = np.sort(scores[:, 0, inside])[:, ::-1]
            expected = np.cumsum(mass / mass.sum(axis=1, keepdims=True), axis=1)
            count = inside.sum()
            np.testing.assert_allclose(ratios[number * rows + row], granted / count, rtol=1e-6)
            np.testing.assert_allclose(curves[row][:, :count], expected, rtol=1e-4)
            assert np.isposinf(curves[row][:, count:]).all()


def test_no_samples_make_no_profile(params):
    with pytest.raises(InputError, match="no profile="):
        profiles.measure(params, [unequal_batch()], PrefixKV(keep=0.2, profile=(0.2, 0.2)))
    with pytest.raises(InputError, match="at least one sample"):
        profiles.measure(params, [], PrefixKV(keep=0.2))


RATIOS = np.array([[0.1, 0.3], [0.3, 0.1], [0.5, 0.5]])


def test_what_the_tables_compare():
    np.testing.assert_allclose(profiles.aggregate(RATIOS), [0.3, 0.3])
    np.testing.assert_allclose(profiles.spread(RATIOS), [np.sqrt(0.08 / 3)] * 2)
    np.testing.assert_allclose(profiles.distance(RATIOS, np.array([0.1, 0.3])), [0.2, 0.4 / 3])


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


def test_a_saved_profile_is_read_by_its_own_model_and_keep_only(tmp_path):
    path, ratios = tmp_path / "profile.json", np.array([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]])
    measured = {PrefixKV(keep=0.2): ratios, PrefixKV(keep=0.4): 2 * ratios}
    profiles.save(path, measured, CONFIG, name="tiny")
    content = profiles.save(path, measured, CONFIG, name="tiny")  # again
    assert json.loads(path.read_text()) == content
    assert list(tmp_path.iterdir()) == [path]
    first, second = content["profiles"]
    assert (first["keep"], first["samples"], second["keep"], content["aggregation"]) == (0.2, 2, 0.4, "mean")
    assert content["model"]["name"] == "tiny" and content["model"]["width"] == 32
    profile = profiles.load(path, CONFIG, keep=0.2)
    assert profile == pytest.approx((0.2, 0.2, 0.2))
    assert profiles.load(path, CONFIG, keep=0.4) == pytest.approx((0.4, 0.4, 0.4))
    PrefixKV(keep=0.2, profile=profile).check_model(3)
    other = dataclasses.replace(CONFIG, decoder=dataclasses.replace(CONFIG.decoder, width=64))
    with pytest.raises(InputError, match="measured on 'tiny', another model: width 32, here 64"):
        profiles.load(path, other, keep=0.2)
    with pytest.raises(InputError, match='measured with scope="all", but the policy has scope="vision"'):
        profiles.load(path, CONFIG, keep=0.2, scope="vision")
    with pytest.raises(InputError, match=r"measured with keep=0.2, 0.4, but the policy has keep=0.1") as error:
        profiles.load(path, CONFIG, keep=0.1)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="but the policy has keep=None"):
        profiles.load(path, CONFIG, keep=None)
    profiles.save(tmp_path / "one.json", {PrefixKV(keep=0.2): ratios}, CONFIG, name="tiny")
    assert profiles.load(tmp_path / "one.json", CONFIG, keep=None) == profile, "for a policy with a budget"
    with pytest.raises(InputError, match="no such folder"):
        profiles.save(tmp_path / "none" / "p.json", measured, CONFIG, name="tiny")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "not a profile"),
        ("[1]", "not a profile"),
        ('{"profiles": [0.1]}', "not a profile"),
        ([0.1, 0.2], "shares must be 3 fractions"),
        ([0.1, 0.2, 2], "shares must be 3 fractions"),
        ([0.1, 0.2, "x"], "shares must be 3 fractions"),
    ],
)
def test_a_damaged_profile_is_named(tmp_path, change, said):
    path = tmp_path / "profile.json"
    content = profiles.save(path, {PrefixKV(keep=0.2): np.full((1, 3), 0.2)}, CONFIG, name="tiny")
    changed = content | {"profiles": [content["profiles"][0] | {"shares": change}]}
    path.write_text(change if isinstance(change, str) else json.dumps(changed))
    with pytest.raises(InputError, match=said):
        profiles.load(path, CONFIG, keep=0.2)
    path.unlink()
    with pytest.raises(InputError, match="no such profile"):
        profiles.load(path, CONFIG, keep=0.2)


def test_the_search_by_bisection_agrees_with_the_exact_one(params):
    """Within a token per layer if it ends at the budget; with few steps only the sum is right."""
    batch = unequal_batch()
    policy = PrefixKV(keep=0.5)
    exact = profiles.measure(params, [batch], policy)
    found, steps = profiles.searched(params, [batch], policy)
    tokens = batch.valid.sum(axis=1)[:, None]
    assert (abs(found - exact) * tokens < 1.01).all() and (steps <= 64).all()
    few, taken = profiles.searched(params, [batch], policy, steps=2)
    assert (taken <= 2).all()
    np.testing.assert_allclose(few.mean(axis=1), 0.5, atol=0.02)
    with pytest.raises(InputError, match="no profile="):
        profiles.searched(params, [batch], PrefixKV(keep=0.2, profile=(0.2, 0.2)))


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


@pytest.fixture
def small(monkeypatch, miniature):
    """The command's demo model is small and untrained."""
    monkeypatch.setattr(loading, "MINI", miniature())
    return miniature()


def test_the_command_reads_questions(capsys, tmp_path, images, small):
    """Random samples of a JSONL; the first ones of more samples are those of fewer (Table 5)."""
    data, out = tmp_path / "questions.jsonl", tmp_path / "profile.json"
    data.write_text("\n".join(json.dumps({"image": image, "question": "read the page"}) for image in images))
    command = ["profile", str(data), "--model", "mini", "--keep", "0.5", "--out", str(out), "--json"]
    found = []
    for options in (["--samples", "1"], [], ["--tolerance", "0.1"], ["--steps", "3"]):
        assert main([*command, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    one, both, loose, short = found
    assert (one["profiles"][0]["samples"], both["profiles"][0]["samples"]) == (1, 2)
    assert both["std"] == [pytest.approx(np.mean(both["profiles"][0]["spread"]))]
    assert 1 <= loose["steps"][0] <= 64 and short["steps"][0] <= 3
    assert np.mean(short["profiles"][0]["shares"]) == pytest.approx(0.5, abs=0.01)
    assert main(command[:-1]) == 0
    assert f"{both['profiles'][0]['shares'][-1]:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--keep", "2"], "keep=2.0 must lie in"),
        (["--out", "/no/such/folder/p.json"], "no such folder"),
        (["--prompts", "a", "b", "c"], "3 prompts for 2 images"),
        (["--images", "/no/such/image.png"], "/no/such/image.png"),
        (["questions.jsonl"], "not both"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--compare", "/no/such/profile.json"], "no such profile"),
    ],
)
def test_a_bad_argument_is_one_line(refused, tmp_path, images, change, said):
    command = ["profile", "--model", "mini", "--images", *images, "--prompts", "read", "--keep", "0.2"]
    refused(main, *command, "--out", tmp_path / "p.json", *change, says=said)
