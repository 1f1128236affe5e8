"""`vlkv eval` on the miniature: against `generate`, against whole conversations, and killed half-way."""

import collections
import dataclasses
import importlib.util
import io
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import vlkv
from tests import programs
from tests.evaluation.entries import entry as entry_of
from tests.models import padded
from vlkv import mini, policies
from vlkv.cli import main
from vlkv.generation import jitted
from vlkv.mini import CHECKPOINT, export, folder
from vlkv.tools.evaluation import dialogue, running
from vlkv.tools.evaluation.journal import Journal
from vlkv.tools.evaluation.records import Record, Settings, Turn, read_records
from vlkv.tools.evaluation.report import plot, summarise, tables
from vlkv.tools.evaluation.running import run
from vlkv.tools.evaluation.statistics import wilson

NEW = 32
SNAPKV = policies.SnapKV(keep=0.2, scope="vision")
READ = "read the page"


@pytest.fixture(scope="module")
def small(miniature):
    """Two layers of the miniature for a small image, which compile quickly and answer anything at all."""
    return miniature()


@pytest.fixture(scope="module")
def model(small):
    return vlkv.load(small)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Two questions about each of six pages."""
    return export.export(tmp_path_factory.mktemp("pages"), 6, kind="digits", questions=2)


@pytest.fixture(scope="module")
def records(questions):
    return read_records(questions)


def asked(model, records, plan, out, **settings):
    """The entries of a run."""
    journal = Journal(out, {})
    run(*model, records, plan, Settings(max_new_tokens=NEW, **settings), journal)
    journal.close()
    return journal.entries


TOGETHER = [SNAPKV, policies.ImgRandom(keep=0.2, scope="vision")]
KEEPS = [
    *(policies.H2O(keep=keep, scope="vision") for keep in (0.5, 0.2)),
    SNAPKV,
    dataclasses.replace(SNAPKV, keep=0.1),
]
APART = [SNAPKV, policies.FastV(keep=0.3, layer=1), policies.compose(SNAPKV, answer=NEW - 5)]


@pytest.mark.default("together")
@pytest.mark.parametrize(
    ("plan", "new", "compiled"),
    [
        (TOGETHER, NEW - 1, {"read_prompt": 1, "fill_cache_with": 2, "decode": 1}),
        (KEEPS, NEW - 2, {"read_prompt": 1, "fill_cache_with": 4, "decode": 2}),
        (APART, NEW - 3, {"begin": 3, "decode": 3}),
    ],
    ids=["together", "two keeps", "apart"],
)
def test_several_policies_in_one_pass_answer_as_each_by_itself(
    small, model, questions, tmp_path, plan, new, compiled, caplog, capsys
):
    """Read together, with a key, two keeps in one program, and two with their own prefill; three rows, two batches.

    One of these reduces the prompt, the other compresses during the answer. Each program is compiled once, by the
    threads that compile before the first batch, and not again where it is called. No other test has so many new tokens.
    """
    params, processor = model
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    rows = [{**row, "image": str(questions.parent / row["image"])} for row in rows if row["question"] == READ][:3]
    (tmp_path / "three.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["eval", str(tmp_path / "three.jsonl"), "--model", str(small), "--out", str(tmp_path / "out"), "--json"]
    command += ["--batch", "2", "--seed", "3", "--max-new-tokens", str(new), "--policy", *map(policies.text_of, plan)]
    with caplog.at_level(logging.DEBUG, "jax._src.dispatch"):
        assert main(command) == 0
    found = re.findall(r"Finished XLA compilation of jit\((read_prompt|fill_cache_with|begin|decode)\)", caplog.text)
    assert collections.Counter(found) == compiled
    printed = json.loads(capsys.readouterr().out)
    held, *lines = map(json.loads, (tmp_path / "out" / "journal.jsonl").read_text().splitlines())
    entries = {(line["row"], line["turn"], line["policy"]): line for line in lines}
    assert sorted(entries) == [(row, 0, policy) for row in range(3) for policy in range(len(plan))]
    assert held["run"]["policies"] == [row["policy"] for row in printed["rows"]] == list(map(policies.text_of, plan))
    for batch, places in enumerate(([0, 1], [2])):
        images = [rows[place]["image"] for place in places]
        inputs = processor([*images, *images[-1:] * (2 - len(places))], [READ] * 2)
        for i, policy in enumerate(plan):
            key = jax.random.fold_in(jax.random.key(3), batch)
            output = by_itself(params, inputs, plan, policy, vlkv.Greedy(max_new_tokens=new), key)
            answers = processor.decode(output.tokens)
            for place, row in enumerate(places):
                entry = entries[row, 0, i]
                assert (entry["answer"], entry["tokens"]) == (answers[place], output.lengths[place])
                assert entry["bytes"] * 2 == output.cache_bytes
                assert entry["begun"] == min(entry["tokens"], output.compressed_after)
                assert entry["bytes_before"] * 2 == (output.bytes_before or 0)


def by_itself(params, inputs, plan, policy, sampling, key):
    """`generate`; for the cheapest plan the programs that the run has compiled already, called one after the other."""
    if plan != TOGETHER:
        return programs.generate(params, inputs, policy=policy, sampling=sampling, key=key)
    new, key = sampling.max_new_tokens, jax.random.split(key)[0]
    prompt = jitted.read_prompt(params, inputs, observers=tuple(plan), new_tokens=new)
    cache = jitted.fill_cache_with(prompt, policy, None, new_tokens=new, key=key)
    tokens, lengths = jitted.decode(params, cache, prompt.logits, sampling=sampling, begun=None)
    return types.SimpleNamespace(
        tokens=tokens, lengths=lengths, cache_bytes=cache.bytes, compressed_after=0, bytes_before=None
    )


@pytest.mark.full
def test_later_turns_see_the_whole_conversation(model, records, tmp_path):
    """Perplexity of each turn's reference with the full cache, against no cache on one text that holds it all."""
    params, processor = model
    first, second = records[0], records[1]
    assert first.images == second.images
    record = Record(1, "1", first.images, first.turns + second.turns)
    entries = asked(model, [record, record], [policies.Full()], tmp_path, batch=2, perplexity=True)
    said = [entries[0, turn, 0]["answer"] for turn in range(2)]
    encode = folder.tokenizer().encode
    start = f"USER: <image> {first.turns[0].question} ASSISTANT:"
    prompts = [encode(start).ids, encode(f"{start} {said[0]} USER: {second.turns[0].question} ASSISTANT:").ids]
    wanted = [[*encode(turn.answers[0], add_special_tokens=False).ids, folder.EOS] for turn in record.turns]
    rows = [
        np.repeat(row, np.where(np.array(row) == folder.IMAGE, params.config.vision.tokens, 1))
        for row in ([*ids, *answer] for ids, answer in zip(prompts, wanted, strict=True))
    ]
    pixels = np.asarray(processor([record.images[0]] * 2, [READ] * 2).pixels)
    inputs = vlkv.Inputs.from_hf({**padded(rows), "pixel_values": pixels}, params.config)
    log_p = np.asarray(jax.nn.log_softmax(programs.forward(params, inputs)))
    for turn, (row, answer) in enumerate(zip(rows, wanted, strict=True)):
        own, entry = log_p[turn, len(row) - len(answer) - 1 : len(row) - 1], entries[1, turn, 0]
        assert entry["reference"] == len(answer)
        assert entry["log_probability"] == pytest.approx(own[np.arange(len(answer)), answer].sum(), abs=1e-3)
        assert said[turn].startswith(processor.decode(own[:1].argmax(-1)))


