"""Makes the pictures of docs/gallery.md with the commands above them, in docs/images.

    python -m benchmarks.gallery [NAME.png ...]    (default: all)

One picture needs the model `smollm2`.
"""

import argparse
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vlkv.cli import main as vlkv

ROOT = Path(__file__).parents[1]
PAGE, IMAGES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "images"


class Section(NamedTuple):
    """A picture of the page, and the blocks of code above it: language and text."""

    picture: str
    blocks: tuple[tuple[str, str], ...]


def sections(page: str) -> list[Section]:
    """The pictures of a page in Markdown, each with the blocks since the picture before it."""
    complete: list[Section] = []
    blocks: list[tuple[str, str]] = []
    for language, text, picture in re.findall(r"^```(\w+)\n(.*?)^```$|^!\[.*?\]\(images/(.*?)\)$", page, re.M | re.S):
        if picture:
            complete.append(Section(picture, tuple(blocks)))
            blocks = []
        else:
            blocks.append((language, text))
    return complete


def make(section: Section, folder: Path) -> None:
    """Runs the blocks of a section in a temporary folder, and saves its picture in `folder`."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "benchmarks").symlink_to(ROOT / "benchmarks")
        os.chdir(work)
        try:
            for language, text in section.blocks:
                if language == "python":
                    exec(compile(text, section.picture, "exec"), {})
                    continue
                for line in text.replace("\\\n", " ").splitlines():
                    program, *words = shlex.split(line)
                    if program != "vlkv" or vlkv(words) != 0:
                        raise RuntimeError(f"{section.picture}: {line} failed")
            with Image.open(section.picture) as picture:
                smaller = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        finally:
            os.chdir(here)
    smaller.save(folder / section.picture, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {section.picture: section for section in sections(PAGE.read_text())}
    parser.add_argument("name", nargs="*", help=f"of {', '.join(known)}")
    for name in parser.parse_args().name or known:
        make(known[name], IMAGES)
        print(IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
