"""The drift of attention: recovered where it is known, measured on a model, drawn, saved, and as a kernel."""

from __future__ import annotations

import ast
import dataclasses
import json
from functools import partial

import jax
import numpy as np
import pytest
from PIL import Image

import vlkv
from tests import reference
from tests.models import CONFIG, embed, unequal_batch
from vlkv import InputError, loading
from vlkv.analysis import drift
from vlkv.cli import main
from vlkv.mini import pages
from vlkv.policies import Smooth, SnapKV, text_of
from vlkv.tools.commands import tune

SIDE, LAYERS, HEADS = 9, 2, 3
STEPS = len(drift.STEPS)
GRID = np.array([(0, y, x) for y in range(SIDE) for x in range(SIDE)] + [(-1, -1, -1)] * 4)


def moved(attention, offset, on):
    """What the attention [..., T] is `offset` further on, in float64; what would leave the image is lost."""
    if on == "order":
        result = np.zeros_like(attention)
        n = attention.shape[-1]
        result[..., max(0, offset) : n + min(0, offset)] = attention[..., max(0, -offset) : n - max(0, offset)]
        return result
    result, place = np.zeros_like(attention), {tuple(x): i for i, x in enumerate(GRID.tolist()) if x[0] >= 0}
    for (image, line, column), i in place.items():
        if (target := place.get((image, line + offset[0], column + offset[1]))) is not None:
            result[..., target] = attention[..., i]
    return result


def looks(known, on, *, samples=12, noise=0.0, seed=0):
    """Attention of samples whose drift in each step is `known[step][offset]` of each head: an array [L, K]."""
    rng = np.random.default_rng(seed)
    among = np.arange(len(GRID)) < SIDE**2
    made = []
    for number in range(samples):
        before = rng.exponential(size=(LAYERS, HEADS, len(GRID))) ** 4 * among
        before /= before.sum(axis=-1, keepdims=True)
        after = np.zeros((STEPS, *before.shape))
        for step, shares in enumerate(known):
            if step == 1 and number < 2:
                continue  # the answers of two samples are shorter
            rest = 1 - sum(shares.values())
            after[step] = sum(share[..., None] * moved(before, d, on) for d, share in shares.items())
            after[step] += rest[..., None] * among / among.sum()
            after[step] += noise * rng.random(after[step].shape) * among
        made.append(drift.Look(before, after, among, GRID))
    return made


@pytest.mark.parametrize("on", ["order", "grid"])
def test_a_known_drift_is_recovered_at_each_step_and_head(on):
    rng = np.random.default_rng(1)
    near, far = (1, 3) if on == "order" else ((0, 1), (2, -1))
    known = [{near: rng.uniform(0.2, 0.5, (LAYERS, HEADS)), far: np.full((LAYERS, HEADS), 0.1)},
             {far: rng.uniform(0.4, 0.8, (LAYERS, HEADS))}]  # fmt: skip
    measured = drift.measure(looks(known, on), on=on, reach=3, resamples=10)
    index = {tuple(d): i for i, d in enumerate(measured.offsets.tolist())}
    near, far = (index[d if isinstance(d, tuple) else (d,)] for d in (near, far))
    assert measured.samples.tolist() == [12, 10, *[0] * (STEPS - 2)]
    want = np.zeros((LAYERS, HEADS, len(index)))
    want[..., near], want[..., far] = known[0].values()
    want[..., far] = known[1].popitem()[1]  # the larger one
    np.testing.assert_allclose(measured.peak_heads.share[..., :-1], want, atol=2e-3)
    np.testing.assert_allclose(measured.steps.share[0, far], 0.1, atol=2e-3)
    assert measured.steps.share[1, near] < 2e-3, "each step has its own drift"
    common, by_head = measured.weights(by_head=False), measured.weights(floor=False)
    assert {each[:-1] for each in common} == {tuple(measured.offsets[i].tolist()) for i in (near, far)}
    largest = want.max(axis=-1)
    for *offset, weight in by_head:
        np.testing.assert_allclose(np.array(weight) * largest, want[..., index[tuple(offset)]], atol=6e-3)
    floors, each = ({tuple(offset): weight for *offset, weight in x} for x in (common, by_head))
    floored = {tuple(offset): weight for *offset, weight in measured.weights()}
    assert floored.keys() == floors.keys() | each.keys()
    for offset, weight in floored.items():
        np.testing.assert_array_equal(weight, np.maximum(each.get(offset, 0.0), floors.get(offset, 0.0)))


