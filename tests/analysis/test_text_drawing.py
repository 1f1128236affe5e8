"""Which tokens of a text are kept: pieces and shares against hand-made caches, the page, and the picture."""

import html.parser
import types

import numpy as np
import pytest

import vlkv
from vlkv import policies
from vlkv.analysis import text_drawing
from vlkv.analysis.text_drawing import KeptText

PIECES = ("<b>", " bold", " & \"'", "\n", "[4 vision tokens]", " end")
SHARES = {"A <i>": np.array([1.0, 0.5, 0.0, 0.25, 0.1, 1.0]), "B": np.zeros(6)}


@pytest.fixture
def kept():
    return KeptText(PIECES, SHARES, {"A <i>": "note & more", "B": "none"}, heads=8)


def test_shares_are_those_of_the_cache(miniature, monkeypatch):
    """By hand: a mask for each of two layers and three heads; the image is one piece, a cut character another."""
    processor = vlkv.load_processor(miniature(layers=2, grid=6))
    inputs = processor(np.zeros((48, 48, 3), np.uint8), "what does row one say?")
    length, mask = inputs.tokens.shape[1], np.random.default_rng(0).random((1, 2, 3, inputs.tokens.shape[1])) < 0.4
    monkeypatch.setattr(text_drawing, "_held", lambda cache, tokens: mask[..., :tokens])
    cache = types.SimpleNamespace(bytes=2**20, extent=np.zeros((2, 1, 3)))
    kept = text_drawing.kept_text(processor, inputs, [("title", policies.SnapKV(keep=0.4), cache)])
    valid, is_vision = inputs.valid[0], inputs.is_vision[0]
    image = np.flatnonzero(is_vision)
    groups = [[t] for t in range(image[0]) if valid[t]] + [list(image)]
    groups += [[t] for t in range(image[-1] + 1, length) if valid[t]]
    assert kept.heads == 6 and len(kept.pieces) == len(groups)
    for piece, group, share in zip(kept.pieces, groups, kept.kept["title"], strict=True):
        token = processor.tokenizer.tokenizer.id_to_token(int(inputs.tokens[0, group[0]]))
        assert piece.strip() == ("[36 vision tokens]" if is_vision[group[0]] else token)
        count = sum(mask[0, i, j, t] for i in range(2) for j in range(3) for t in group)
        assert share == pytest.approx(count / 6 / len(group))
    total = mask[0].sum() / 6
    assert kept.notes["title"] == f"{total:.0f} of {valid.sum()} tokens, 1.00 MiB, scope all"


class Reader(html.parser.HTMLParser):
    """Collects tags, attributes, and the texts and attributes of the tokens."""

    def __init__(self):
        super().__init__()
        self.tags, self.spans, self.attributes, self.inside = set(), [], [], False

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if "title" in dict(attrs):
            self.spans.append([dict(attrs), ""])
            self.inside = True

    def handle_data(self, data):
        if self.spans and self.inside:
            self.spans[-1][1] += data

    def handle_endtag(self, tag):
        self.inside = False


def test_the_page_is_escaped_and_complete(kept):
    page = kept.html()
    reader = Reader()
    reader.feed(page)
    assert reader.tags == {"html", "head", "meta", "title", "body", "style", "div", "h2", "p", "span"}
    assert not {"src", "href"} & {name for name, _ in reader.attributes} and "url(" not in page and "http" not in page
    shown = [text for _, text in reader.spans]
    assert shown == [piece.replace("\n", "\u21b5\n") for piece in PIECES] * 2
    assert "A &lt;i&gt;" in page and "note &amp; more" in page
    first, second, third, *_ = (about for about, _ in reader.spans)
    assert first["title"] == "8 of 8" and second["title"] == "4 of 8"
    assert "#ff8a00" in first["style"] and "#ffffff" in third["style"] and "color: #707278" in third["style"]
    assert "<html" not in kept._repr_html_() and page.index("<meta charset") < page.index("A &lt;i")


@pytest.fixture(scope="module")
def asked(miniature):
    params, processor = vlkv.load(miniature(layers=2, grid=6))
    image = np.full((48, 96, 3), 255, np.uint8)
    image[:, 24:72] = 128  # the middle, which the processor cuts out
    return params, processor(image, "what does row one say?"), image


def test_bad_input_is_named(asked):
    params, inputs, image = asked
    with pytest.raises(vlkv.InputError, match="plan is empty"):
        vlkv.draw_survivors(params, inputs, image, [])
    with pytest.raises(vlkv.InputError, match=r"give a list of policies, such as \[policy\]"):
        vlkv.draw_survivors(params, inputs, image, policies.Full())
    with pytest.raises(vlkv.InputError, match="1 images on a grid"):
        vlkv.draw_survivors(params, inputs, image, [policies.Full()], number=1)
    with pytest.raises(vlkv.InputError, match="one of crop, stretch and pad"):
        vlkv.draw_survivors(params, inputs, image, [policies.Full()], fit="zoom")
    with pytest.raises(vlkv.InputError, match="evidence: the inputs have 36 vision tokens, counted from 0"):
        vlkv.draw_survivors(params, inputs, image, [policies.Full()], evidence=[36])
