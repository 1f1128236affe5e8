"""What a new user does first: a second question, a comparison with the full cache, a transformers batch."""

import dataclasses
import io
import types

import jax
import numpy as np
import pytest
from PIL import Image

import vlkv
import vlkv.loading
from tests import programs
from vlkv import policies
from vlkv.cli import main
from vlkv.loading import MINI
from vlkv.processing.prompts import end_of_answer
from vlkv.processing.templates import ChatTemplate

QUESTIONS = ("what does row one say?", "what does row two say?", "what does row one say?")


@pytest.fixture(scope="module")
def mini(miniature):
    return vlkv.load(miniature())


@pytest.fixture(scope="module")
def page(root):
    with Image.open(root / "benchmarks" / "data" / "ledger" / "page000.png") as image:
        return image.convert("RGB")


def whole_conversation(processor, page, questions, answers):
    """One prompt with all turns, as if it had been asked at once."""
    reads = processor._read([page])
    then = list(zip(answers, questions[1:], strict=True))
    return processor.batch([processor._ids(processor.prompts.write(questions[0], 1, then=then), [page], reads)], reads)


@pytest.mark.full
def test_a_chat_says_what_the_whole_conversation_would(page):
    """With the full cache, against reading the conversation anew for every answer. A smaller model says too little."""
    params, processor = vlkv.load("mini")
    sampling, pieces = vlkv.Greedy(max_new_tokens=6), []
    chat = vlkv.Chat(params, processor, page, sampling=sampling)
    for number, question in enumerate(QUESTIONS):
        inputs = whole_conversation(processor, page, QUESTIONS[: number + 1], [said for _, said in chat.turns])
        reference = vlkv.generate(params, inputs, sampling=sampling)
        pieces.clear()
        answer = chat.ask(question, on_text=pieces.append)
        assert answer == processor.decode(np.asarray(reference.tokens)[0], np.asarray(reference.lengths)[0])
        assert "".join(pieces) == answer and len(pieces) > 1, "the answer comes in pieces"
        fed = int(inputs.valid.sum()) + len(processor.tokenizer.encode(answer, add_special=False))
        assert int(chat.cache.next_position[0, 0]) == fed, "the cache holds the conversation, every token once"
    assert chat.cache.new_tokens > 4 * 6, "the cache has grown"


def test_answer_takes_pictures_and_raw_pictures_elsewhere_name_it(mini, page, monkeypatch):
    params, processor = mini
    said = np.stack([processor.tokenizer.encode(text, add_special=False) for text in ("4 2", "7 9")])
    policy, given = policies.SnapKV(keep=0.5), {}

    def generate(params, inputs, **options):
        given.update(options, rows=len(inputs.tokens))
        return types.SimpleNamespace(tokens=said[: given["rows"]], lengths=np.full(given["rows"], said.shape[1]))

    monkeypatch.setattr("vlkv.generation.answer.generate", generate)
    assert vlkv.answer(params, processor, page, QUESTIONS[0], policy=policy) == "4 2"
    assert vlkv.answer(params, processor, [page] * 2, QUESTIONS[:2], policy=policy) == ["4 2", "7 9"]
    assert given == {"policy": policy, "sampling": None, "key": None, "rows": 2}
    with pytest.raises(vlkv.InputError, match=r"vlkv\.answer takes pictures"):
        programs.generate(params, {"image": np.zeros((8, 8, 3))})


@pytest.mark.full
@pytest.mark.ci("True")
@pytest.mark.parametrize("query_agnostic", [False, True])
def test_a_chat_keeps_the_compressed_cache(mini, page, query_agnostic):
    params, processor = mini
    policy = policies.SnapKV(keep=0.5, scope="vision")
    chat = vlkv.Chat(params, processor, page, policy=policy, query_agnostic=query_agnostic,
                     sampling=vlkv.Greedy(max_new_tokens=6))  # fmt: skip
    assert (chat.cache is not None) == query_agnostic
    chat.ask(f"<image>{QUESTIONS[0]}")
    length, used = np.asarray(chat.cache.counts), int(chat.cache.used[0])
    if not query_agnostic:
        output = vlkv.generate(params, processor(page, QUESTIONS[0]), policy=policy)
        np.testing.assert_array_equal(length, output.kept.sum(axis=-1))
    chat.ask(QUESTIONS[1])
    np.testing.assert_array_equal(np.asarray(chat.cache.counts), length)
    assert int(chat.cache.used[0]) > used