def test_intervals_contain_the_truth_under_noise():
    known = [{2: np.full((LAYERS, HEADS), 0.6)}]
    measured = drift.measure(looks(known, "order", samples=40, noise=0.02), reach=4)
    at = measured.offsets[:, 0].tolist().index(2)
    assert measured.mean.low[at] - 0.02 < 0.6 < measured.mean.high[at] + 0.02
    assert measured.mean.low[at] < measured.mean.share[at] < measured.mean.high[at]
    with pytest.raises(InputError, match="no kernel can be made"):
        drift.measure(looks([{0: np.zeros((LAYERS, HEADS))}], "order"), reach=2, resamples=10).weights()


def test_what_a_kernel_captures():
    """Attention that moves by 2: without smoothing the best tokens are the old ones, with the kernel the new ones."""
    known = [{2: np.ones((LAYERS, HEADS))}]
    made = looks(known, "order", samples=2)
    kept = round(0.1 * SIDE**2 - 0.5)
    got = drift.captured(made, Smooth(((2, 1.0),)), 0.1)
    want = [np.sort(look.after[0] * look.among, axis=-1)[..., -kept:].sum(axis=-1).mean() for look in made]
    np.testing.assert_allclose(got[:, 0], want, rtol=1e-5)
    assert np.isnan(got[:, 1]).all(), "no answer has a second step"
    assert (drift.captured(made, None, 0.1)[:, 0] < got[:, 0]).all()


@pytest.mark.parametrize("scope", ["all", "vision"])
def test_the_attention_of_question_and_answer_of_a_model(params, scope):
    """Against float64 attention of the prompt, and of the prompt with its answer."""
    batch, new = unequal_batch(padding="right"), 4
    policy = SnapKV(keep=0.9, window=3, kernel=1, scope=scope)  # a smaller budget would shrink the window
    made = drift.observe(params, [batch], policy, sampling=vlkv.Greedy(max_new_tokens=new, stop=()))
    used = [i for i in range(len(batch.valid)) if scope == "all" or batch.is_vision[i].any()]
    assert len(made) == len(used)
    output = jax.jit(vlkv.generate)(params, batch, policy=vlkv.policies.Full(),
                                    sampling=vlkv.Greedy(max_new_tokens=new, stop=()))  # fmt: skip
    answers = np.asarray(output.tokens)
    longer = batch.with_ends([0] * len(answers), list(answers))
    x, lengths = np.asarray(embed(params, longer)), batch.valid.sum(axis=1)
    for row, look in zip(used, made, strict=True):
        length = lengths[row]
        place = np.arange(len(look.among))
        among = batch.is_vision[row] if scope == "vision" else (place >= 4) & (place < length - 3)
        np.testing.assert_array_equal(look.among, among & batch.valid[row])
        _, layers = reference.prefill(params.decoder, x[row, longer.valid[row]])
        for number, (q, k, *_) in enumerate(layers):
            attention = np.stack([softmax(q, k, n) for n in range(length + new - 1)])  # [T, N, T]
            grouped = attention.reshape(len(attention), k.shape[1], -1, attention.shape[-1]).mean(axis=2)[..., :length]
            grouped = grouped * look.among[:length]
            for step, rows in [
                (None, slice(length - 3, length)),
                *[(j, slice(length + j, length + j + 1)) for j in range(3)],
            ]:
                want = grouped[rows].sum(axis=0)
                got = look.before if step is None else look.after[step]
                np.testing.assert_allclose(got[number][:, :length], want / want.sum(axis=-1, keepdims=True), atol=2e-5)


def softmax(q, k, row):
    """Attention of one row [N, T]; q [T, N, H], k [T, K, H]."""
    keys = np.repeat(np.asarray(k, np.float64), q.shape[1] // k.shape[1], axis=1)
    logits = np.einsum("nh,tnh->nt", np.asarray(q[row], np.float64), keys) / np.sqrt(q.shape[-1])
    logits[:, row + 1 :] = -np.inf
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def test_a_saved_drift_is_a_kernel(tmp_path):
    known = [{1: np.full((LAYERS, HEADS), 0.8)}]
    measured, file = drift.measure(looks(known, "order"), reach=2, resamples=5), tmp_path / "drift.json"
    content = drift.save(file, measured, SnapKV(keep=0.1), CONFIG, name="tiny")
    assert json.loads(file.read_text()) == json.loads(json.dumps(content)) and content["model"]["name"] == "tiny"
    assert drift.load(file).weights() == measured.weights()
    smooth = Smooth(str(file), pooling="max")
    assert smooth == Smooth(measured.weights(), pooling="max")
    np.testing.assert_array_equal(smooth.weights, np.broadcast_to([1.0, 0], (LAYERS, HEADS, 2)))
    text = vlkv.policies.text_of(vlkv.policies.compose(SnapKV(keep=0.1), smooth=smooth))
    assert vlkv.policies.make(text).slots.smooth == smooth
    file.write_text("{}")
    with pytest.raises(InputError, match="not a drift"):
        drift.load(file)
    for content in ("", "[1]", '{"kernel": 3}', '{"kernel": []}', '{"kernel": [1, 2]}'):
        file.write_text(content)
        with pytest.raises(InputError, match="not a kernel; make it again"):
            Smooth(str(file))
    with pytest.raises(InputError, match="no such kernel"):
        Smooth(str(tmp_path / "none.json"))
    other = dataclasses.replace(measured, on="grid")
    assert other.weights() == measured.weights()


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def questions(monkeypatch, miniature, tmp_path):
    """Two ledger pages for the demo model, which is small and untrained."""
    monkeypatch.setattr(loading, "MINI", miniature())
    rows = []
    for number, sample in enumerate(pages.held_out(2, seed=3)):
        sample.image.save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "question": sample.question, "answer": sample.answer})
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "questions.jsonl"


