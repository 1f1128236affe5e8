"""Context first, question later: with the full cache, the answers are those of transformers for the whole prompt."""

from __future__ import annotations

import json

import pytest

import vlkv
from tests.parity.conftest import make_text, save_tokenizer, torch, transformers
from vlkv import policies
from vlkv.tools.evaluation import Journal, Settings, read_records, run

NEW = 6
CONTEXT = "the cat is red and the dog is as blue as the sea. "
RECORDS = [
    # The context ends with a space, which the tokenizer joins with the beginning of the first question.
    {"context": CONTEXT, "question": "what is red?", "answer_prefix": " It is the", "answer": "cat"},
    {"context": CONTEXT, "question": "(who is blue?)", "answer_prefix": " It is the ", "answer": "dog"},
    {"context": "one two three", "question": "how many?", "answer": "three"},
    {"context": "a", "turns": [{"question": "b?", "answer_prefix": " c", "answer": "d"},
                               {"question": "e?", "answer_prefix": " f", "answer": "g"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text model with a byte-level tokenizer, which joins " w", and a chat template."""
    folder = tmp_path_factory.mktemp("text")
    save_tokenizer(folder)
    make_text("llama", vocab_size=264).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    """Prompts and greedy answers of transformers for every turn of every record."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts, answers = {}, {}
    for row, record in enumerate(RECORDS):
        messages, first = [], record["context"] if record["context"].endswith(" ") else record["context"] + "\n"
        for turn, asked in enumerate(record.get("turns", [record])):
            messages.append({"role": "user", "content": first * (not turn) + asked["question"]})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            text += asked.get("answer_prefix", "")
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
            prompts[row, turn] = ids[0].numpy()
            answers[row, turn] = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
            said = asked.get("answer_prefix", "")
            gap = "" if not said or answers[row, turn][:1].isspace() else " "
            messages.append({"role": "assistant", "content": said + gap + answers[row, turn]})
    return prompts, answers


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return path


def asked(folder, file, out, plan, **settings):
    params, processor = vlkv.load(folder)
    journal = Journal(out, {})
    run(params, processor, read_records(file), plan, Settings(max_new_tokens=NEW, **settings), journal)
    journal.close()
    return journal.entries


@pytest.mark.full
@pytest.mark.ci("True")
@pytest.mark.parametrize("query_agnostic", [False, True])
def test_answers_and_perplexity_of_a_text_model(folder, file, theirs, tmp_path, query_agnostic):
    """The reference is what follows the prefix; a space between them is part of it."""
    prompts, answers = theirs
    assert (prompts[0, 0] == 259).any() and CONTEXT.endswith(" "), "a token crosses the end of the context"
    entries = asked(folder, file, tmp_path, [policies.Full()], batch=2, perplexity=True, query_agnostic=query_agnostic)
    assert {key[:2]: entry["answer"] for key, entry in entries.items()} == answers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for row, text in ((0, " cat"), (1, "dog"), (2, "three")):
        target = [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]
        ids = torch.tensor([[*prompts[row, 0], *target]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompts[row, 0]) - 1 : -1]
        wanted = torch.log_softmax(logits, -1)[torch.arange(len(target)), torch.tensor(target)].sum()
        assert entries[row, 0, 0]["reference"] == len(target)
        assert entries[row, 0, 0]["log_probability"] == pytest.approx(float(wanted), abs=1e-3)
