"""Rows of the file, the journal, the batches and the exported pages: whatever needs no model."""

import base64
import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.evaluation.entries import entry
from vlkv import policies
from vlkv.errors import InputError
from vlkv.mini import export, pages
from vlkv.processing import read_video
from vlkv.processing.images import open_image
from vlkv.tools.evaluation import fingerprint
from vlkv.tools.evaluation.batching import batches
from vlkv.tools.evaluation.journal import Journal
from vlkv.tools.evaluation.records import Record, Turn, read_records


@pytest.fixture
def file(tmp_path):
    """Writes lines beside two images."""
    for name in ("a.png", "b.png"):
        Image.new("L", (4, 4)).save(tmp_path / name)

    def write(*lines):
        path = tmp_path / "questions.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


def test_rows(file, tmp_path):
    a, b = tmp_path / "a.png", tmp_path / "b.png"
    (tmp_path / "frames").mkdir()
    turns = [{"question": "one?", "answer": "1"}, {"question": "two?", "answers": ["2"]}]
    path = file(
        {"image": "a.png", "question": "q?", "answers": ["x", "y"], "extra": {"source": "a book"}},
        "",
        {"id": 7, "images": ["b.png", str(a)], "turns": turns},
        {"question": "no image?", "answer": "none"},
        {"image": "a.png", "videos": ["frames"], "question": "moves?", "answer": "yes", "dataset": "sports"},
    )
    assert read_records(path) == [
        Record(1, "1", (a,), (Turn("q?", ("x", "y")),)),
        Record(3, "7", (b, a), (Turn("one?", ("1",)), Turn("two?", ("2",)))),
        Record(4, "4", (), (Turn("no image?", ("none",)),)),
        Record(5, "5", (a,), (Turn("moves?", ("yes",)),), (tmp_path / "frames",), "sports"),
    ]
    turns = [{"question": "q", "answer": "1", "answer_prefix": " It is"}, {"question": "r", "answer": "2"}]
    texts = file({"context": "a text", "question": "q", "answer": "1", "answer_prefix": " It is"},
                 {"context": "see <image>", "image": "a.png", "turns": turns})  # fmt: skip
    first = Turn("q", ("1",), " It is")
    assert read_records(texts) == [
        Record(1, "1", (), (first,), context="a text"),
        Record(2, "2", (a,), (first, Turn("r", ("2",))), context="see <image>"),
    ]
    alone = file({"question": "why?"})
    assert read_records(alone, answers=False) == [Record(1, "1", (), (Turn("why?", ()),))]


def test_images_in_a_row_as_base64(file, tmp_path):
    """Text that is too long for the name of a file."""
    noise = np.random.default_rng(0).integers(0, 255, (40, 40), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    bare = base64.b64encode((tmp_path / "noise.png").read_bytes()).decode()
    uri = f"data:image/png;base64,{bare}"
    (record,) = read_records(file({"images": [bare, uri, "a.png"], "question": "q?", "answer": "x"}))
    assert record.images == (bare, uri, tmp_path / "a.png") and len(bare) > 1000
    for image in record.images[:2]:
        np.testing.assert_array_equal(np.asarray(open_image(image))[..., 0], noise)
    for wrong in ("c" * 1000, "cccc"):  # base64, but not an image
        with pytest.raises(InputError, match=r"line 1: .*no such image file"):
            read_records(file({"image": wrong, "question": "q?", "answer": "x"}))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: a JSON list"),
        ({"question": "q", "answer": "a", "image": "c.png"}, "c.png: no such image file"),
        ({"question": "q", "answer": "a", "image": 3}, "image must be a path"),
        ({"question": "q", "answer": "a", "image": "a.png", "images": []}, "image and images"),
        ({"question": "q", "answer": "a", "video": "a.png", "videos": []}, "video and videos"),
        ({"question": "q", "answer": "a", "video": "c.mp4"}, "c.mp4: no such video file"),
        ({"image": "a.png", "answer": "a"}, "line 2: no question"),
        ({"image": "a.png", "question": "q"}, "line 2: no answer"),
        ({"image": "a.png", "question": "q", "answers": []}, "line 2: no answer"),
        ({"image": "a.png", "question": "q", "answers": [4]}, "answers must be text"),
        ({"question": "q", "answer": "a", "context": ["a text"]}, "context must be text, not a JSON list"),
        ({"question": "q", "answer": "a", "answer_prefix": 3}, "answer_prefix must be text, not a JSON int"),
        ({"turns": [{"question": "q", "answer": "a", "context": "c"}]}, "unknown key 'context': did you mean"),
        ({"image": "a.png", "turns": []}, "turns must be a list"),
        ({"image": "a.png", "turns": [{"question": "q"}]}, "no answer"),
        ({"image": "a.png", "turns": ["q"]}, "a turn is a JSON str"),
        ({"image": "a.png", "question": "q", "turns": []}, "question and turns"),
        ({"answers": ["a"], "turns": [{"question": "q", "answer": "a"}]}, "answers and turns"),
        ({"answer_prefix": "a", "turns": [{"question": "q", "answer": "a"}]}, "answer_prefix and turns"),
        ({"imgae": "a.png", "question": "q", "answer": "a"}, "line 2: unknown key 'imgae': did you mean image?"),
        ({"turns": [{"question": "q", "anwsers": ["a"]}]}, "line 2: unknown key 'anwsers': did you mean answers?"),
    ],
)
def test_a_bad_row_is_named_by_its_line(file, line, said):
    with pytest.raises(InputError, match=re.escape(said)):
        read_records(file({"question": "fine", "answer": "a"}, line))


