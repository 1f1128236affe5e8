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


def test_rows(written):
    rows = {row["id"]: row for row in map(json.loads, written.read_text().splitlines())}
    assert list(rows) == ["GPR1200/5", "IEdit/7", "MMCoQA/3", "TQA/1", "TQA/2", "TextNeedleInAHaystack/0"]
    first = rows["TQA/1"]
    assert (first["choices"], first["answer"]) == (["the sea", "A mountain, high", "mount"], "A mountain, high")
    assert (first["dataset"], first["metric"]) == ("TQA", "choice") and len(first) == 7
    assert first["images"] == ["MileBench/TQA/images/a.png", "MileBench/TQA/images/b.png"]
    assert first["question"] == (
        "Look at the pictures.\n<image> A lesson. <image>\nWhat is it?\nChoice list: \nA. the sea\n"
        "B. A mountain, high\nC. mount\nYour answer is: "
    )
    assert all((written.parent / image).is_file() for row in rows.values() for image in row["images"])
    assert rows["TQA/2"]["question"].startswith("Answer with one word.\n<image>What is it?\nChoice list")
    assert [image[-5:] for image in rows["IEdit/7"]["images"]] == ["b.png", "a.png"], "in the order of the prompt"
    assert rows["IEdit/7"]["question"] == "Look at the pictures.\nFrom <image> to <image>?"
    assert rows["GPR1200/5"]["question"].endswith("\nChoice list: \ndog\ncat\nYour answer is: ")
    assert [row["metric"] for row in rows.values()] == ["choice", "rouge-l", "part", "choice", "choice", "needle"]


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


def test_what_is_not_mile_bench_is_refused(source, tmp_path, capsys):
    out = str(tmp_path / "out.jsonl")

    def refused(*argv):
        assert milebench.main([str(source), out, *argv]) == 2
        assert not (tmp_path / "out.jsonl").exists()
        return capsys.readouterr().err

    assert "WebQA.json: no such file" in refused("--dataset", "WebQA")
    assert "--context needs --model" in refused("--context", "9")
    assert milebench.main([str(source), out, "--dataset", "MMCoQA", "IEdit"]) == 0
    assert capsys.readouterr().out.startswith("2 questions")
    (tmp_path / "out.jsonl").unlink()
    file = source / "TQA" / "TQA.json"
    content = json.loads(file.read_text())
    for change, says in (
        ({"response": "a fish"}, "TQA, sample 1: the answer 'a fish' is not one of its choices"),
        (
            {"response": "mount", "task_instance": {"context": "{image#9}", "images_path": []}},
            "an image that it does not",
        ),
        ({"task_instance": None}, "TQA"),
    ):
        content["data"][0] |= change
        file.write_text(json.dumps(content))
        assert says in refused()
