"""MileBench's layout, written by hand, to rows and scores that a reader can check."""

import json

import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks import milebench
from vlkv.errors import InputError
from vlkv.processing.tokenizer import TextTokenizer

INSTRUCTIONS = ["Look at the pictures.", "Answer with one word."]


def sample(number, context, images, response, *, instruction=0, **instance):
    instance |= {"context": context, "images_path": images}
    return {
        "sample_id": number, "task_instruction_id": instruction, "task_instance": instance, "response": response,
        "image_quantity_level": "Few",
    }  # fmt: skip


DATASETS = {
    "TQA": ("multi-choice", [
        sample(1, "{image#1} A lesson. {table#2}\nWhat is it?", ["a.png", "b.png"], "A mountain, high",
               choice_list=["the sea", "A mountain, high", "mount"]),
        sample(2, "What is it?", ["a.png"], "the sea", instruction=1, choice_list=["the sea", "a hill"]),
    ]),
    "IEdit": ("open-ended", [sample(7, "From {image#2} to {image#1}?", ["a.png", "b.png"], "make the sky blue")]),
    "MMCoQA": ("open-ended", [sample("3", "{image#1} Who?", ["b.png"], "Ann Lee")]),
    "TextNeedleInAHaystack": ("open-ended", [sample(0, "{image#1} The number?", ["b.png"], "42")]),
    "GPR1200": ("multi-choice", [sample(5, "{image#1}", ["a.png"], "cat", choice_list=["dog", "cat"])]),
}  # fmt: skip


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "four": 3, "five": 4, "six": 5, "?": 6}, "?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer(tokenizer=words, special={})


@pytest.fixture
def source(tmp_path):
    for name, (kind, data) in DATASETS.items():
        folder = tmp_path / "MileBench" / name
        (folder / "images").mkdir(parents=True)
        for picture in ("a.png", "b.png"):
            Image.new("RGB", (4, 4)).save(folder / "images" / picture)
        about = {"dataset": name, "question_type": kind, "task_instruction": INSTRUCTIONS}
        (folder / f"{name}.json").write_text(json.dumps({"meta_data": about, "data": data}))
    return tmp_path / "MileBench"


@pytest.fixture
def written(source, tmp_path):
    out = tmp_path / "milebench.jsonl"
    assert milebench.main([str(source), str(out)]) == 0
    return out


def test_scores(written, capsys, tmp_path):
    said = {
        "GPR1200/5": ["Dog or cat", "cat"],
        "IEdit/7": ["make the sea blue", ""],
        "MMCoQA/3": ["It is Ann Lee.", "Ann"],
        "TQA/1": ["B. A mountain, high", "A mountain"],  # "A mountain" names no choice but "mount"
        "TQA/2": ["A", "the hill"],  # which names none, and its letters are A or B of neither
        "TextNeedleInAHaystack/0": ["It is 42.", "426"],
    }
    answers = [{"id": name, "said": each} for name, each in said.items()]
    results = {"rows": [{"policy": "Full"}, {"policy": "CSP"}], "answers": answers}
    (tmp_path / "results.json").write_text(json.dumps(results))
    capsys.readouterr()
    assert milebench.main(["--score", str(written), str(tmp_path / "results.json")]) == 0
    scores = json.loads(capsys.readouterr().out)
    names = ["GPR1200", "IEdit", "MMCoQA", "TQA", "TextNeedleInAHaystack", "mean", "S-1", "S-3", "S-4", "NH", "IR"]
    for policy, wanted in (
        ("Full", [0, 0.75, 1, 1, 1, 0.75, 1, 0.75, 1, 1, 0]),
        ("CSP", [1, *[0] * 4, 0.2, *[0] * 4, 1]),
    ):
        assert scores[policy] == pytest.approx(dict(zip(names, wanted, strict=True)))


def test_a_prompt_that_is_too_long_loses_its_beginning(tokenizer):
    """Two tokens of instruction, an image of five, words of one."""
    whole = "<image>one two<image>three four<image>five six"
    for context, kept in {
        99: whole,
        2 + 6 + 3 * 5: whole,
        2 + 6 + 2 * 5 + 4: "one two<image>three four<image>five six",  # an image does not fit
        2 + 4 + 2 * 5 + 1: "<image>three four<image>five six",  # a text does not fit, not even a part of it
        2 + 2 + 4: "five six",
        2 + 1: "six",  # only of the last text a part is kept
    }.items():
        assert milebench.Limit(context, 5, tokenizer).cut("one two", whole) == kept
    with pytest.raises(InputError, match="does not hold the instruction"):
        milebench.Limit(2, 5, tokenizer).cut("one two", "three")