@pytest.mark.full
def test_query_agnostic_keeps_the_same_for_every_question(model, records, tmp_path):
    params, processor = model
    images, texts = [records[0].images[0]] * 2, [records[0].turns[0].question, records[1].turns[0].question]
    before = processor(images, texts, query_agnostic=True)
    prompt = programs.read_prompt(params, before)
    cache = programs.fill_cache(prompt, SNAPKV, new_tokens=48)
    np.testing.assert_array_equal(cache.token[0], cache.token[1])
    # And the run is: that cache, then the question, then the answer.
    fed = processor.extension(
        [processor.prompts.before_question(text, 1) for text in texts],
        [processor.prompts.write(text, 1) for text in texts],
    )
    ids = folder.tokenizer().encode(f"{texts[1]} ASSISTANT:", add_special_tokens=False).ids
    assert fed.tokens[1, fed.valid[1]].tolist() == ids
    cache, logits = programs.extend(params, cache, fed)
    decode = jax.jit(vlkv.decode, static_argnames="sampling")
    answers = processor.decode(decode(params, cache, logits, sampling=vlkv.Greedy(max_new_tokens=NEW))[0])
    plan = [policies.Full(), SNAPKV]
    agnostic = asked(model, records[:4], plan, tmp_path, batch=2, query_agnostic=True)
    assert [agnostic[row, 0, 1]["answer"] for row in range(2)] == answers
    # A query-aware run compresses another prompt; with the full cache the answers are the same.
    (tmp_path / "aware").mkdir()
    aware = asked(model, records[:4], plan, tmp_path / "aware", batch=2)
    assert [agnostic[row, 0, 0]["answer"] for row in range(4)] == [aware[row, 0, 0]["answer"] for row in range(4)]
    assert [agnostic[row, 0, 1]["answer"] for row in range(4)] != [aware[row, 0, 1]["answer"] for row in range(4)]