def test_a_file_that_is_no_file_of_questions(file, tmp_path):
    with pytest.raises(InputError, match="no such file of questions"):
        read_records(tmp_path / "other.jsonl")
    with pytest.raises(InputError, match="contains no questions"):
        read_records(file("", ""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        read_records(tmp_path / "binary")


def test_frames_of_a_video(tmp_path):
    """Every third of 7 pictures, which were 2 a second; and the same from a file, where PyAV is installed."""
    folder = tmp_path / "frames"
    folder.mkdir()
    shades = [Image.new("RGB", (32, 32), (30 * i,) * 3) for i in range(7)]
    for i, shade in enumerate(shades):
        shade.save(folder / f"{i}.png")
    video = read_video(str(folder), 3)
    assert [path.name for path in video.frames] == ["0.png", "3.png", "6.png"]
    assert video.fps == pytest.approx(2 * 3 / 7)
    assert len(read_video(folder, 99).frames) == 7
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="none: an empty folder"):
        read_video(tmp_path / "none", 3)
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "clip.mp4"), "w") as out:
        stream = out.add_stream("mpeg4", rate=7)
        stream.width = stream.height = 32
        for shade in shades:
            out.mux(stream.encode(av.VideoFrame.from_image(shade)))
        out.mux(stream.encode())
    video = read_video(tmp_path / "clip.mp4", 3)
    np.testing.assert_allclose([np.asarray(frame).mean() for frame in video.frames], [0, 90, 180], atol=4)
    assert video.fps == pytest.approx(3) and video.seconds == pytest.approx((0, 3 / 7, 6 / 7), abs=0.01)
    with pytest.raises(InputError, match="not a video"):
        (tmp_path / "0.png").write_text("no")
        read_video(tmp_path / "0.png", 3)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["frame1.png", "frame2.png", "frame10.png", "frame11.png"], None),
        (["09.png", "10.png", "100.png"], None),
        (["clip2 7.jpg", "clip2 12.jpg", "clip10 1.jpg"], None),
        (["Thumb", "a2.png", "b1.png"], None),
        (["t0.25.png", "t0.50.png", "t1.00.png"], None),
        (["t1.25s.png", "t1.5s.png"], "is t1.5s.png before t1.25s.png"),
        (["00a0.png", "0010.png"], "is 00a0.png before 0010.png"),
        (["1.png", "01.png"], "have the same number"),
    ],
)
def test_frames_are_in_the_order_of_their_numbers_or_refused(tmp_path, names, error):
    for name in reversed(names):
        (tmp_path / name).touch()
    if error is None:
        assert [path.name for path in read_video(tmp_path, 99).frames] == names
    else:
        with pytest.raises(InputError, match=error):
            read_video(tmp_path, 99)


def test_a_journal_goes_on_where_it_was_cut_off(tmp_path):
    journal = Journal(tmp_path, {"file": "f"})
    journal.append([entry(0), entry(1)])
    journal.close()
    with journal.path.open("ab") as torn:
        torn.write(b'{"row": 2, "tu')
    journal = Journal(tmp_path, {"file": "f"})
    assert journal.resumed == 2 and journal.entries[1, 0, 0] == entry(1)
    journal.append([entry(1, answer="another"), entry(2)])
    journal.close()
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert lines == [{"run": {"file": "f"}}, entry(0), entry(1), entry(2)]
    journal.path.write_text('{"run": {"fi')  # no journal
    assert Journal(tmp_path, {"file": "f"}).resumed == 0
    assert journal.path.read_text() == '{"run": {"file": "f"}}\n'


