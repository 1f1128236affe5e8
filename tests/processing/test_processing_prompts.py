"""Prompts: where the images go, which text is refused, and parity with transformers' templates."""

import json
import tracemalloc

import pytest

from vlkv.errors import InputError
from vlkv.processing.prompts import PromptWriter
from vlkv.processing.templates import ChatTemplate

IN_PLACE = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content %}"
    "{% if c.type == 'image' %}<image>\n{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} assistant:{% endif %}"
)
TEXT_ONLY = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'].strip() }} [/INST]{% endfor %}"


def writer(template=None, image_token="<image>", **special):
    compiled = None if template is None else ChatTemplate.from_text(template, "chat_template.jinja")
    return PromptWriter(template=compiled, image_token=image_token, special=special)


@pytest.mark.parametrize(
    ("made", "text", "images", "prompt"),
    [
        (writer(IN_PLACE), "what?", 2, "user: <image>\n<image>\nwhat? assistant:"),  # images first without marks
        (writer(IN_PLACE), "what?", 0, "user: what? assistant:"),
        (writer(IN_PLACE), "compare <image> with <image>\nplease", 2,
         "user: compare <image>\n with <image>\nplease assistant:"),
        (writer(None, "[IMG]"), "<image> a", 1, "[IMG]\n a"),  # the checkpoint's own token
        (writer(TEXT_ONLY, "[IMG]", bos_token="<s>"), "a", 1, "<s>[INST] [IMG]\na [/INST]"),
        (writer(), "what?", 1, "<image>\nwhat?"),
        (writer(None, None), "once upon", 0, "once upon"),
        (writer(TEXT_ONLY, None, bos_token="<s>"), "hello", 0, "<s>[INST] hello [/INST]"),
        # A template that wants a text would print a list without complaint.
        (writer("{% for m in messages %}<{{ m['content'] }}>{% endfor %}"), "hi", 1, "<<image>\nhi>"),
        (writer("{% for m in messages %}<{{ m['content'] | tojson }}>{% endfor %}"), "hi", 0, '<"hi">'),
    ],
)  # fmt: skip
def test_prompts(made, text, images, prompt):
    assert made.write(text, images) == prompt


MARKS = [("<image> <image> a", 1), ("<image> a", 0), ("<image> a", 2), ("a<image><image><image>", 2)]


def test_all_places_of_a_template(tmp_path):
    def found():
        return ChatTemplate.from_folder(tmp_path).render([], {})

    assert ChatTemplate.from_folder(tmp_path) is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "tokenizer"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert found() == "tokenizer"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("additional")
    assert found() == "additional"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert found() == "jinja"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert found() == "json"
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": {"default": "processor"}}))
    assert found() == "processor"
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(InputError, match=r"processor_config\.json"):
        found()


NAMELESS = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "x"}]


@pytest.mark.parametrize(("file", "content", "says"), [
    ("tokenizer_config.json", NAMELESS, "rag, tool"),
    ("tokenizer_config.json", [], "no chat template is named default"),
    ("processor_config.json", {"tool_use": "x"}, "there are: tool_use"),
    ("chat_template.json", [{"name": "default"}], "must be a text"),
    ("chat_template.json", 3, "must be a text"),
    ("additional_chat_templates/rag.jinja", None, "there are: rag"),
])  # fmt: skip
def test_templates_without_a_default_are_refused(tmp_path, file, content, says):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("x" if content is None else json.dumps({"chat_template": content}))
    with pytest.raises(InputError, match=says):
        ChatTemplate.from_folder(tmp_path)


def test_a_mark_after_a_backslash_is_text():
    both = r"is \<image> beside <image> or \<video>?"
    assert writer(IN_PLACE).write(both, 1) == "user: is \\<image> beside <image>\n or \\<video>? assistant:"
    assert writer(None, None).write(r"\<image>", 0) == r"\<image>", "of a text model"
    assert writer(IN_PLACE).write("q", 0, then=[("an <image>", "q")]).count(r"\<image>") == 1, "an answer has no marks"
    with pytest.raises(InputError, match=r"\\<image> is the word itself"):
        writer(IN_PLACE).write("what is <image>?", 0)
    assert writer(IN_PLACE).before_question(r"<image>what is \<image>?", 1) == "user: <image>\n"


@pytest.mark.parametrize(("template", "reason"), [
    ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
    ("{% if %}", "not valid"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ 1 + 'a' }}", "unsupported operand"),
])  # fmt: skip
def test_templates_that_fail(template, reason):
    with pytest.raises(InputError, match=reason) as caught:
        ChatTemplate.from_text(template, "chat_template.jinja").render([{"role": "user"}], {})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("chat_template.jinja: ")


@pytest.mark.parametrize("template", ["llava", IN_PLACE, TEXT_ONLY, "extras"])
def test_the_text_is_what_transformers_renders(template, make_folder):
    pytest.importorskip("torch")
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    folder = make_folder()
    template = (folder / "chat_template.jinja").read_text() if template == "llava" else template
    if template == "extras":
        template = (
            "  {% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n"
            "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}\n"
            "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ strftime_now('%Y') | length }} é<"
        )
    for items in ([], [{"type": "image"}], [{"type": "image"}, {"type": "image"}]):
        content = "hé <b>" if template == TEXT_ONLY else [*items, {"type": "text", "text": "hé <b>"}]
        messages = [{"role": "user", "content": content}]
        # some versions return (texts, spans)
        wanted = render([messages], chat_template=template, add_generation_prompt=True, bos_token="<s>")[0][0]
        assert ChatTemplate.from_text(template, "t").render(messages, {"bos_token": "<s>"}) == wanted


@pytest.mark.parametrize("template", [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * [0] }}",
    "{{ 10**(10**9) }}",
    "{% set x = namespace(v='a') %}{% for i in range(99) %}{% set x.v = x.v + x.v %}{% endfor %}",
    "{% set x = namespace(v=9) %}{% for i in range(99) %}{% set x.v = x.v * x.v %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endfor %}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.ljust(width) }}",
    "{{ '%1000000000d' % 1 }}",
])  # fmt: skip
def test_a_template_cannot_fill_the_memory(template):
    """Not even while it is compiled, where jinja2 computes what is constant."""
    tracemalloc.start()
    with pytest.raises(InputError, match=r"^chat_template.jinja: the chat template refuses the prompt"):
        writer(template, width=10**9).write("a", 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**28
    ordinary = "{{ 'a' * 3 + 'b' }}{{ 2**3 * 7 % 5 }}{{ [1] + [2] * 2 }}{{ '%02d' % 7 }}{{ 'x' | center(3) }}"
    assert writer(ordinary).write("a", 0) == "aaab1[1, 2, 2]07 x "
