"""Every picture of docs/gallery.md is made by the commands above it."""

import re

from PIL import Image

from benchmarks import gallery


def test_every_picture_has_its_commands_and_is_there():
    found = gallery.sections(gallery.PAGE.read_text())
    names = [section.picture for section in found]
    assert len(names) == len(set(names)) >= 7
    for name, blocks in found:
        assert sum(len(re.findall(rf"(?<![\w./]){re.escape(name)}\b", text)) for _, text in blocks) == 1, name
        assert (gallery.IMAGES / name).stat().st_size < 200_000
    pages = "".join(path.read_text() for path in gallery.PAGE.parent.glob("*.md"))
    assert all(f"(images/{path.name})" in pages for path in gallery.IMAGES.iterdir())


def test_a_section_is_run_and_its_picture_kept(tmp_path, capsys):
    page = """
```sh
vlkv policies snapkv
```
```python
from PIL import Image

Image.new("RGB", (40, 20), "orange").save("made.png")
```

![A picture](images/made.png)
"""
    (section,) = gallery.sections(page)
    assert [language for language, _ in section.blocks] == ["sh", "python"]
    gallery.make(section, tmp_path)
    with Image.open(tmp_path / "made.png") as picture:
        assert picture.size == (40, 20) and picture.convert("RGB").getpixel((3, 3)) == (255, 165, 0)
    assert "SnapKV" in capsys.readouterr().out and [path.name for path in tmp_path.iterdir()] == ["made.png"]
