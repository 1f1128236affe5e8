"""The reader's trainer with a tiny random decoder: it learns, resumes, and writes a folder that loads and answers."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

pytest.importorskip("optax")
pytest.importorskip("matplotlib")

import vlkv
from benchmarks import train_reader
from benchmarks.documents import pages
from benchmarks.train_reader import BEFORE, LENGTH, QUESTION, Asked, Reader, Settings, train
from checkpoints_convert.entry import make_entries
from tests import programs
from tests.models import random_model
from vlkv import sharding
from vlkv.errors import InputError
from vlkv.families import config_from_hf
from vlkv.families.folders import table_of

SMALL = Settings(steps=4, batch=2, size=128, questions=2, width=64, layers=1)
IMAGE = 3  # the id of `SPARE` in the tokenizer below


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A random decoder whose tokenizer has the special tokens of SmolLM2 and, like it, a token per digit."""
    folder = tmp_path_factory.mktemp("text")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", train_reader.SPARE]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    told = [f"{BEFORE}{QUESTION.format(q)}{a}" for i in range(200) for q, a in pages.plan(i, 128).sheet.questions]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        told, trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet,
                                  special_tokens=[AddedToken(one, special=True) for one in special]),
    )  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    raw = dict(model_type="llama", vocab_size=600, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
               num_attention_heads=2, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-5, hidden_act="silu",
               max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=2)  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    names = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<|im_start|>", eos_token="<|im_end|>")
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    model = random_model(config_from_hf(raw))
    leaves = {sharding.path_name(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(model)[0]}
    table = table_of(model.config, raw)
    entries = [entry for entry in make_entries(table.names, table.shapes()) if entry.path in leaves]
    save_file({entry.key: leaves[entry.path].reshape(entry.shape) for entry in entries}, folder / "model.safetensors")
    return folder


def logged(out) -> list[dict]:
    """The lines of the log after the first, which has the settings."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()][1:]


@pytest.mark.full
def test_a_row_is_what_the_library_computes(text, tmp_path):
    """The prompts of a row with two questions, and the logits of their answers' first tokens, in float32."""
    reader = Reader(text, SMALL)
    weights = reader.start()
    reader.write(tmp_path / "model", weights)
    params, processor = vlkv.load(tmp_path / "model")
    page = pages.page(0, 128)
    batch = reader.batch([Asked(page.pixels, page.questions[:2])], branches=2)
    got = np.asarray(jax.jit(partial(reader.logits, dtype=np.float32))(weights, batch))[0]
    forward = programs.forward
    for branch, (question, answer) in enumerate(page.questions[:2]):
        inputs = processor(Image.fromarray(page.pixels), question)
        valid = np.asarray(inputs.valid)[0]
        prompt = reader.ids(QUESTION.format(question))
        assert np.asarray(inputs.tokens)[0][valid].tolist() == [*reader.ids(BEFORE), *[IMAGE] * 64, *prompt]
        part = slice(branch * LENGTH, (branch + 1) * LENGTH)
        tokens, answers = batch.tokens[0, part], batch.weights[0, part] > 0
        assert tokens[: len(prompt)].tolist() == prompt and not answers[: len(prompt)].any()
        assert processor.decode(tokens[answers]) == answer
        want = np.asarray(forward(params, inputs))[0][valid][-1]
        np.testing.assert_allclose(got[branch * LENGTH + len(prompt) - 1], want, atol=2e-3)


@pytest.mark.full
def test_resumes_with_the_same_losses(text, tmp_path):
    """A run that is interrupted after its third step, and one that is not."""

    def interrupted(line: str) -> None:
        if json.loads(line)["step"] == 4:
            raise KeyboardInterrupt

    settings = dataclasses.replace(SMALL, steps=6)
    train(tmp_path / "whole", text, settings, every=2, held_out=3, say=str)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", text, settings, every=2, held_out=3, say=interrupted)
    assert [line["step"] for line in logged(tmp_path / "parts")] == [2, 4]
    resumed = []
    train(tmp_path / "parts", text, settings, every=2, held_out=3, say=resumed.append)
    assert [json.loads(line)["step"] for line in resumed] == [4, 6]
    whole, parts = (logged(tmp_path / name) for name in ("whole", "parts"))
    assert [line["step"] for line in parts] == [2, 4, 6] and {"loss", "exact"} < set(parts[-1])
    assert [(line["loss"], line["exact"]) for line in parts] == [(line["loss"], line["exact"]) for line in whole]
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {"model", "log.jsonl", "state.npz"}
    with pytest.raises(InputError, match="run with other settings"):
        train(tmp_path / "parts", text, SMALL, say=str)


@pytest.mark.default("arguments0")
@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--size", "100"], ["--workers", "-1"], ["--decoder", "no"]])
def test_bad_arguments_are_one_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_reader", str(tmp_path / "out"), "--decoder", str(tmp_path), *arguments])
    try:
        status = train_reader.main()
    except SystemExit as error:  # of argparse
        status = error.code
    err = capsys.readouterr().err
    assert status == 2 and len(err.splitlines()) == 1 and err.startswith("error: ") and not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_frozen_decoder_does_not_change(text, tmp_path):
    model = train(tmp_path, text, dataclasses.replace(SMALL, frozen=True, steps=2), every=2, held_out=2, say=str)
    before, after = (load_file(folder / "model.safetensors") for folder in (text, Path(model)))
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name.replace("model.", "model.language_model.", 1)], tensor)


@pytest.mark.slow
def test_learns_in_a_hundred_steps(text, tmp_path):
    """The loss falls. So few steps teach the form of the answers; no held-out question is answered yet."""
    settings = Settings(steps=100, batch=8, size=128, questions=4, width=64, layers=2, rate=3e-3)
    model = train(tmp_path / "out", text, settings, every=100, workers=1, held_out=20, say=str)
    log = logged(tmp_path / "out")
    assert [line["step"] for line in log] == [20, 40, 60, 80, 100]
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]  # 3.79 and 6.52 where this was written
    params, processor = vlkv.load(model)
    page = pages.page(0, 128, held_out=True)
    assert vlkv.answer(params, processor, Image.fromarray(page.pixels), page.questions[0][0])


@pytest.mark.full
def test_transformers_reads_the_folder(text, tmp_path):
    """Its processor and its logits, of a prompt with a page."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reader = Reader(text, SMALL)
    reader.write(tmp_path / "model", reader.start())
    params, processor = vlkv.load(tmp_path / "model")
    image = Image.fromarray(pages.page(1, 128).pixels)
    theirs = transformers.AutoProcessor.from_pretrained(tmp_path / "model", use_fast=False)
    content = [{"type": "image"}, {"type": "text", "text": "What is the total?"}]
    prompt = theirs.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    batch = theirs(images=image.convert("RGB"), text=prompt, return_tensors="pt")
    inputs = processor(image, "What is the total?")
    valid = np.asarray(inputs.valid)[0]
    assert batch["input_ids"][0].tolist() == np.asarray(inputs.tokens)[0][valid].tolist()
    model = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "model").eval()
    with torch.inference_mode():
        want = model(**batch).logits[0].numpy()
    np.testing.assert_allclose(np.asarray(programs.forward(params, inputs))[0][valid], want, atol=2e-3)