def test_a_chat_about_an_image_alone_returns_the_answer(mini, page):
    params, processor = mini
    pieces = []
    chat = vlkv.Chat(params, processor, page, query_agnostic=True, sampling=vlkv.Greedy(max_new_tokens=2, stop=()))
    answer = chat.ask(QUESTIONS[0], on_text=pieces.append)
    assert answer == "".join(pieces) and chat.turns == [(QUESTIONS[0], answer)]
    with pytest.raises(vlkv.InputError, match="give an image or a context"):
        vlkv.Chat(params, processor, query_agnostic=True)


_TEMPLATE = """
{%- macro turn(role) %}{{ eos_token }}{{ role }}{{ eos_token }}{% endmacro %}
{%- for m in messages %}{{ turn(m.role) }}
{%- for c in m.content %}{{ "IMAGE" if c.type == "image" else WRITTEN }}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ turn("assistant") + OPENING }}{% endif %}"""


@pytest.mark.parametrize(
    ("written", "opening", "said"),
    [
        ("c.text", "'<think>'", None),
        ("c.text.split('</think>')[-1]", "''", "<think>hm</think>4 2"),
        ("'<no thought>' * (m.role == 'assistant') + c.text", "''", None),
    ],
    ids=["a block that is opened", "reasoning that is left out", "a block that is added"],
)
def test_a_chat_follows_a_template_that_rewrites_answers(mini, page, written, opening, said):
    """Against one prompt with the conversation as the template writes it."""
    params, processor = mini
    text = _TEMPLATE.replace("WRITTEN", written).replace("OPENING", opening)
    template = ChatTemplate.from_text(text.replace("IMAGE", processor.prompts.image_token), "a test")
    processor = dataclasses.replace(processor, prompts=dataclasses.replace(processor.prompts, template=template))
    sampling = vlkv.Greedy(max_new_tokens=4, stop=())
    chat = vlkv.Chat(params, processor, page, sampling=sampling)
    chat.ask(QUESTIONS[0])
    if said is not None:
        chat.turns[0] = QUESTIONS[0], said
    answer = chat.ask(QUESTIONS[1])
    whole = whole_conversation(processor, page, QUESTIONS[:2], [chat.turns[0][1]])
    assert answer == processor.decode(np.asarray(vlkv.generate(params, whole, sampling=sampling).tokens)[0])
    assert int(chat.cache.next_position[0, 0]) == int(whole.valid.sum()) + sampling.max_new_tokens
    chat.ask(QUESTIONS[2])
    assert len(chat.turns) == 3


def test_variables_of_the_template(mini):
    _, processor = mini
    template = ChatTemplate.from_text(
        "{{ messages[0].content }}{{ '' if enable_thinking is false else '<think>' }}", "t"
    )
    processor = dataclasses.replace(processor, prompts=dataclasses.replace(processor.prompts, template=template))
    assert processor.prompts.write("x", 0) == "x<think>"
    assert processor.with_template(enable_thinking=False).prompts.write("x", 0) == "x"
    with pytest.raises(vlkv.InputError, match="does not read 'thinking'; it reads enable_thinking, messages"):
        processor.with_template(thinking=False)


_APART = "{{ '<think>' ~ m.reasoning_content|default('') ~ '</think>' if m.role == 'assistant' }}{{ m.content }}"