def test_numbers_of_the_report():
    records = [Record(1, "1", (), (Turn("q", ("4 2",)),)), Record(2, "2", (), (Turn("q", ("7",)),))]
    likely = {"log_probability": math.log(1 / 8), "reference": 3}
    second = entry_of(1, answer="8", tokens=1, bytes=200, **likely)
    entries = {(0, 0, 0): entry_of(tokens=4, **likely), (1, 0, 0): second}
    result = summarise(records, [SNAPKV], ["exact", "perplexity"], entries)
    intervals = {"exact": wilson(0.5, 2), "perplexity": pytest.approx((2, 2))}
    row = {"policy": "snapkv(keep=0.2, scope='vision')", "name": "snapkv(keep=0.2, scope='vision')", "keep": 0.2,
           "budget": None, "scope": "vision", "exact": 0.5, "perplexity": pytest.approx(2), "intervals": intervals,
           "from_full": {}, "cache_bytes": 150, "compressed_after": 0, "bytes_before": None,
           "tokens_per_second": 3}  # fmt: skip
    assert result["rows"] == [row]
    assert [answer["said"] for answer in result["answers"]] == [["4 2"], ["8"]]
    assert "before" not in shown(result)
    # Compressed after two tokens of the first answer, and after the only token of the second: one step follows.
    late = {place: {**each, "begun": min(2, each["tokens"]), "bytes_before": 2048} for place, each in entries.items()}
    result = summarise(records, [policies.compose(SNAPKV, answer=2)], ["exact", "perplexity"], late)
    text = "compose(snapkv(keep=0.2, scope='vision'), answer=2)"
    row |= {"policy": text, "name": text, "compressed_after": 2, "bytes_before": 2048, "tokens_per_second": 1}
    assert result["rows"] == [row]
    short = {place: {**entry, "tokens": 1} for place, entry in entries.items()}
    assert math.isnan(summarise(records, [SNAPKV], ["exact"], short)["rows"][0]["tokens_per_second"]), "no step at all"
    assert all(text in shown(result) for text in ("answer=2", "KiB before", "0.1", "2.0"))


