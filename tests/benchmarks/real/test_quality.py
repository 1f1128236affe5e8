"""`benchmarks.real quality` on a tiny model: its questions, its answers beside transformers', its resumption."""

import json

import pytest

import vlkv
from benchmarks.real import quality, tables, tasks
from benchmarks.real.quality import NEW
from tests.processing.conftest import TEXT_CONFIG, write_folder
from vlkv.families import config_from_hf
from vlkv.processing import Processor
from vlkv.tools.evaluation import dialogue
from vlkv.tools.evaluation.peers import split

LENGTH = 1400  # the tiny tokenizer has a token per byte
ARGS = ["--length", str(LENGTH), "--questions", "1", "--task", "one-key", "--method", "full", "snapkv"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.parity.conftest import make_text, save_tokenizer

    folder = tmp_path_factory.mktemp("text")
    make_text("llama", max_position_embeddings=2048, vocab_size=260).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("processor"), template=None)
    return Processor.from_folder(folder, config_from_hf(TEXT_CONFIG))


def answered(folder, path, monkeypatch, *methods: str, peers: bool) -> list[dict]:
    if not peers:
        monkeypatch.setattr(quality.peers, "available", lambda: "kvpress is missing")
    assert quality.main([*ARGS, *methods, "--model", str(folder), "--out", str(path)]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.mark.parametrize("task", tasks.TASKS)
def test_questions_fill_their_length_and_contain_their_answers(processor, task):
    made = [tasks.record(processor, task, LENGTH, number) for number in (0, 1, 0)]
    assert made[0] == made[2] and made[0].context != made[1].context
    for record in made[:2]:
        turn = record.turns[0]
        count = len(processor.encode(dialogue.prompt(processor, record, []), begin=False))
        assert count <= LENGTH
        assert all(f"{answer}" in record.context for answer in turn.answers)
        assert tasks.score(turn.answers, f"Here: {', '.join(turn.answers)}.") == 1
        assert tasks.score(turn.answers, "none of them") == 0


@pytest.mark.full
def test_our_side_answers_as_transformers_and_resumes(folder, tmp_path, monkeypatch, capsys):
    from tests.parity.conftest import make_text, torch

    path, processor = tmp_path / "rows.jsonl", vlkv.loading.load_processor(folder)
    rows = answered(folder, path, monkeypatch, peers=False)
    assert len(rows) == 4 and all(row["engine"] == "vlkv" and row["bytes"] > 0 for row in rows)
    assert "kvpress not measured: kvpress is missing" in capsys.readouterr().err
    model = make_text("llama", max_position_embeddings=2048, vocab_size=260)
    record = tasks.record(processor, "one-key", LENGTH, 0)
    ids = torch.tensor(processor.encode(dialogue.prompt(processor, record, []), begin=False)[None]).long()
    wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    for row in rows:
        if row["method"] == "full":  # the same answer in both protocols
            assert row["tokens"] == wanted and row["kept"] == row["prompt"]
        else:
            assert row["kept"] == row["prompt"] // 4
    context = split(processor, record, agnostic=True)
    assert len(context.ids) + len(context.fed) == ids.shape[1] and len(context.fed) > 100

    whole = path.read_text()
    path.write_text(whole[: whole.rfind("\n", 0, -1) + 20])  # the last line is incomplete
    again = answered(folder, path, monkeypatch, peers=False)
    assert [row["tokens"] for row in again] == [row["tokens"] for row in rows]
    assert path.read_text().startswith(whole[: whole.rfind("\n", 0, -1) + 1])
    assert quality.main([*ARGS, "--model", str(folder), "--out", str(path), "--keep", "0.5"]) == 2
    assert "belongs to a run that differs in keep" in capsys.readouterr().err


def test_tables_by_hand(capsys):
    key = {"protocol": "question", "length": 1000, "task": "one-key", "number": 0, "method": "snapkv"}
    row = {**key, "answer": "a", "score": 1.0, "kept": 250.0, "bytes": 1024, "prefill_seconds": 1.0,
           "compress_seconds": 0.1, "decode_seconds": 0.2, "tokens": [5, 6, 7], "margins": None}  # fmt: skip
    other = {**row, "engine": "kvpress", "answer": "b", "tokens": [5, 8], "margins": [3.0, 0.25]}
    (pair,) = tables.pairs([{**row, "engine": "vlkv"}, other])
    assert (pair.first_difference, pair.margin) == (1, 0.25)
    tables.show([{**row, "engine": "vlkv"}, other])
    printed = capsys.readouterr().out
    assert "1000 tokens, question seen" in printed and "0 of 1" in printed and "100.0 [20.7, 100.0]" in printed
    line = tables.documented([{**row, "engine": "vlkv"}, other], "question").splitlines()[-1]
    assert line == "| snapkv | 100.0 [20.7, 100.0] | 100.0 | 0 of 1 | 250 | 0.0 | 0.0 |"
    assert "answers that differ" in printed and "200.0" in printed  # kvpress: 0.2 s for one step


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_the_documents_have_the_tables_of_the_results(root, name):
    rows = [json.loads(line) for line in tables.RESULTS.read_text().splitlines()[1:]]
    marked = tables.MARKED.findall((root / name).read_text())
    assert marked and all(shown == tables.documented(rows, mark) for _, mark, shown, _ in marked)
