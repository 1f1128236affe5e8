"""Imports point downward only: the layout of docs/architecture.md, held by reading every import."""

import ast
import sys
from typing import NamedTuple

import pytest

PACKAGES = ("vlkv", "pallas_kernels", "checkpoints_convert")
# Low to high: a module may import from its own line and from those above it, except where the tests say more.
ORDER = [
    {"vlkv.errors", "vlkv.files", "vlkv.terminal"},
    {"vlkv.buckets", "pallas_kernels", "checkpoints_convert"},
    {"vlkv.config"},
    {"vlkv.inputs", "vlkv.masks", "vlkv.sharding"},
    {"vlkv.cache", "vlkv.decoder", "vlkv.processing"},
    {"vlkv.compression"},
    {"vlkv.policies", "vlkv.towers"},
    {"vlkv.families"},
    {"vlkv.generation"},
    {"vlkv.loading", "vlkv.analysis", "vlkv.saving"},
    {"vlkv.mini", "vlkv"},
    {"vlkv.tools.compiled", "vlkv.tools.evaluation", "vlkv.tools.planning"},
    {"vlkv.tools", "vlkv.tools.benching"},
    {"vlkv.tools.commands"},
    {"vlkv.cli", "vlkv.tools.harness", "checkpoints_convert.__main__"},
    {"vlkv.__main__"},
]
# What of ours a module may import, for those that may import less than ORDER says; the most specific entry counts.
CONVERSION = {"vlkv.errors", "vlkv.files", "vlkv.terminal", "checkpoints_convert"}
ONLY = {
    "vlkv.config": {"vlkv.buckets", "vlkv.errors"},
    "checkpoints_convert": CONVERSION,
    "checkpoints_convert.__main__": CONVERSION | {"vlkv.families.folders"},
    "pallas_kernels": {"pallas_kernels"},
}


class Module(NamedTuple):
    """What one walk over a file has found."""

    path: str
    lines: int
    imports: set[str]
    bases: dict[str, set[str]]  # of each class
    refused: list[str]  # lines with what test_shared_code_asks_for_no_class_and_hides_no_state refuses
    jax: set[str]  # attributes of `jax` and `jnp` that are used


@pytest.fixture(scope="module")
def modules(root):
    """Every module of the packages and the benchmarks, by name; each file is read once."""
    paths = {}
    for package in (*PACKAGES, "benchmarks"):
        for path in sorted((root / package).rglob("*.py")):
            paths[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    assert len(paths) > 40, "the packages must lie beside the tests, or nothing is checked"
    return {name: read(path, paths) for name, path in paths.items()}


def read(path, known):
    text = path.read_text()
    found = Module(str(path), len(text.splitlines()), set(), {}, [], set())
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.Import):
            found.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            deeper = [f"{node.module}.{alias.name}" for alias in node.names]
            found.imports.update(each if each in known else node.module for each in deeper)
        elif isinstance(node, ast.ClassDef):
            found.bases[node.name] = {ast.unparse(base).split("[")[0] for base in node.bases}
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("jax", "jnp"):
            found.jax.add(node.attr)
        elif asks_for_full(node) or isinstance(node, ast.Nonlocal):
            found.refused.append(f"{path}:{node.lineno}")
    return found


def asks_for_full(node):
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
        return "Full" in ast.unparse(node.args[1]).split(".")
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
        return getattr(node.comparators[0], "id", "") == "Full"
    return False


@pytest.fixture(scope="module")
def graph(modules):
    return {name: module.imports for name, module in modules.items() if ours(name)}


def within(module, *packages):
    return any(module == package or module.startswith(package + ".") for package in packages)


def ours(module):
    return within(module, *PACKAGES)


def covering(module, entries):
    """The most specific of the entries that a module belongs to; None: it belongs to none."""
    found = [entry for entry in entries if (module == entry if entry == "vlkv" else within(module, entry))]
    return max(found, key=len, default=None)