@pytest.mark.parametrize(
    ("written", "answer", "wanted"),
    [
        (_APART, "hm\n</think>\n\n4 2", "<think>hm</think>4 2"),  # Qwen3.8: the prompt has opened the block
        (_APART, "<think>\nhm\n</think>\n\n4 2", "<think>hm</think>4 2"),
        (_APART, "4 2", "<think></think>4 2"),
        ("{{ m.content }}", "hm</think>4 2", "hm</think>4 2"),  # a template that does not know of reasoning
    ],
)
def test_reasoning_is_given_to_templates_that_read_it(mini, written, answer, wanted):
    template = ChatTemplate.from_text(f"{{% for m in messages %}}{written};{{% endfor %}}", "t")
    prompts = dataclasses.replace(mini[1].prompts, template=template)
    assert prompts.write("x", 0, then=[(answer, "y")]) == f"x;{wanted};y;"


@pytest.mark.full
def test_an_interrupted_answer_is_a_turn(mini, page):
    """The next question follows what was said so far."""
    params, processor = mini
    chat = vlkv.Chat(params, processor, page, sampling=vlkv.Greedy(max_new_tokens=6, stop=()))
    said = []

    def stop(text):
        said.append(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.ask(QUESTIONS[0], on_text=stop)
    assert chat.turns == [(QUESTIONS[0], said[0])]
    answer = chat.ask(QUESTIONS[1])
    assert chat.turns[1:] == [(QUESTIONS[1], answer)]


@pytest.mark.parametrize(
    ("answer", "prompt", "rest"),
    [
        ("ab", "Q: ab\nQ: ab?", "\nQ: ab?"),
        ("ab\n", "Q: ab\nQ: ab?", "Q: ab?"),  # the template repeats the line break of the answer
        (" ab\n", "Q: ab</s>Q: c?", "</s>Q: c?"),  # it removes white space
        ("\n", "Q: </s>Q: c?", "</s>Q: c?"),
        ("ab", "Q: Ab</s>Q: c?", None),
        ("ab", "Q: <think></think>ab</s>Q: c?", None),  # something is before the answer
    ],
)
def test_a_later_question_begins_where_the_answer_ends(answer, prompt, rest):
    end = end_of_answer(prompt, len("Q: "), answer)
    assert (None if end is None else prompt[end:]) == rest


def test_the_chat_command(capsys, monkeypatch, root, miniature, page):
    monkeypatch.setattr(vlkv.loading, "MINI", miniature())
    params, processor = vlkv.load("mini")
    question = r"what does row two say of \<image>?"  # as text
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{question}\n"))
    image = str(root / "benchmarks" / "data" / "ledger" / "page000.png")
    assert main(["chat", "--model", "mini", "--image", image, "--max-new-tokens", "6"]) == 0
    sampling = vlkv.Greedy(max_new_tokens=6)
    assert capsys.readouterr().out == f"{vlkv.answer(params, processor, page, question, sampling=sampling)}\n"


@pytest.mark.usefixtures("shapes_for_arrays")
def test_prefill_is_jitted_without_static_names(mini, page):
    params, processor = mini
    inputs, policy = processor(page, QUESTIONS[0]), policies.SnapKV(keep=0.5)
    prefill = jax.jit(vlkv.prefill)  # without the static names that `programs.prefill` has
    with pytest.raises(vlkv.InputError, match="static_argnames"):
        prefill(params, inputs, policy, new_tokens=5)
    cache, _ = jax.eval_shape(prefill, params, inputs, policy, sampling=vlkv.Greedy(max_new_tokens=5))
    assert cache.new_tokens == 5
    assert vlkv.pool_slots(params, inputs, policy, new_tokens=5) == cache.slots


def test_a_transformers_batch_is_an_input(mini, page):
    params, processor = mini
    inputs = processor(page, QUESTIONS[0])
    ids = np.where(inputs.is_vision, processor.config.image_token, inputs.tokens)
    batch = {
        "input_ids": ids,
        "attention_mask": inputs.valid,
        "pixel_values": processor._read([page])[0].arrays["pixel_values"],
    }
    np.testing.assert_array_equal(vlkv.Inputs.of(batch, params.config).pixels, inputs.pixels)
    with pytest.raises(vlkv.InputError, match=r"Inputs\.from_hf"):
        programs.generate(params, batch)


def test_images_that_do_not_fit_are_counted(mini, page):
    _, processor = mini
    with pytest.raises(
        vlkv.InputError, match=r"tokens, the model's limit is \d+ \(\d+ of them from images: give fewer"
    ):
        processor([page] * (processor.config.decoder.max_positions // 36 + 1), "read the page")
    with pytest.raises(vlkv.InputError, match="one question about several images"):
        processor([page] * 4, ["read the page"])
    np.testing.assert_array_equal(processor(np.asarray(page), "x").pixels, processor(page, "x").pixels)


@pytest.mark.full
def test_kl_to_full(mini, page):
    """Against a loop over tokens in float64."""
    params, processor = mini
    inputs, sampling = processor(page, QUESTIONS[1]), vlkv.Greedy(max_new_tokens=6)
    assert float(vlkv.kl_to_full(params, inputs, policies.Full(), sampling=sampling)[0]) == 0
    policy = policies.SnapKV(keep=0.1, scope="vision")
    output = vlkv.generate(params, inputs, sampling=sampling)
    answer = np.asarray(output.tokens)[0, : int(output.lengths[0])]
    step, logs = programs.decode_step, []
    for one in (policies.Full(), policy):
        cache, logits = programs.prefill(params, inputs, one, sampling=sampling)
        rows = [logits]
        for token in answer[:-1]:
            cache, logits = step(params, cache, np.array([token]))
            rows.append(logits)
        rows = np.stack([np.asarray(row, np.float64)[0] for row in rows])
        logs.append(
            rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
        )
    expected = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=1).mean()
    assert expected > 1e-4
    found = vlkv.kl_to_full(params, inputs, policy, sampling=sampling)
    np.testing.assert_allclose(found, [expected], rtol=1e-3)


def test_mini_is_a_name(tmp_path, monkeypatch):
    assert vlkv.loading.resolve("mini") == MINI
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mini").mkdir()
    assert vlkv.loading.resolve("mini").resolve() == tmp_path / "mini", "a folder of that name comes first"


@pytest.mark.usefixtures("shapes_for_arrays")  # which switches the types of arguments off
def test_what_transformers_makes_is_refused_with_the_remedy():
    with pytest.raises(vlkv.InputError, match="a chat needs vlkv's own processor"):
        vlkv.Chat(None, object())


def test_a_chat_of_many_turns_has_constant_memory(mini, page):
    """With pictures in later turns. The system prompt stays, and the ids of a repetition penalty get more capacity."""
    params, processor = mini
    policy = policies.compose(policies.SnapKV(budget=48, window=8), every=32)
    rules = vlkv.LogitRules(repetition_penalty=1.1)
    sampling = vlkv.Greedy(max_new_tokens=6, stop=(), rules=rules)
    chat = vlkv.Chat(params, processor, page, policy=policy, sampling=sampling, keep_system=True, after_turns=True)
    sizes = set()
    for number in range(6):
        chat.ask(QUESTIONS[number % 3], image=page if number % 3 == 1 else None)
        sizes.add(chat.cache.bytes)
        assert int(chat.cache.used[0]) == 0 and int(chat.cache.extent.max()) == 48
        first = np.asarray(chat.cache.token)[0, 0, np.asarray(chat.cache.start)[:, 0, 0]]
        assert (first == 0).all(), "the first token of the system prompt"
    assert len(sizes) == 1 and int(jax.numpy.sum(chat.cache.history >= 0)) > 6 * 6 + 3 * 25
    with pytest.raises(vlkv.InputError, match="after_turns"):
        vlkv.Chat(params, processor, page, policy=policies.SnapKV(budget=48), after_turns=True)
