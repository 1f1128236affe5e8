"""Every picture of docs/gallery.md is made by the commands above it."""

import re

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
