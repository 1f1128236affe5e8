"""Imports point downward only: the layout of docs/architecture.md, held by reading every import."""

import ast

import pytest

STANDARD = {
    "__future__",
    "collections",
    "contextlib",
    "contextvars",
    "dataclasses",
    "functools",
    "importlib",
    "itertools",
    "json",
    "math",
    "pathlib",
    "random",
    "typing",
    "warnings",
}
PACKAGES = ("vlkv", "pallas_kernels", "checkpoints_convert")
# Low to high: a module may import from its own line and from those above it, except where FORBIDDEN says more.
ORDER = [
    {"vlkv.errors", "vlkv.files", "vlkv.terminal", "vlkv.memory_maps"},
    {"vlkv.buckets", "pallas_kernels", "checkpoints_convert"},
    {"vlkv.config"},
    {"vlkv.inputs", "vlkv.keys", "vlkv.masks", "vlkv.sharding"},
    {"vlkv.cache", "vlkv.decoder", "vlkv.processing"},
    {"vlkv.compression"},
    {"vlkv.policies", "vlkv.towers"},
    {"vlkv.families"},
    {"vlkv.generation"},
    {"vlkv.loading", "vlkv.chat", "vlkv.analysis", "vlkv.saving"},
    {"vlkv.mini", "vlkv"},
    {"vlkv.tools.compiled", "vlkv.tools.evaluation", "vlkv.tools.planning"},
    {"vlkv.tools", "vlkv.tools.benching"},
    {"vlkv.tools.commands"},
    {"vlkv.cli", "vlkv.tools.harness", "checkpoints_convert.__main__"},
    {"vlkv.__main__"},
]


def modules(root):
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            yield name.removesuffix(".__init__"), ast.parse(path.read_text(), str(path))


def imports(tree, *, known):
    """Every module that a file imports, `from a import b` counting as a.b where that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                yield deeper if deeper in known else node.module


@pytest.fixture(scope="module")
def graph(root):
    trees = dict(modules(root))
    assert len(trees) > 40, "the packages must lie beside the tests, or nothing is checked"
    return {name: set(imports(tree, known=trees)) for name, tree in trees.items()}


def within(module, package):
    return module == package or module.startswith(package + ".")


def ours(module):
    return any(within(module, package) for package in PACKAGES)


def level(module):
    """The line of ORDER with the most specific entry; None: not placed."""
    found = [(len(entry), i) for i, line in enumerate(ORDER) for entry in line if entry_covers(entry, module)]
    return max(found)[1] if found else None


def entry_covers(entry, module):
    return module == entry if entry == "vlkv" else within(module, entry)


def test_every_module_has_its_place_and_imports_only_downward(graph):
    for module, imported in graph.items():
        assert level(module) is not None, f"{module}: give it a line in ORDER"
        for other in filter(ours, imported):
            assert (level(other) or 0) <= level(module), f"{module} imports {other}"


def test_kernels_import_jax_and_nothing_of_ours(graph):
    for module, imported in graph.items():
        if within(module, "pallas_kernels"):
            for other in imported:
                top = other.split(".")[0]
                assert top in STANDARD | {"jax", "jaxtyping", "pallas_kernels"}, f"{module} imports {other}"


def test_config_imports_bounds_and_errors_only(graph):
    assert set(filter(ours, graph["vlkv.config"])) <= {"vlkv.buckets", "vlkv.errors"}
    assert not any(within(other, "jax") for other in graph["vlkv.config"])


def test_conversion_is_given_its_tables(graph):
    allowed = ("vlkv.errors", "vlkv.files", "vlkv.terminal", "checkpoints_convert")
    for module, imported in graph.items():
        if within(module, "checkpoints_convert"):
            own = () if module != "checkpoints_convert.__main__" else ("vlkv.families.folders",)
            for other in filter(ours, imported):
                assert any(within(other, package) for package in (*allowed, *own)), f"{module} imports {other}"


def test_only_the_table_imports_a_family_from_outside(graph):
    """Families build on one another, and nothing else does on one of them but the demo model, which is a LLaVA."""
    shared = {"vlkv.families", "vlkv.families.family", "vlkv.families.folders"}
    for module, imported in graph.items():
        if not within(module, "vlkv.families") and not within(module, "vlkv.mini"):
            used = {other for other in imported if within(other, "vlkv.families")}
            assert used <= shared, f"{module} imports {used - shared}"


def test_policies_know_nothing_of_models(graph):
    for module, imported in graph.items():
        if within(module, "vlkv.policies"):
            for other in imported:
                assert not any(
                    within(other, p) for p in ("vlkv.families", "vlkv.decoder", "vlkv.towers", "vlkv.inputs")
                )


def test_the_front_hall_and_the_rooms_are_small(root):
    assert len(list((root / "vlkv").glob("*.py"))) <= 14
    for folder in ("vlkv", "pallas_kernels", "checkpoints_convert", "benchmarks"):
        for path in (root / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 350, f"{path}: divide it by content"


def test_no_file_derives_a_class_from_a_derived_one(root):
    """A reader of a class meets at most one base class in the same file."""
    for folder in ("vlkv", "pallas_kernels", "checkpoints_convert", "benchmarks"):
        for path in (root / folder).rglob("*.py"):
            classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
            bases = {node.name: {ast.unparse(base).split("[")[0] for base in node.bases} for node in classes}
            for name, above in bases.items():
                deep = {base for base in above if bases.keys() & bases.get(base, set())}
                assert not deep, f"{path}: {name} derives from {deep}, which is derived in the same file"


def test_shared_code_asks_for_no_class_and_hides_no_state(root):
    """No test for `Full`, whose behaviour is in its facts; no `nonlocal`, because the walk has a carry."""
    for path in (root / "vlkv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Nonlocal), f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                assert "Full" not in ast.unparse(node.args[1]).split("."), f"{path}:{node.lineno}"
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
                assert ast.unparse(node.comparators[0]) != "Full", f"{path}:{node.lineno}"


def test_nothing_imports_the_command_line(graph):
    for module, imported in graph.items():
        if module not in ("vlkv.cli", "vlkv.__main__"):
            assert "vlkv.cli" not in imported, module


def test_processing_uses_jax_in_annotations_at_most(root):
    for module, tree in modules(root):
        if within(module, "vlkv.processing"):
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name) and node.value.id in ("jax", "jnp")}  # fmt: skip
            named = {name for name in imports(tree, known=()) if within(name, "jax")}
            assert used <= {"Array"}, module
            assert named <= {"jax"}, module
