"""docs/methods.md against the code: every method, every option with its default."""

import dataclasses
import re
import typing

import pytest

from vlkv import policies

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
