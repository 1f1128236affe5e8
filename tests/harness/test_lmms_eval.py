"""lmms-eval itself, with tasks of its own kind on pages of digits: its command, its registry, its response cache."""

import json
from importlib.metadata import entry_points

import numpy as np
import pytest

pytest.importorskip("lmms_eval", reason="lmms-eval is not installed: see the extra `harness`")

from lmms_eval import evaluator
from lmms_eval.api.instance import Instance
from lmms_eval.tasks import TaskManager
from PIL import Image

import vlkv
from vlkv.compression.slots import slots_of
from vlkv.mini import CHECKPOINT, pages
from vlkv.tools.harness import lmms, manifest
from vlkv.tools.harness.answering import Question

ARGS = f"pretrained={CHECKPOINT},policy=aircache,keep=0.4"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
doc_to_visual: !function utils.doc_to_visual
doc_to_text: "{{{{question}}}}"
metadata:
  - version: 0.0
{rest}
"""
ANSWER = """
doc_to_target: "{{answer}}"
generation_kwargs:
  max_new_tokens: 12
  temperature: 0
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
CHOOSE = """
doc_to_choice: !function utils.choices
doc_to_target: !function utils.which
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
UTILS = """
from PIL import Image


def doc_to_visual(doc):
    return [Image.open(doc["image"]).convert("RGB")]


def choices(doc):
    return ["1 2", doc["said"], "/"]


def which(doc):
    return 1
"""


@pytest.fixture(scope="module")
def direct():
    model = lmms.Vlkv(str(CHECKPOINT), policy="aircache", keep=0.4, batch_size=3).model
    samples = list(pages.held_out(5, seed=1, kind="digits"))
    answers = model.answers([Question(s.question, (s.image,)) for s in samples], vlkv.Greedy(max_new_tokens=12))
    return model, samples, [answer.text for answer in answers]


@pytest.fixture(scope="module")
def tasks(direct, tmp_path_factory):
    """A task of answers and one of choices, of which one is what the model says."""
    _, samples, said = direct
    folder = tmp_path_factory.mktemp("tasks")
    lines = []
    for i, (sample, answer) in enumerate(zip(samples, said, strict=True)):
        sample.image.save(folder / f"{i}.png")
        row = {"image": str(folder / f"{i}.png"), "question": sample.question, "answer": sample.answer, "said": answer}
        lines.append(json.dumps(row))
    (folder / "pages.jsonl").write_text("\n".join(lines))
    (folder / "utils.py").write_text(UTILS)
    for name, kind, rest in (("answer", "generate_until", ANSWER), ("choose", "multiple_choice", CHOOSE)):
        text = TASK.format(name=f"vlkv_{name}", kind=kind, file=folder / "pages.jsonl", rest=rest)
        (folder / f"vlkv_{name}.yaml").write_text(text)
    return TaskManager("ERROR", include_path=str(folder), model_name="vlkv")


@pytest.fixture(scope="module")
def evaluate(tasks, tmp_path_factory):
    cache = tmp_path_factory.mktemp("responses")

    def run():
        return evaluator.simple_evaluate(
            model="vlkv", model_args=ARGS, tasks=["vlkv_answer", "vlkv_choose"], batch_size=3, task_manager=tasks,
            use_cache=str(cache), log_samples=True, bootstrap_iters=0,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def results(evaluate):
    return evaluate()


def test_the_harness_finds_the_model_by_its_entry_point():
    values = [point.value for point in entry_points(group="lmms_eval.models")]
    assert "vlkv.tools.harness:manifest" in values, "install this package anew: pip install -e ."
    assert manifest().simple_class_path == "vlkv.tools.harness.lmms.Vlkv"


def test_a_task_of_answers(direct, results):
    _, samples, said = direct
    found = {one["doc_id"]: one for one in results["samples"]["vlkv_answer"]}
    assert [found[i]["filtered_resps"][0].strip() for i in range(5)] == [text.strip() for text in said]
    right = np.mean([text == sample.answer for text, sample in zip(said, samples, strict=True)])
    assert results["results"]["vlkv_answer"]["exact_match,none"] == pytest.approx(right)


def test_a_task_of_choices(results):
    """What the model says by itself is the likeliest token after token."""
    assert results["results"]["vlkv_choose"]["acc,none"] == 1.0
    for one in results["samples"]["vlkv_choose"]:
        assert [greedy for _, greedy in one["filtered_resps"]] == [False, True, False]


def test_the_answers_are_cached(evaluate, results, monkeypatch):
    """Losses are not, because lmms-eval would not understand them when they come back."""

    def asked(*args):
        raise AssertionError("the model was asked again")

    monkeypatch.setattr(lmms.Vlkv, "generate_until", asked)
    again = evaluate()
    for task in ("vlkv_answer", "vlkv_choose"):
        assert {k: v for k, v in again["results"][task].items() if "stderr" not in k} == {
            k: v for k, v in results["results"][task].items() if "stderr" not in k
        }


def instance(kind, *args):
    return Instance(kind, args, 0, {"task": "t", "doc_id": 0, "repeats": 1})


def test_generate_until_refuses_what_it_does_not_honour(direct):
    asked = lmms.Vlkv(str(CHECKPOINT), policy="snapkv", keep=0.5, store="kivi(bits=4)")
    assert slots_of(asked.model.policy).storage.bits == 4
    asked.task_dict = {"t": {"test": [{}]}}
    request = instance(
        "generate_until", "read", {"num_beams": 4}, lambda doc: [Image.new("RGB", (96, 96))], 0, "t", "test"
    )
    with pytest.raises(vlkv.InputError, match="num_beams=4 is not supported"):
        asked.generate_until([request])
    with pytest.raises(vlkv.InputError, match="acc_mutual_info"):
        asked.loglikelihood([instance("loglikelihood", "", "yes")])
