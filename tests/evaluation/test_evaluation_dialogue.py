"""Conversations as text and as tokens, by hand: no model."""

import dataclasses

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import vlkv
from vlkv.errors import InputError
from vlkv.families.llava import LlavaConfig
from vlkv.mini import CHECKPOINT, folder
from vlkv.processing.prompts import PromptWriter, context_part, joined
from vlkv.processing.templates import ChatTemplate
from vlkv.processing.tokenizer import TextTokenizer
from vlkv.tools.evaluation import dialogue
from vlkv.tools.evaluation.records import Record, Turn

MINI_TEMPLATE = (CHECKPOINT / "chat_template.jinja").read_text()
STRINGS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def processor():
    return vlkv.load_processor(CHECKPOINT)


def writer(template, image="[I]"):
    made = None if template is None else ChatTemplate.from_text(template, "a test")
    return PromptWriter(template=made, image_token=image, special={"eos_token": "</s>"})


@pytest.mark.parametrize(
    ("prompts", "whole", "before"),
    [
        (writer(LlavaConfig.prompt_format), "USER: [I]\nq1 ASSISTANT: a1</s>USER: q2 ASSISTANT:", "USER: [I]\n"),
        (writer(STRINGS), "<user>[I]\nq1</><assistant>a1</><user>q2</><assistant>", "<user>[I]\n"),
        (writer(MINI_TEMPLATE, "<image>"), "USER: <image>\nq1 ASSISTANT: a1 USER: q2 ASSISTANT:",
         "USER: <image>\n"),
    ],
    ids=["llava", "strings", "items"],
)  # fmt: skip
def test_a_conversation_as_text(prompts, whole, before):
    assert prompts.write("q1", 1, then=[("a1", "q2")]) == whole
    assert whole.startswith(prompts.write("q1", 1))
    assert prompts.before_question("q1", 1) == prompts.before_question("<image>\nother", 1) == before
    with pytest.raises(InputError, match="no text follows the last image"):
        prompts.before_question("what is <image>", 1)
    with pytest.raises(InputError, match=r"1 <image> mark\(s\) for 0"):
        prompts.write("q1", 1, then=[("a1", "<image> q2")])


def test_what_is_fed_after_a_prompt(processor):
    prompts = [processor.prompts.write("what does row one say?", 1), processor.prompts.write("read the page", 1)]
    longer = [f"{prompts[0]} 4 2 USER: read the page ASSISTANT:", f"{prompts[1]} 7"]
    fed = processor.extension(prompts, longer)
    wanted = [folder.tokenizer().encode(text, add_special_tokens=False).ids
              for text in ("4 2 USER: read the page ASSISTANT:", "7")]  # fmt: skip
    assert [fed.tokens[row, fed.valid[row]].tolist() for row in range(2)] == wanted
    assert not fed.is_vision.any()
    with pytest.raises(InputError, match="changes earlier turns"):
        processor.extension(longer, prompts)


def test_a_token_that_reaches_over_the_seam(processor):
    """The cache holds the shorter prompt's tokens already: the rest is encoded by itself."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "ab": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    other = dataclasses.replace(processor, tokenizer=TextTokenizer(tokenizer=words, special={}))
    assert other.beyond("a", "a b").tolist() == other.beyond("a", "ab").tolist() == [1]


def test_the_reference_answer_stands_where_the_answer_would(processor):
    turns = (Turn("read the page", ("4 2", "42")), Turn("what does row one say?", ("7",)))
    record = Record(1, "1", (CHECKPOINT,), turns)  # one image, which no text needs to open
    ids = folder.tokenizer().encode("4 2", add_special_tokens=False).ids
    assert dialogue.reference(processor, record, []) == [*ids, folder.EOS]
    assert dialogue.reference(processor, record, ["0"])[-2:] == [folder.tokenizer().token_to_id("7"), folder.EOS]
    assert dialogue.before_question(processor, record) == "USER: <image>\n"
    added = "x USER: what does row one say? ASSISTANT:"
    count = len(folder.tokenizer().encode(added, add_special_tokens=False).ids)
    assert dialogue.later_tokens(processor, record) == count
    assert dialogue.truncate(processor, "4 2 7", 2) == "4 2" != dialogue.truncate(processor, "4 2 7", 3)


def test_a_context_and_a_prefix_as_text(processor):
    """A line break separates context and question, and a space prefix and answer, where there is no white space."""
    turns = (Turn("read the page", ("4",), " it says"), Turn("what does row one say?", ("7",)))
    record = Record(1, "1", (CHECKPOINT,), turns, context="<image> row two")
    first = "USER: <image>\n row two\nread the page ASSISTANT: it says"
    assert dialogue.before_question(processor, record) == "USER: <image>\n row two\n"
    assert dialogue.prompt(processor, record, []) == first
    assert dialogue.prompt(processor, record, ["4 2"]) == first.replace(
        " it says", "  it says 4 2 USER: what does row one say? ASSISTANT:"
    )
    assert joined("a ", "b") == "a b" and joined("a", "\nb") == "a\nb" and joined("", "b") == "b"
    strings = writer(STRINGS)
    assert context_part(strings, "see <image> here", "q", 1) == "<user>see [I]\n here\n"
    with pytest.raises(InputError, match="mark images only in the context"):
        context_part(strings, "see", "<image> q", 1)
