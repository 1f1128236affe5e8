"""Names in code font in README and docs exist: objects of the library, modules, files and commands."""

import dataclasses
import importlib
import importlib.util
import re
import tomllib
import typing

import pytest
from PIL import Image

from benchmarks import gallery
from vlkv import policies
from vlkv.cli import COMMANDS

PAGES = "README.md", "CONTRIBUTING.md", "docs/*.md"
SHORT = {"policies": "vlkv.policies", "analysis": "vlkv.analysis", "sharding": "vlkv.sharding", "mini": "vlkv.mini"}
ROOTS = "vlkv", "pallas_kernels", "checkpoints_convert", "benchmarks", "tests"


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    found, path = None, ""
    for part in name.split("."):
        path = f"{path}.{part}".removeprefix(".")
        if found is not None and hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(path)
        except ImportError:
            return False
    return True


def names(text: str) -> set[str]:
    """Dotted names of the library at the beginning of a text in code font, and modules that a shell command runs."""
    dotted = {
        SHORT.get(root, root) + rest
        for root, rest in re.findall(r"`(\w+)((?:\.[A-Za-z_]\w*)+)", text)
        if root in SHORT or root in ROOTS
    }
    return dotted | {name for name in re.findall(r"python -m ([\w.]+)", text) if name.split(".")[0] in ROOTS}


@pytest.fixture(scope="module")
def pages(root):
    return {path.name: path.read_text() for pattern in PAGES for path in root.glob(pattern)}


def test_names_exist(pages):
    assert exists("vlkv.policies.SnapKV") and not exists("vlkv.parallel.attention_mass")
    missing = [(page, name) for page, text in pages.items() for name in sorted(names(text)) if not exists(name)]
    assert not missing


def test_files_exist(pages, root):
    pattern = r"`((?:vlkv|pallas_kernels|checkpoints_convert|benchmarks|tests|docs|examples)/[\w/.-]+)`"
    missing = [
        (page, path)
        for page, text in pages.items()
        for path in re.findall(pattern, text)
        if not (root / path).exists() and page != "CONTRIBUTING.md"
    ]
    assert not missing


def test_commands_exist(pages):
    used = set()
    for page, text in pages.items():
        shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
        used |= {(page, name) for name in re.findall(r"`vlkv ([a-z]+)\b", text)}
        used |= {(page, name) for name in re.findall(r"^vlkv ([a-z]+)\b", shell, re.MULTILINE)}
    assert used and not [(page, name) for page, name in used if name not in COMMANDS]


def test_the_table_of_extras_is_complete(pages, root):
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = pages["README.md"].split("## Extras")[1].split("## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(first))) == sorted(extras)


@pytest.mark.full
def test_an_equation_stays_in_its_paragraph(root):
    """Also at the beginning of a line, where Markdown takes <math> for a block."""
    markdown, _ = pytest.importorskip("markdown"), pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("hooks", root / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    html = hooks.on_page_content(markdown.markdown(hooks.on_page_markdown("The score is\n$a_{i} < b$, so\n$c$ is.")))
    assert html.count("<p>") == 1 and html.startswith("<p>") and html.endswith("</p>") and html.count("<math") == 2


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


COMMON = ("keep", "budget", "cap")


@pytest.fixture(scope="module")
def sections(root):
    text = (root / "docs" / "methods.md").read_text()
    return dict(part.split("\n", 1) for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:])


def test_the_page_has_the_registry_in_its_order(sections):
    assert list(sections) == [cls.__name__ for cls in policies.registry.values()]


def test_the_table_shows_default_scopes(root):
    table = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| (?:`(\w+)`)? ?\|", (root / "docs" / "methods.md").read_text(), re.MULTILINE
    )
    scopes = {name: scope for names, scope in table for name in re.findall(r"\w+", names)}
    for cls in policies.registry.values():
        own = next(field.default for field in dataclasses.fields(cls) if field.name == "scope")
        assert scopes[cls.__name__] == ("" if getattr(cls, "own_keep", False) else own), cls


def written(value):
    return f'"{value}"' if isinstance(value, str) else repr(value)


@pytest.mark.parametrize("name", list(policies.registry))
def test_a_section_says_everything(sections, name):
    cls = policies.registry[name]
    idea, *points = re.split(r"^- \*\*(?=\w+\.\*\* )", sections[cls.__name__], flags=re.MULTILINE)
    assert len(re.findall(r"[.](?:\s|$)", idea)) >= 2 or issubclass(cls, policies.Random), "the idea in two sentences"
    assert [point.split(".", 1)[0] for point in points] == ["Computes", "Options", "Departs", "Costs", "Use"]
    options = " ".join(points[1].split())
    for field in dataclasses.fields(cls):
        if field.name in COMMON or (field.name == "scope" and field.default == "all"):
            continue
        assert f"`{field.name}={written(field.default)}`" in options, f"{cls.__name__}.{field.name}"
    named = set(re.findall(r"`(\w+)=", options))
    fields = {field.name for field in dataclasses.fields(cls)}
    assert named <= fields, f"options that {cls.__name__} does not have: {named - fields}"
    variants = set(typing.get_args(typing.get_type_hints(cls).get("variant", None))) - {"paper"}
    assert set(re.findall(r'`"(\w+)"`', points[2])) == variants, "departures of released code name their variant"