def test_every_module_has_its_place_and_imports_only_downward(graph):
    levels = {entry: i for i, line in enumerate(ORDER) for entry in line}
    for module, imported in graph.items():
        place = covering(module, levels)
        assert place is not None, f"{module}: give it a line in ORDER"
        only = covering(module, ONLY)
        for other in filter(ours, imported):
            assert levels.get(covering(other, levels), 0) <= levels[place], f"{module} imports {other}"
            assert only is None or within(other, *ONLY[only]), f"{module} imports {other}"


# What families share; every other module of vlkv.families is one of a family.
SHARED = {f"vlkv.families.{name}" for name in (
    "family", "models", "names", "decoders", "llava_form", "folders")}  # fmt: skip


def test_no_family_imports_another(graph):
    """What several of them need is in towers, processing, or the shared modules, which import no family either."""
    inside = {module: other for module, other in graph.items() if within(module, "vlkv.families")}
    families = {module.split(".")[2] for module in inside if module != "vlkv.families" and not within(module, *SHARED)}
    assert len(families) >= 10
    for module, imported in inside.items():
        if module == "vlkv.families":
            continue  # the table
        name = module.split(".")[2]
        for other in imported:
            assert other != "vlkv.families" or name == "folders", f"{module} imports the table of families"
            if within(other, "vlkv.families") and other != "vlkv.families":
                assert within(other, *SHARED, f"vlkv.families.{name}"), f"{module} imports {other}"


def test_some_modules_import_less_than_that(graph):
    """Nothing but the demo model, which is a LLaVA, depends on one family."""
    families = {"vlkv.families", "vlkv.families.family", "vlkv.families.folders"}
    for module, imported in graph.items():
        if within(module, "pallas_kernels"):
            tops = {other.split(".")[0] for other in imported}
            assert tops <= sys.stdlib_module_names | {"jax", "jaxtyping", "pallas_kernels"}, module
        if within(module, "vlkv.config"):
            assert not any(within(other, "jax") for other in imported)
        if not within(module, "vlkv.families", "vlkv.mini"):
            used = {other for other in imported if within(other, "vlkv.families")}
            assert used <= families, f"{module} imports {used - families}"
        if within(module, "vlkv.policies"):
            models = ("vlkv.families", "vlkv.decoder", "vlkv.towers", "vlkv.inputs")
            assert not any(within(other, *models) for other in imported), module
        if module not in ("vlkv.cli", "vlkv.__main__"):
            assert "vlkv.cli" not in imported, module


def test_the_front_hall_and_the_rooms_are_small(root, modules):
    assert len(list((root / "vlkv").glob("*.py"))) <= 14
    for module in modules.values():
        assert module.lines <= 350, f"{module.path}: divide it by content"


def test_functions_are_short_and_have_few_parameters(root):
    """The public ones may have more options, which are documented."""
    for package in ("vlkv", "pallas_kernels"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    where, arguments = f"{path.name}: {node.name}", node.args
                    count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
                    assert node.end_lineno - node.lineno < 60, f"{where} is too long"
                    assert count <= 8 or not node.name.startswith("_") or node.name == "__init__", where


def test_no_file_derives_a_class_from_a_derived_one(modules):
    """A reader of a class meets at most one base class in the same file."""
    for module in modules.values():
        for name, above in module.bases.items():
            deep = {base for base in above if module.bases.keys() & module.bases.get(base, set())}
            assert not deep, f"{module.path}: {name} derives from {deep}, which is derived in the same file"


def test_shared_code_asks_for_no_class_and_hides_no_state(modules):
    """No test for `Full`, whose behaviour is in its facts; no `nonlocal`; processing has jax in annotations alone."""
    for name, module in modules.items():
        assert not (within(name, "vlkv") and module.refused), module.refused
        if within(name, "vlkv.processing"):
            assert module.jax <= {"Array"}, name
            assert {other for other in module.imports if within(other, "jax")} <= {"jax"}, name
