"""Conversations as text and as tokens, by hand: no model."""

import dataclasses
from pathlib import Path

import numpy as np
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


def test_marks_in_answers_and_escaped_marks_are_text(processor):
    """A record about the word `<image>`: its question, its reference and its later turns."""
    turns = (Turn(r"what does \<image> say?", ("an <image> here",)), Turn("and now?", ("<image>",)))
    record = Record(1, "1", (Path("page.png"),), turns)
    image = processor.config.image_token
    assert (processor.encode(dialogue.prompt(processor, record, [])) == image).sum() == 1
    ids = dialogue.reference(processor, record, [])
    assert image not in ids and processor.decode(np.array(ids)) == processor.decode(
        processor.encode(r"an \<image> here", begin=False)
    )
    assert image not in dialogue.reference(processor, record, ["<image>"])
    assert (processor.encode(dialogue.prompt(processor, record, ["an <image>"])) == image).sum() == 1
    assert dialogue.truncate(processor, "<image> x", 99) == "<image> x"


def test_the_reference_ends_with_the_stop_token_of_the_template(processor):
    """A model may have several; the first one is taken only if the template writes none."""
    record = Record(1, "1", (), (Turn("7", ("4",)),))
    end = processor.tokenizer.tokenizer.id_to_token(folder.EOS)
    config = dataclasses.replace(processor.config, stop=(0, folder.EOS))
    for closing, stop in ((end, folder.EOS), ("", 0)):
        prompts = writer(STRINGS.replace("</>", closing), "<image>")
        changed = dataclasses.replace(processor, config=config, prompts=prompts)
        assert dialogue.reference(changed, record, [])[-1] == stop


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


def test_a_token_that_crosses_the_end_of_the_context_is_fed_with_the_question(processor):
    """Two questions about one context: what is prefilled fits both, and all tokens are those of the whole prompt."""
    joins = Tokenizer(models.BPE({"a": 0, "b": 1, "?": 2, "x": 3, "\n": 4, "\nb": 5}, [("\n", "b")]))
    other = dataclasses.replace(
        processor, tokenizer=TextTokenizer(tokenizer=joins, special={}),
        prompts=PromptWriter(template=None, image_token=None, special={}),
    )  # fmt: skip
    crossing, apart = (Record(1, "", (), (Turn(text, (), "a"),), context="xa\n") for text in ("b?", "x?"))
    assert joins.encode(dialogue.prompt(other, crossing, [])).ids == [3, 0, 5, 2, 0]

    def split(*records, query_agnostic=True):
        made = dialogue.split(other, records, query_agnostic=query_agnostic)
        return made.dropped, made.end.tolist(), [ids.tolist() for ids in made.fed]

    assert split(crossing, apart) == (2, [], [[5, 2, 0], [4, 3, 2, 0]])
    assert split(apart) == (2, [], [[3, 2, 0]]) and split(crossing) == (2, [], [[5, 2, 0]])
    assert split(crossing, query_agnostic=False) == (0, [0], [[]]), "the prefix is prefilled with the prompt"
