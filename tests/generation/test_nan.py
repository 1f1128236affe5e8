"""NaN logits: every entry point raises one error that says in which part of the model they come from, and why."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import vlkv
from tests import programs
from tests.families import tiny
from tests.models import SMALL, cut, random_model, tiny_llava, unequal_batch
from vlkv import policies
from vlkv.analysis import profiles
from vlkv.cli import main
from vlkv.generation.nan import explain
from vlkv.tools.evaluation.journal import Journal
from vlkv.tools.evaluation.records import Settings, read_records
from vlkv.tools.evaluation.running import run
from vlkv.tools.harness.answering import Answerer, Question

SAMPLING = vlkv.Greedy(max_new_tokens=4, stop=())
POLICY = policies.SnapKV(keep=0.5, scope="vision")
PAGE, QUESTION = "benchmarks/data/ledger/page000.png", "what does row one say?"
# The weight of the checkpoint that is NaN, and what the error says.
FAULTS = {
    "layers.1.mlp.down_proj": "first in decoder layer 1 of 0 to 1: its weight decoder.layers[1].down.weight is NaN or "
                              "infinite; compare the checkpoint with another copy",
    "vision_tower": "first in the vision tower or the projector: its weight vision.",
}  # fmt: skip


@pytest.fixture(scope="module", params=FAULTS)
def broken(request, tmp_path_factory):
    """The folder of a checkpoint with a fault, and the beginning of the error."""
    folder = cut(tmp_path_factory.mktemp("broken") / "model", layers=2, grid=6)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if request.param in name and name.endswith("weight"))
    tensors[name].flat[0] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, f"the logits are NaN, {FAULTS[request.param]}"


@pytest.fixture(scope="module")
def page(root):
    with Image.open(root / PAGE) as image:
        return image.convert("RGB")


def refused(call) -> str:
    with pytest.raises(vlkv.InputError) as caught:
        call()
    return str(caught.value)


@pytest.mark.full
def test_every_entry_point_says_where_nan_comes_from(broken, page, tmp_path, capsys, monkeypatch):
    folder, message = broken
    params, processor = vlkv.load(folder)
    inputs, answerer = processor(page, QUESTION), Answerer(params=params, processor=processor, policy=POLICY)
    file, questions, asked = tmp_path / "page.png", tmp_path / "q.jsonl", [Question(QUESTION, (page,))]
    page.save(file)
    questions.write_text(json.dumps({"image": "page.png", "question": QUESTION, "answers": ["1"]}))
    records, journal = read_records(questions), Journal(tmp_path, {})
    options = dict(policy=POLICY, sampling=SAMPLING)
    calls = {
        "generate": lambda: vlkv.generate(params, inputs, **options),
        "stream": lambda: list(vlkv.stream(params, inputs, **options)),
        "Chat": lambda: vlkv.Chat(params, processor, page, **options).ask(QUESTION),
        "agnostic Chat": lambda: vlkv.Chat(params, processor, page, policy=POLICY, query_agnostic=True),
        "score": lambda: vlkv.score(params, inputs, np.array([[7, 8]]), POLICY),
        "kl_to_full": lambda: vlkv.kl_to_full(params, inputs, POLICY, sampling=SAMPLING),
        "eval": lambda: run(params, processor, records, [POLICY], Settings(max_new_tokens=4), journal),
        "answers": lambda: answerer.answers(asked, SAMPLING),
        "likelihoods": lambda: answerer.likelihoods(asked, [["1", "2"]]),
        "profile": lambda: profiles.measure(params, [inputs], policies.PrefixKV(keep=0.5)),
    }
    for name, call in calls.items():
        said = refused(call)
        assert said.startswith(message) and len(said) <= 200 and "\n" not in said, (name, said)
    journal.close()
    assert not journal.entries
    model = ["--model", str(folder), "--max-new-tokens", "4"]
    asks = ["--image", str(file), "--prompt", QUESTION]
    commands = {
        "generate": asks,
        "generate --save-cache": [*asks, "--save-cache", str(tmp_path / "cache")],
        "chat": ["--image", str(file)],
        "eval": [str(questions), "--out", str(tmp_path / "out")],
    }
    for name, arguments in commands.items():
        monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
        assert main([name.split()[0], *arguments, *model]) == 2, name
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}"), name
    assert not (tmp_path / "cache").exists()


@pytest.mark.full
def test_nan_of_a_new_token_of_pixels_and_of_half_precision():
    params, inputs = tiny_llava(config=SMALL), unequal_batch(SMALL)
    generate = programs.generate
    first = int(generate(params, inputs, sampling=SAMPLING).tokens[1, 0])
    assert not (np.asarray(inputs.tokens) == first).any(), "the prompts do not contain the first token of the answer"
    table = params.decoder.embedding.weight
    changed = jax.tree.map(lambda x: x.at[first].set(jnp.nan) if x is table[...] else x, params)
    message = "the logits are NaN, first in the text embedding: its weight decoder.embedding.weight is NaN or infinite"
    assert refused(lambda: vlkv.generate(changed, inputs, sampling=SAMPLING)).startswith(message)
    output = generate(changed, inputs, sampling=SAMPLING)
    assert output.tokens[1].tolist() == [first, -1, -1, -1] and int(output.lengths[1]) == 2

    black = dataclasses.replace(inputs, pixels=np.full_like(inputs.pixels, np.nan))
    text = refused(lambda: vlkv.generate(params, black, sampling=SAMPLING))
    assert text == "the logits are NaN, because pixels of the inputs are NaN or infinite: correct the images"

    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    half.decoder.layers[1].down.weight[...] = jnp.full_like(half.decoder.layers[1].down.weight[...], 6e4)
    text = refused(lambda: vlkv.generate(half, inputs, sampling=SAMPLING))
    said = "a number is too large for float16; load the model with dtype bfloat16 or float32"
    assert text == f"the logits are NaN, first in decoder layer 1 of 0 to 1: {said}"


def test_bounds_without_effect_are_not_the_cause():
    """A tower of Gemma 4 whose bounds are infinite, as by default: a fault in another weight, and an overflow."""
    c = tiny.read_config("gemma4")
    params = random_model(dataclasses.replace(c, vision=dataclasses.replace(c.vision, clipped=True)))
    block, inputs = params.vision.blocks[1], tiny.make_batch("gemma4")
    for one in params.vision.blocks:
        for product in ("query", "key", "value", "out", "gate", "up", "down"):
            bounds = getattr(one, f"{product}_bounds")
            bounds.input_min[...] = bounds.output_min[...] = -jnp.inf
            bounds.input_max[...] = bounds.output_max[...] = jnp.inf

    def said() -> str:
        return str(explain(params, inputs, np.array([True, True, False])))

    first = "the logits are NaN, first in the vision tower or the projector: "
    weight = block.down.weight[...]
    block.down.weight[...] = jnp.full_like(weight, 3e38)
    assert said().startswith(f"{first}a number is too large for float32")
    block.down.weight[...] = weight.at[0, 0].set(jnp.inf)
    assert said().startswith(f"{first}its weight vision.blocks[1].down.weight is NaN or infinite")
    block.down.weight[...] = weight
    block.down_bounds.output_max[...] = -jnp.inf
    assert said().startswith(f"{first}its weight vision.blocks[1].down_bounds.output_max is NaN or infinite")


def test_a_token_of_nan_is_no_text(miniature):
    processor = vlkv.load(miniature())[1]
    tokens, lengths = np.array([[7, -1, -1]]), np.array([2])  # as `decode` returns them
    for given in (None, lengths):
        assert "-1 means that logits are NaN" in refused(lambda given=given: processor.decode(tokens, given))


@pytest.mark.full
def test_under_jit_scores_are_nan():
    params, inputs = tiny_llava(config=SMALL), unequal_batch(SMALL)
    black = dataclasses.replace(inputs, pixels=np.full_like(inputs.pixels, np.nan))
    rows_with_images = [True, True, False]
    divergence = jax.jit(lambda p, i: vlkv.kl_to_full(p, i, POLICY, sampling=SAMPLING))(params, black)
    assert np.isnan(divergence).tolist() == rows_with_images
    scores = programs.score(params, black, np.full((3, 2), 7))
    assert np.isnan(scores).all(axis=1).tolist() == np.isnan(scores).any(axis=1).tolist() == rows_with_images
