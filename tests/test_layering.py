"""Imports point downward only: the layout of docs/architecture.md, held by reading every import."""

import ast

import pytest

STANDARD = {
    "__future__",
    "collections",
    "contextlib",
    "dataclasses",
    "functools",
    "importlib",
    "json",
    "math",
    "pathlib",
    "typing",
    "warnings",
}
PACKAGES = ("vlkv", "pallas_kernels", "checkpoints_convert")
# Low to high: a module may import from its own line and from those above it, except where FORBIDDEN says more.
ORDER = [
    {"vlkv.errors", "vlkv.files", "vlkv.compiled", "vlkv.terminal"},
    {"vlkv.config", "vlkv.buckets", "pallas_kernels"},
    {
        "vlkv.rope",
        "vlkv.layers",
        "vlkv.budgets",
        "vlkv.observe",
        "vlkv.parallel",
        "vlkv.sharding",
        "vlkv.merging",
        "vlkv.memory",
        "vlkv.tokens",
        "vlkv.matching",
    },
    {"vlkv.decoder", "vlkv.policies", "vlkv.inputs", "vlkv.layouts", "vlkv.sampling", "vlkv.vision"},
    {"vlkv.cache", "vlkv.models", "vlkv.presets", "vlkv.processing"},
    {"vlkv.reading", "checkpoints_convert"},
    {"vlkv.prefill"},
    {"vlkv.generate", "vlkv.extend"},
    {"vlkv.loading", "vlkv.analysis", "vlkv.profiles", "vlkv.saving", "vlkv.evaluation", "vlkv.planning"},
    {"vlkv.mini", "vlkv.benching", "vlkv"},
    {"vlkv.commands"},
    {"vlkv.cli", "vlkv.harness", "checkpoints_convert.__main__"},
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


def test_config_imports_errors_only(graph):
    for module, imported in graph.items():
        if within(module, "vlkv.config"):
            assert all(within(other, "vlkv.config") or other == "vlkv.errors" for other in filter(ours, imported)), (
                module
            )
            assert not any(within(other, "jax") for other in imported), module


def test_conversion_imports_configs_and_abstract_parameters_only(graph):
    allowed = ["config", "errors", "files", "models", "sharding", "terminal"]
    allowed = [*(f"vlkv.{name}" for name in allowed), "checkpoints_convert"]
    for module, imported in graph.items():
        if within(module, "checkpoints_convert"):
            for other in filter(ours, imported):
                assert any(within(other, package) for package in allowed), f"{module} imports {other}"


def test_towers_never_import_one_another(graph):
    for module, imported in graph.items():
        if within(module, "vlkv.vision"):
            assert not any(within(other, "vlkv.vision") for other in imported), module


def test_policies_know_nothing_of_models(graph):
    for module, imported in graph.items():
        if within(module, "vlkv.policies"):
            for other in imported:
                assert not any(within(other, p) for p in ("vlkv.models", "vlkv.decoder", "vlkv.vision", "vlkv.inputs"))


def test_nothing_imports_the_command_line(graph):
    for module, imported in graph.items():
        if not within(module, "vlkv.cli"):
            assert "vlkv.cli" not in imported, module


def test_processing_uses_jax_in_annotations_at_most(root):
    for module, tree in modules(root):
        if within(module, "vlkv.processing"):
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name) and node.value.id in ("jax", "jnp")}  # fmt: skip
            named = {name for name in imports(tree, known=()) if within(name, "jax")}
            assert used <= {"Array"}, module
            assert named <= {"jax"}, module