def test_the_first_methods_answer_before_others_are_compiled(tmp_path, monkeypatch):
    """Two methods, then four at a time, however many keeps they have; nothing is compiled while a policy answers."""
    events, said = [], []

    class Evaluator(types.SimpleNamespace):
        sampling = None

        def __init__(self, *_):
            super().__init__(check=lambda: None, choose_buckets=lambda: None, first_inputs=lambda batch: (None, 1))

        def compile(self, work, group, advance):
            events.append(group)

        def answer(self, work, policy, size, begun):
            events.append(policy)
            return [entry_of(row, policy) for row in work.batch.rows]

    monkeypatch.setattr(running, "_Evaluator", Evaluator)
    monkeypatch.setattr(running, "compressed", lambda work, plan, todo: ((i, 0, None) for i in todo))
    monkeypatch.setattr(running, "AT_A_TIME", 4)  # with four cores
    methods = [policies.SnapKV, policies.H2O, policies.Knorm, policies.KeyDiff, policies.AirCache, policies.CSP]
    plan = [policies.Full(), *(method(keep=keep) for method in methods for keep in (0.5, 0.2))]
    journal = Journal(tmp_path, {})
    records = [Record(i, str(i), (), (Turn("q", ("a",)),)) for i in range(4)]
    journal.append([entry_of(row, 0) for row in range(2)])
    run(None, None, records, plan, Settings(batch=2), journal, advance=lambda *given, **_: said.append(given))
    journal.close()
    first = [[1, 2, 3, 4], 1, 2, 3, 4, [5, 6, 7, 8, 9, 10, 11, 12], *range(5, 13)]
    whole = [[0, 1, 2], 0, 1, 2, [3, 4, 5, 6, 7, 8, 9, 10], *range(3, 11), [11, 12], 11, 12]
    assert events == first + whole
    assert sum(count for count, *_ in said) == 4 * 13 - 2 and (0, "question 3 of 4") in said


def shown(result):
    """The table as text."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*tables(result), sep="\n")
    return console.export_text()


def test_tables_and_plot_have_names_intervals_and_differences(tmp_path):
    """Two of four right with the full cache, one with SnapKV, whose keeps are one line; speeds are points."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    records = [Record(i, str(i), (), (Turn("q", ("4 2",)),)) for i in range(4)]
    plan = [policies.Full(), SNAPKV, dataclasses.replace(SNAPKV, keep=0.1)]
    said = [["4 2", "4 2", "8", "8"], ["4 2", "8", "8", "8"], ["8"] * 4]
    entries = {(row, 0, i): entry_of(row, policy=i, answer=answer, bytes=1024 * (4 - i))
               for i, answers in enumerate(said) for row, answer in enumerate(answers)}  # fmt: skip
    result = summarise(
        records, plan, ["exact"], entries, names=["full", "[x]/mine.py:A(keep=0.2)", "[x]/mine.py:A(keep=0.1)"]
    )
    full, first, second = result["rows"]
    assert full["from_full"] == {} and first["from_full"]["exact"][0] == -0.25
    assert first["from_full"]["exact"][1] != second["from_full"]["exact"][1] and first["intervals"]["exact"][0] > 0
    text = shown(result)
    assert "50.0" in text and "15.0 to 85.0" in text and "difference from the full cache" in text and "-25.0" in text
    assert text.count("[x]/mine.py:A(keep=0.2)") == 2, "brackets are no markup"
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure, "savefig", lambda self, file, **_: (drawn.append(self), file.touch()))
        plot(result, tmp_path / "a.png", "the title")
    left, right = drawn[0].axes
    assert drawn[0].get_suptitle() == "the title"
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["full", "[x]/mine.py:A"]
    for axes, line in ((left, "-"), (right, "None")):
        assert [container.lines[0].get_linestyle() for container in axes.containers] == [line] * 2
        heights = [np.ptp(path.get_segments()[0][:, 1]) for c in axes.containers for path in c.lines[2]]
        assert min(heights) > 30, "intervals"


