"""What holds of the code of all families: names are in one place, and published sizes can be planned."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import jaxtyping
import pytest

import vlkv
from vlkv import families
from vlkv.analysis import cost
from vlkv.tools.planning.questions import TEXT, question


@pytest.fixture(scope="module", autouse=True)
def shapes_for_arrays():
    """Here dataclasses of arrays hold ShapeDtypeStructs, which jaxtyping takes for mistakes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


PACKAGES = ("vlkv", "pallas_kernels", "checkpoints_convert")
# The beginnings of the names of families, and of other models: decoders, towers.
FAMILIES = {re.match("[a-z]+", path.stem)[0] for path in Path(families.__file__).parent.glob("[a-z]*")}
OTHERS = ("intern_?(vl|vit|lm)", "mobile_?vlm", r"\beve\b", "mistral", "phi-?_?3", "llama", "vicuna")
SHARED = {"decoders", "eve", "family", "folders", "models", "names", "text"}
NAMES = re.compile("|".join((*OTHERS, *(f"(?<![a-z]){name}" for name in FAMILIES - SHARED))), re.IGNORECASE)
# Data about published models: tables of papers' figures, the demo model, which is a LLaVA, classes of tokenizers, and
# the title of a paper.
DATA = (
    "vlkv/tools/benching/papers.py",
    "vlkv/mini/folder.py",
    "benchmarks/train_mini.py",
    "checkpoints_convert/byte_pairs.py",
    "checkpoints_convert/packaged.py",
    "checkpoints_convert/tokenizer_classes.py",
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
        "from checkpoints_convert import checkpoint, converting, entry, pieces\n"
        "assert 'jax' not in sys.modules and 'vlkv.families' not in sys.modules\n"
        "import vlkv\n"
        "assert 'jax' not in sys.modules\n"
        "import vlkv.generation.generate\n"
        "assert vlkv.generate is sys.modules['vlkv.generation.generate'].generate and vlkv.presets['llava-1.5-7b']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def kind(name: str) -> tuple[str, str | None]:
    """The family of a preset, and its decoder's."""
    raw = vlkv.presets.raw[name]
    return families.model_type(raw), raw.get("text_config", raw.get("llm_config", {})).get("model_type")


def first_of_each_kind(names, others):
    """All names; those that are not the first of their kind are marked with `others`."""
    first = {kind(name): name for name in reversed(names)}.values()
    return [pytest.param(name, marks=[] if name in first else others) for name in names]


@pytest.mark.parametrize("name", first_of_each_kind(list(vlkv.presets), pytest.mark.full))
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


def test_the_table_of_downloads_says_what_is_supported(root):
    rows = re.findall(
        r"^\| \S+/\S+ \| `(\S+)` \| (in|refused|not yet): ", (root / "docs/models.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 40
    for kind, status in rows:
        assert (kind in families.FAMILIES) == (status == "in"), kind


FILES = sorted(Path(__file__).with_name("published").glob("*.txt"))
ROWS = [line.split() for file in FILES for line in file.read_text().splitlines()]
PUBLISHED = {name: int(parameters) for name, parameters, *_ in ROWS}
# Published, but never run: CLIP's last block and the norm behind it, SigLIP's norm.
UNUSED = {**dict.fromkeys(("llava", "llava_next", "llava_next_video", "mobilevlm"), 12_598_272),
          **dict.fromkeys(("llava_onevision", "llava_qwen"), 2304)}  # fmt: skip


@pytest.mark.parametrize("name", first_of_each_kind(list(vlkv.presets), pytest.mark.full))
def test_parameters_are_as_many_as_published(name):
    stored, _ = cost.parameters(vlkv.presets[name])
    assert stored == PUBLISHED[name] - UNUSED.get(families.model_type(vlkv.presets.raw[name]), 0)


BILLIONS = {"qwen3-30b-a3b": 3.3, "qwen3-8b": 8.2, "gemma4-26b-a4b": 4.4, "qwen3.5-35b-a3b": 3.9}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_active_parameters(name, billions):
    """Billions of active parameters in the models' names. The towers have 0.5 billion more."""
    stored, active = cost.parameters(vlkv.presets[name])
    assert stored == PUBLISHED[name]
    assert active / 1e9 == pytest.approx(billions, rel=0.02)


def test_tokens_of_internvl():
    """256 of each tile, marked by a token within the vocabulary, as is the one that ends an answer."""
    for config in (vlkv.presets[name] for name in vlkv.presets if name.startswith("internvl")):
        assert config.per_picture == 256
        assert all(0 <= token < config.decoder.vocab_size for token in (config.image_token, *config.stop))


def test_a_preset_that_is_not_there():
    with pytest.raises(vlkv.InputError, match=r"no preset 'llava-1\.5-70b': did you mean llava-1\.5-7b\?"):
        vlkv.presets["llava-1.5-70b"]
    assert "llava-1.5-7b" in vlkv.presets and "gpt" not in vlkv.presets
