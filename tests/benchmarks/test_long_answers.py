"""Scores and tables of long answers under a budget (docs/forever.md)."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from vlkv import policies
from vlkv.policies import slots_of

tables = pytest.importorskip("benchmarks.long_tables", reason="needs the extra real")
answers = pytest.importorskip("benchmarks.long_answers", reason="needs the extra real")


def test_the_longest_common_subsequence():
    """Against all subsequences."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        got, wanted = (["abc"[i] for i in rng.integers(0, 3, rng.integers(1, 7))] for _ in range(2))
        common = [n for n in range(len(wanted) + 1) for each in itertools.combinations(wanted, n)
                  if each in set(itertools.combinations(got, n))]  # fmt: skip
        assert answers.common(got, wanted) == max(common) / len(wanted)


def test_scores_by_hand():
    """Tokens are letters. An answer ends at a stop token, and an item that may be cut does not count."""
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special: [ord(x) for x in text], decode=lambda ids: "".join(map(chr, ids))
    )

    def score(task, wanted, got, *, fed=False):
        question = answers.Question("", wanted, fed)
        return answers.score(task, question, np.array([ord(x) for x in got]), tokenizer, (ord("$"),))

    assert score("count", "1, 2, 3, 45", "1, 3, 4, 56") == 2 / 3
    assert score("chain", "a\nb\nc\n", "a\nc\n$\nb") == 1 / 2  # of a and b
    assert score("page", "1 2 / 3 / 4 5", "1 2 / 3 5 / 4 5$ / 3") == 2 / 3
    assert score("copy", "abcd", "abXdYYY", fed=True) == 3 / 4


@pytest.mark.parametrize("model", ["smollm2", "mini"])
def test_all_methods_have_as_many_slots(model):
    """The budget and the tail."""
    settings = answers.MODELS[model]
    for share in answers.SHARES:
        slots = settings.final * share // 100
        for name, policy in answers.plan(slots, settings.every).items():
            assert policy.budget + slots_of(policy).every == slots, name
            assert slots_of(policy).every or slots_of(policy).step is not None, name
    assert isinstance(answers.plan(40, 8)["TOVA"], policies.TOVA)


def test_a_table_by_hand():
    """A method that is above one control on the same questions, though their scores overlap."""
    control, ours = [0.1, 0.5, 0.9, 0.3], [0.2, 0.6, 1.0, 0.4]
    cells = {(100, "Full"): {0: [1.0] * 4}, (10, "Random"): {0: control, 1: control},
             (10, "StreamingLLM"): {0: ours}, (10, "SnapKV"): {0: ours}, (10, "RKV"): {1: [0.0] * 4}}  # fmt: skip
    lines = tables.table(cells).splitlines()
    assert lines[0] == "| method | 10 % |" and lines[2] == "| Full | 100 [100, 100] |"
    assert lines[4].startswith("| StreamingLLM | 55 [")
    assert (
        lines[-1]
        == "- 10 %: above RandomAttention: none; above Random: StreamingLLM, SnapKV; above StreamingLLM: none."
    )


def test_the_tables_are_made_of_the_results(root):
    shown = {name: content for _, name, content, _ in tables.MARKED.findall((root / "docs/forever.md").read_text())}
    assert shown == tables.tables()