def test_references_by_the_full_cache():
    """Of "4 2" and the full cache's "4 2 1" 2 of 2 and 2 of 3 words; the full cache's own two drawn answers: 1 of 2."""
    pytest.importorskip("rouge_score")
    records = [Record(1, "1", (), (Turn("q", ()),))]
    entries = {(0, 0, 0): entry_of(), (0, 0, 1): entry_of(policy=1, answer="4 2 1", drawn=["4 2", "4 1"])}
    result = summarise(records, [SNAPKV, policies.Full()], ["self-rouge-l"], entries, "echo 7")
    assert [row["self-rouge-l"] for row in result["rows"]] == pytest.approx([4 / 5, 1 / 2])
    assert [row["judge"] for row in result["rows"]] == [7, 7] and result["metrics"] == ["self-rouge-l", "judge"]


@pytest.mark.full
def test_references_and_drawn_answers(model, records, tmp_path):
    """References observe in the place of answers. The full cache draws two answers, other policies none.

    At a low temperature they are the greedy answer, at a high one they differ.
    """
    params, processor = model
    late, record = policies.compose(SNAPKV, answer=2), records[0]
    for name in ("late", "hot", "cold"):
        (tmp_path / name).mkdir()
    entry = asked(model, [record], [late], tmp_path / "late", perplexity=True)[0, 0, 0]
    ids = dialogue.reference(processor, record, [])
    inputs, targets = processor(record.images[0], record.turns[0].question), np.array([[*ids, -1, -1, -1]])
    assert entry["reference"] == len(ids) and entry["begun"] == 2
    assert entry["log_probability"] == pytest.approx(float(vlkv.score(params, inputs, targets, late).sum()), abs=1e-3)
    cold = asked(model, [record], [policies.Full(), SNAPKV], tmp_path / "cold", temperature=1e-6)
    assert cold[0, 0, 0]["drawn"] == [cold[0, 0, 0]["answer"]] * 2 and cold[0, 0, 1]["drawn"] == []
    hot = asked(model, [record], [policies.Full()], tmp_path / "hot", temperature=5.0)[0, 0, 0]
    assert hot["drawn"][0] != hot["drawn"][1] and hot["answer"] == cold[0, 0, 0]["answer"]


@pytest.mark.full
def test_killed_and_continued_it_gives_the_same(small, questions, root, tmp_path, capsys):
    options = ["--model", str(small), "--policy", "full", "snapkv", "--keep", "0.2", "--scope", "vision",
               "--metric", "exact", "--batch", "2", "--max-new-tokens", str(NEW)]  # fmt: skip

    def command(out, *more):
        return ["eval", str(questions), *options, "--out", str(tmp_path / out), *more]

    environment = os.environ | {
        "PYTHONPATH": str(root), "JAX_COMPILATION_CACHE_DIR": str(root / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }  # fmt: skip
    journal = tmp_path / "killed" / "journal.jsonl"
    with subprocess.Popen([sys.executable, "-m", "vlkv.cli", *command("killed")], env=environment, cwd=root,
                          stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:  # fmt: skip
        end = time.monotonic() + 300
        while not (journal.is_file() and journal.read_bytes().count(b"\n") >= 4) and time.monotonic() < end:
            assert process.poll() is None, process.stderr.read().decode()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    held = journal.read_bytes()
    assert 4 <= held.count(b"\n") < 25, "killed before the end"
    assert not (tmp_path / "killed" / "results.json").exists()
    journal.write_bytes(held + b'{"row": 3, "turn": 0, "answ')
    assert main(command("killed")) == 0
    capsys.readouterr()
    assert journal.read_bytes().startswith(held) and journal.read_bytes().count(b"\n") == 25
    assert main(command("whole", "--json")) == 0
    printed = json.loads(capsys.readouterr().out)

    def numbers(name):
        result = json.loads((tmp_path / name / "results.json").read_text())
        for row in result["rows"]:
            assert row.pop("tokens_per_second") > 0
        return result

    assert numbers("killed") == numbers("whole")
    assert printed["rows"][1]["cache_bytes"] < printed["rows"][0]["cache_bytes"]
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "whole" / "quality.png").stat().st_size > 1000
    assert main([*command("whole"), "--seed", "1"]) == 2
    assert "belongs to a run that differs in seed; resume it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--model", "nowhere"], "nowhere: no such folder"),
        (["--metric", "bleu"], "no metric 'bleu'"),
        (["--policy", "snapkw"], "did you mean snapkv"),
        (["--policy", "snapkv(0.1)"], "give options by name"),
        (["--policy", "snapkv"], "give either keep="),
        (["--policy", "kivi", "--metric", "self-rouge-l"], "add full to --policy"),
        (["--batch", "0"], "batch=0 must be at least 1"),
        (["--max-new-tokens", "2000"], "exceed the model's limit of 2048"),
        (["--max-new-tokens", "2", "--metric", "perplexity"], "line 1: the first answer has"),
        (["--max-new-tokens", "4", "--policy", "compose(snapkv(keep=0.2), answer=3)"], "give at least 5"),
    ],
)
def test_bad_input_is_one_line(questions, tmp_path, refused, changes, said):
    refused(main, "eval", questions, "--model", CHECKPOINT, "--out", tmp_path, *changes, says=said)