def test_the_command_writes_a_kernel_and_a_picture(capsys, monkeypatch, questions):
    monkeypatch.setattr(drift, "observe", lambda *a, **_: list(a[1]) and looks(KNOWN, "grid"))
    monkeypatch.setattr(drift, "measure", partial(drift.measure, resamples=20))
    out = questions.parent / "drift.json"
    command = ["profile", str(questions), "--model", "mini", "--what", "drift", "--scope", "vision", "--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "+1, +0" in said and "elsewhere" in said and str(out) in said
    assert Smooth(str(out)).kernel == ((1, 0, ((1.0,) * HEADS,) * LAYERS),)
    assert Image.open(out.with_suffix(".png")).size[0] > 1000
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "snapkv(keep=0.1, scope='vision', window=8, kernel=1)"


KNOWN = [{(1, 0): np.full((LAYERS, HEADS), 0.7)}]


@pytest.mark.parametrize(
    ("best", "name", "equal"),
    [("(4, 4)", "4 x 4 before, max", 1), ("0.123", "measured, max", 1), ("", "measured, max", 22)],
)
def test_the_best_kernel_of_the_questions_is_chosen(capsys, monkeypatch, questions, best, name, equal):
    """All candidates are asked at equal bytes; the best one, or the measured one of many, is printed as Python."""
    measured = questions.parent / "drift.json"
    measured.write_text(json.dumps({"kernel": [[1, 0, [[0.123, 1.0]] * 2]]}))

    def answers(args, processor, file, records, plan, settings):
        kinds = enumerate(plan)
        entry = {"turn": 0, "tokens": 1, "seconds": 0.1, "bytes": 1, "bytes_before": 0, "begun": 0, "drawn": [],
                 "log_probability": 0.0, "reference": 0}  # fmt: skip
        return {}, {(row, 0, i): {**entry, "row": row, "policy": i,
                                  "answer": record.turns[0].answers[0] if best in text_of(policy) else "x"}
                    for i, policy in kinds for row, record in enumerate(records)}  # fmt: skip

    monkeypatch.setattr(tune, "answers", answers)
    command = ["tune", questions, "--model", "mini", "--bytes", "0.05", "--drift", measured, "--out", questions.parent]
    assert main([str(word) for word in command]) == 0
    said = capsys.readouterr().out
    assert f"best: {name} (equal with {equal} more" in said
    code = said.strip().splitlines()[-1].partition("make(")[2].removesuffix(")")
    policy = vlkv.policies.make(ast.literal_eval(code))
    one_sided = Smooth((4, 4), one_sided=True, pooling="max")
    assert policy.slots.smooth == (one_sided if best == "(4, 4)" else Smooth(str(measured), pooling="max"))
    assert policy.slots.store.bits == 4 and "0.123" not in code
    content = json.loads((questions.parent / "tuned.json").read_text())
    assert len(content["points"]) == 24 and content["best"]["quality"] == 1.0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["profile", "--what", "drift", "--policy", "snap"], "snap"),
        (["profile"], "give --keep"),
        (["tune", "--bytes", "2"], "--bytes 2.0 must lie in (0, 1]"),
        (["tune", "--drift", "none.json"], "none.json: no such kernel"),
        (["tune", "--metric", "best"], "best"),
    ],
)
def test_a_bad_argument_of_the_commands_is_one_line(refused, questions, command, said):
    name, *options = command
    refused(main, name, questions, "--model", "mini", "--out", questions.parent / "d.json", *options, says=said)
