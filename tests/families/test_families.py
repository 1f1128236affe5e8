"""What holds of the code of all families: names are in one place, and every family has sizes that can be planned."""

import ast
import io
import re
import subprocess
import sys
import tokenize

import jaxtyping
import pytest

import vlkv
from vlkv import families
from vlkv.tools.planning.questions import TEXT, question


@pytest.fixture(scope="module", autouse=True)
def shapes_for_arrays():
    """Here dataclasses of arrays hold ShapeDtypeStructs, which jaxtyping takes for mistakes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


PACKAGES = ("vlkv", "pallas_kernels", "checkpoints_convert")
NAMES = re.compile(
    r"llava|qwen|\bglm|intern_?(vl|vit|lm)|mobile_?vlm|\beve\b|mistral|phi-?_?3|llama|vicuna|gemma|paddle",
    re.IGNORECASE,
)
# Data about published models: tables of papers' figures, the demo model, which is a LLaVA, classes of tokenizers and of
# processors, and the title of a paper.
DATA = (
    "vlkv/tools/benching/papers.py",
    "vlkv/mini/folder.py",
    "benchmarks/train_mini.py",
    "checkpoints_convert/byte_pairs.py",
    "checkpoints_convert/tokenizer_classes.py",
    "vlkv/processing/class_names.py",
    "vlkv/policies/prumerge.py",
)


def code(path):
    """The names and strings of a file, without comments and docstrings, by line."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.STRING) and token.start[0] not in docs:
            yield token.start[0], token.string


def modules(root):
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def test_no_family_is_named_outside_of_the_families(root):
    for path in modules(root):
        name = path.relative_to(root).as_posix()
        if name.startswith("vlkv/families/") or name in DATA:
            continue
        for line, text in code(path):
            assert not NAMES.search(text), f"{name}:{line}: {text}"


def test_the_converter_does_not_load_jax():
    code = (
        "import sys, checkpoints_convert\n"
        "from checkpoints_convert import checkpoint, converting, entry, journal, manifest, pieces, slices\n"
        "assert 'jax' not in sys.modules and 'vlkv.families' not in sys.modules\n"
        "import vlkv\n"
        "assert 'jax' not in sys.modules\n"
        "import vlkv.generation.generate\n"
        "assert vlkv.generate is sys.modules['vlkv.generation.generate'].generate and vlkv.presets['llava-1.5-7b']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", {families.model_type(raw): name
                                  for name, raw in reversed(vlkv.presets.raw.items())}.values())  # fmt: skip
def test_a_size_of_every_family_can_be_planned(name):
    config = vlkv.presets[name]
    prompt = min(config.decoder.max_positions, 4096) - 64
    for batch in (1, 3):
        asked = question(config, batch=batch, prompt=prompt)
        assert asked.inputs.tokens.shape[0] == batch and (asked.pictures > 0) == (config.vision is not None)
        assert asked.vision + asked.text == prompt and asked.text >= TEXT
        assert asked.inputs.max_vision >= asked.vision


def test_every_family_has_published_sizes():
    """The authors' LLaVA-1.5 is the same model as transformers' LLaVA-1.5, and `glm46v` the same as `glm4v`.

    The decoders of Gemma 4 and Qwen3.5 are published only with a tower.
    """
    sized = {families.model_type(raw) for raw in vlkv.presets.raw.values()}
    alone = {"gemma4_text", "qwen3_5_text", "qwen3_5_moe_text"}
    assert set(families.FAMILIES) - sized == {"llava_llama", "glm46v"} | alone
