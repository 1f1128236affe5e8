"""LongBench's layout and a haystack, written by hand, to rows and scores that a reader can check."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks import longbench
from vlkv.errors import InputError
from vlkv.mini import CHECKPOINT
from vlkv.processing.prompts import joined
from vlkv.processing.tokenizer import TextTokenizer
from vlkv.tools.evaluation.records import read_records


@pytest.fixture
def source(tmp_path):
    for folder in ("config", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps({"trec": "Label: {context} {input} Type:"}))
    (tmp_path / "config" / "dataset2maxlen.json").write_text(json.dumps({"trec": 64}))
    sample = {"input": "seven ?", "context": "one two three", "answers": ["Food"], "all_classes": ["Food", "Other"]}
    (tmp_path / "data" / "trec.jsonl").write_text(json.dumps(sample) + "\n")
    return tmp_path


@pytest.fixture
def tokenizer():
    """Words are tokens."""
    names = ["one", "two", "three", "seven", "?", "Type:", "Label:"]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer(tokenizer=words, special={})


def test_rows(source, tokenizer, tmp_path, capsys):
    (row,) = longbench.rows(source, "trec", tokenizer, 7)
    assert (row["context"], row["question"]) == ("Label: one two three", " seven ? Type:")
    assert row["answers"] == ["Food"]
    (cut,) = longbench.rows(source, "trec", tokenizer, 4)
    assert (cut["context"], cut["question"]) == ("", "Label: one? Type:"), "the middle is gone, and with it the context"
    out = tmp_path / "out.jsonl"
    assert longbench.main([str(source), str(out), "--dataset", "trec", "--model", str(CHECKPOINT)]) == 0
    assert capsys.readouterr().out.startswith("1 questions") and read_records(out)[0].dataset == "trec"
    with pytest.raises(InputError, match="choose one of narrativeqa"):
        next(longbench.rows(source, "other", tokenizer, 7))
    assert longbench.main([str(source), str(out), "--model", str(CHECKPOINT)]) == 2


@pytest.mark.parametrize(("dataset", "said", "answers", "value"), [
    ("hotpotqa", "the big cat", ["nothing", "big cat sat here"], 2 * 2 / 6),
    ("triviaqa", "big cat\nand more", ["big cat"], 1.0),  # the first line counts
    ("trec", "Food or Other", ["Food"], 1 / 2),  # two classes named
    ("trec", "Food item", ["Food item"], 1.0),  # "Food" is part of the right name
    ("passage_retrieval_en", "Paragraph 3, or 4, or 3", ["Paragraph 3"], 2 / 3),
    ("passage_count", "none", ["7"], 0.0),
    ("lcc", "# a note\nx = 1\ny", ["x = 2"], 2 * 4 / 10),  # four of five characters on both sides
])  # fmt: skip
def test_scores(dataset, said, answers, value):
    row = {"dataset": dataset, "metric": longbench.METRIC_OF[dataset], "answers": answers,
           "classes": ["Food", "Other", "Food item"]}  # fmt: skip
    assert longbench.judge(row, said) == pytest.approx(value)


def test_a_needle_at_every_depth_and_length(tokenizer, monkeypatch):
    """An essay of sentences of two words; the needle is one word, and so is the question."""
    monkeypatch.setattr(longbench, "NEEDLE", "seven")
    monkeypatch.setattr(longbench, "_QUESTION", "?")
    words = Tokenizer(models.WordLevel({"one": 0, "two.": 1, "seven": 2, "?": 3}, "?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rows = list(longbench.haystack("one two.", TextTokenizer(tokenizer=words, special={}), [6, 8], (0.0, 0.6, 1.0)))
    assert [joined(row["context"], row["question"]) for row in rows[:3]] == [
        "seven one two. one two.\n?", "one two. seven one two.\n?", "one two. one two. seven\n?",
    ]  # fmt: skip
    assert [row["dataset"] for row in rows[::3]] == ["6 tokens, depth 0.0", "8 tokens, depth 0.0"]
    assert longbench.judge(rows[0], "Eat a sandwich and sit in Dolores Park!") == 1
    with pytest.raises(InputError, match="the haystack is empty"):
        next(longbench.haystack("", TextTokenizer(tokenizer=words, special={}), [6]))