def test_records_that_do_not_fit_the_settings(model, records, tmp_path):
    late, turn = policies.compose(SNAPKV, answer=2), Turn("q", ("a",))
    with pytest.raises(vlkv.InputError, match="line 1: no context and no image"):
        asked(model, [Record(1, "1", (), (turn,))], [policies.Full()], tmp_path, query_agnostic=True)
    with pytest.raises(vlkv.InputError, match="line 7: several turns"):
        asked(model, [Record(7, "7", records[0].images, (turn, turn))], [late], tmp_path / "turns")
    with pytest.raises(vlkv.InputError, match="query-agnostic"):
        asked(model, records[:1], [late], tmp_path / "agnostic", query_agnostic=True)


def test_a_program_takes_steps_before_it_is_timed():
    """The first step is slow. A program that is loaded already does not answer twice."""
    answered, loaded = [], []

    def decode(params, cache, logits, **_):
        answered.append(bool(jnp.isfinite(logits).all()))
        loaded[:] = ["a program"]
        return jnp.zeros((1, 2)), jnp.ones(1)

    decode._cache_size = lambda: len(loaded)
    evaluator = types.SimpleNamespace(params=None, sampling=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jitted, "decode", decode)
        for expected in ([False, True, True], [False, True]):
            running._Evaluator._decode(evaluator, None, jnp.zeros((1, 3)))
            assert answered == expected
            answered.clear()


@pytest.mark.full
def test_the_clock_times_decoding_alone(model, records, monkeypatch):
    """Not the work that jax has started before, nor compilation, also if the program was freed in between."""
    params, processor = model
    evaluator = running._Evaluator(params, processor, records, [SNAPKV], Settings(max_new_tokens=2))
    inputs = processor(mini.PAGE, mini.QUESTION)
    cache, logits = jitted.prefill(params, inputs, SNAPKV, new_tokens=2)
    seconds = evaluator._decode(cache, logits)[2]

    @jax.jit
    def slow(logits):
        x = jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), jnp.eye(500))
        return logits + 1e-30 * x.sum()

    slow(logits).block_until_ready()
    begin = time.perf_counter()
    pending = slow(logits)
    dispatched = time.perf_counter() - begin
    measured = evaluator._decode(cache, pending)[2]
    waited = time.perf_counter() - begin
    assert dispatched < 0.1 * waited, "the work is still going on when the clock could start"
    assert measured < 0.3 * waited
    jax.clear_caches()
    assert evaluator._decode(cache, logits)[2] < 10 * seconds, "it was compiled again, which takes much longer"


def test_the_log_probability_of_a_reference_is_the_sum_over_its_tokens(monkeypatch):
    monkeypatch.setattr(running, "_log_probabilities", lambda params, cache, logits, targets: -np.float32(targets))
    targets, nothing = np.array([[1, 2, 3], [4, 5, 6]]), SimpleNamespace(params=None)
    found = running._Evaluator._score(nothing, targets, None, policies.Full(), None, None, None)
    np.testing.assert_array_equal(found, [-6, -15])
