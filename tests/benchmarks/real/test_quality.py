"""`benchmarks.real quality` on a tiny model: its questions and its tables."""

import json

import pytest

from benchmarks.real import tables, tasks
from tests.processing.conftest import TEXT_CONFIG, write_folder
from vlkv.families import config_from_hf
from vlkv.processing import Processor
from vlkv.tools.evaluation import dialogue

LENGTH = 1400  # the tiny tokenizer has a token per byte


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("processor"), template=None)
    return Processor.from_folder(folder, config_from_hf(TEXT_CONFIG))


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


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_the_documents_have_the_tables_of_the_results(root, name):
    rows = [json.loads(line) for line in tables.RESULTS.read_text().splitlines()[1:]]
    marked = tables.MARKED.findall((root / name).read_text())
    assert marked and all(shown == tables.documented(rows, mark) for _, mark, shown, _ in marked)