def test_a_journal_of_another_run_is_refused(tmp_path):
    Journal(tmp_path, {"file": "f", "model": 1, "policies": ["a"]}).close()
    with pytest.raises(InputError, match="differs in model, policies; resume it with the same settings"):
        Journal(tmp_path, {"file": "f", "model": 2, "policies": ["a", "b"]})
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(InputError, match=r"line 2: damaged; delete the file"):
        Journal(tmp_path, {"file": "f", "model": 1, "policies": ["a"]})


def test_batches_have_rows_of_as_many_turns_and_read_an_image_once():
    def record(line, image, turns, length):
        return Record(line, "", (image,), (Turn("q" * length, ("a",)),) * turns)

    records = [record(1, "x", 1, 9), record(2, "y", 2, 1), record(3, "y", 1, 5), record(4, "x", 1, 3)]
    alone = batches(records, 2, None)
    assert [(batch.groups, batch.real) for batch in alone] == [
        (((3,), (2,)), 2),
        (((0,), (0,)), 1),  # filled up with itself
        (((1,), (1,)), 1),
    ]
    together = batches(records, 2, lambda record: "")
    assert [(batch.groups, batch.real) for batch in together] == [(((2,), (0, 3)), 2), (((1,), (1,)), 1)]
    assert [batch.rows for batch in together] == [[2, 0, 3], [1]]


def test_the_exported_pages_are_the_held_out_ones(tmp_path, root):
    records = read_records(export.export(tmp_path, 5))
    for record, sample in zip(records, pages.held_out(5), strict=True):
        with Image.open(record.images[0]) as image:
            np.testing.assert_array_equal(np.asarray(image.convert("RGB")), np.asarray(sample.image))
        assert [(turn.question, turn.answers) for turn in record.turns] == [(sample.question, (sample.answer,))]
    shipped = read_records(root / "benchmarks" / "data" / "ledger" / export.QUESTIONS)
    assert len({record.images for record in shipped}) == len(shipped) == 100
    for ours, theirs in zip(shipped, records, strict=False):
        assert (ours.id, ours.turns) == (theirs.id, theirs.turns)
        with Image.open(ours.images[0]) as first, Image.open(theirs.images[0]) as second:
            np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def test_several_questions_about_a_page(tmp_path):
    records = read_records(export.export(tmp_path, 2, kind="digits", questions=9))
    first = [record for record in records if record.images == records[0].images]
    rows = first[0].turns[0].answers[0].split(" / ")
    assert [record.turns[0].answers[0] for record in first[1:]] == rows
    assert len(read_records(export.export(tmp_path / "fewer", 2, kind="digits", questions=2))) == 4
    with pytest.raises(InputError, match="at least 1"):
        export.export(tmp_path, 0)
    with pytest.raises(InputError, match="kinds are ledger, right, below, digits"):
        export.export(tmp_path, 1, kind="letters")


def test_a_run_is_tied_to_its_pictures_and_to_own_methods(tmp_path):
    picture = tmp_path / "a.png"
    records = [Record(1, "1", (picture, "data:,"), (Turn("q", ("a",)),), videos=(tmp_path / "film",))]
    (tmp_path / "film").mkdir()
    seen = set()
    for content in (b"one", b"two"):
        picture.write_bytes(content)
        for frame in (b"1", b"2"):
            (tmp_path / "film" / "0.png").write_bytes(frame)
            seen.add(fingerprint.of_pictures(records))
    assert len(seen) == 4
    (tmp_path / "mine.py").write_text("from vlkv import policies\nclass Mine(policies.SnapKV):\n    pass\n")
    mine = policies.make(f"{tmp_path / 'mine.py'}:Mine", keep=0.5)
    own = policies.compose(mine, allocate=policies.PyramidKV(keep=0.5))
    assert fingerprint.of_code([own]) == {"Mine": fingerprint.of_file(tmp_path / "mine.py")}
    assert fingerprint.of_code([policies.SnapKV(keep=0.5)]) == {}
