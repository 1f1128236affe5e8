"""Answers, folders and tensors beside transformers and torch."""

import copy
import json
from functools import partial

import jax
import numpy as np
import pytest

import vlkv
from checkpoints_convert.__main__ import convert
from tests import programs
from tests.families import forms, tiny
from tests.families.common import NEW, answer, joined, save
from tests.families.common_internvl import SMALL_VIT, make_internvl
from tests.families.common_text import llava_rows, text_rows
from tests.models import CONFIG, IMAGE_TOKEN
from tests.parity.conftest import Later, make_llava, make_text, torch, transformers
from vlkv.families import config_from_hf
from vlkv.families.folders import describe
from vlkv.mini import CHECKPOINT, pages


def test_rows_end_at_their_stop_token_and_the_loop_ends_with_the_last(llava):
    """The stop ids are chosen from what transformers says, so that rows end at different steps."""
    model, folder = llava
    params, rows = vlkv.load_params(folder), llava_rows()
    inputs = vlkv.Inputs.from_hf(joined(rows), params.config)
    every = [answer(model, row, NEW)[2] for row in rows]
    sampling = vlkv.Greedy(max_new_tokens=NEW, stop=(int(every[0][3]), int(every[1][6])))
    output = programs.generate(params, inputs, sampling=sampling)
    for row, said in enumerate(every):
        ends = np.flatnonzero(np.isin(said, sampling.stop))
        length = int(ends[0]) + 1 if len(ends) else NEW
        assert int(output.lengths[row]) == length
        np.testing.assert_array_equal(output.tokens[row, :length], said[:length])
        assert (np.asarray(output.tokens[row, length:]) == said[length - 1]).all(), "its own stop id again"


def test_a_method_has_nothing_to_compress_if_all_layers_have_a_window(tmp_path):
    saved = save(make_text("mistral", sliding_window=8), tmp_path, text_rows())
    run = partial(vlkv.generate, policy=vlkv.policies.SnapKV(keep=0.5))
    with pytest.raises(vlkv.InputError, match="SnapKV: all layers of this model have a sliding window"):
        jax.eval_shape(run, saved.params, saved.inputs())


def test_bfloat16_stays_bfloat16(llava, tmp_path):
    convert(llava[1], tmp_path / "half", dtype="bfloat16", progress=False)
    for dtype in ("bfloat16", "float32"):
        params = vlkv.load_params(tmp_path / "half", dtype=None if dtype == "bfloat16" else dtype)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}


@pytest.fixture(scope="module")
def theirs():
    return transformers.LlavaForConditionalGeneration.from_pretrained(CHECKPOINT).eval()


@pytest.mark.full
def test_answers_of_transformers(theirs):
    params, processor = vlkv.load(CHECKPOINT)
    samples = list(pages.held_out(8, seed=3))
    inputs = processor([s.image for s in samples], [s.question for s in samples])
    output = programs.generate(params, inputs, sampling=vlkv.Greedy(max_new_tokens=32))
    for row, ours in enumerate(processor.decode(output.tokens)):
        ids = inputs.tokens[row][inputs.valid[row]][None]
        tokens = theirs.generate(
            input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.ones(ids.shape, dtype=torch.long),
            pixel_values=torch.tensor(inputs.pixels[row : row + 1]), max_new_tokens=32, do_sample=False,
        )  # fmt: skip
        assert ours == processor.decode(tokens[0, ids.shape[1] :].numpy())


def test_the_processor_of_transformers_reads_the_folder_alike(theirs):
    """Ids and pixels; a path, because transformers treats open images in another way than files."""
    ours = vlkv.load_processor(CHECKPOINT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    sample = next(pages.held_out(1, seed=4))
    inputs = ours(sample.image, sample.question)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": sample.question}]}],
        add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    ids = tokenizer(text.replace("<image>", "<image> " * pages.GRID**2), add_special_tokens=True)["input_ids"]
    np.testing.assert_array_equal(inputs.tokens[0][inputs.valid[0]], ids)


STATES = {  # what is done with pixels, and with the same pixels of float32
    "float32": (lambda x: x, lambda x: x),
    "bfloat16": (lambda x: x.bfloat16(), lambda x: x.bfloat16().float()),
    "float16": (lambda x: x.half(), lambda x: x.half().float()),
    "float64": (lambda x: x.double(), lambda x: x),
    "with a gradient": (lambda x: x.clone().requires_grad_(True), lambda x: x),
    "a list": (lambda x: [x[0].bfloat16().requires_grad_(True)], lambda x: x.bfloat16().float()),
    "a view": (lambda x: x.permute(0, 1, 3, 2), lambda x: x.permute(0, 1, 3, 2).contiguous()),
}


def arrays():
    return torch.tensor([[1, *[IMAGE_TOKEN] * 25, 9, 8, 7]]), torch.randn(1, 3, 20, 20)


@pytest.mark.parametrize("state", STATES)
def test_tensors(state):
    (ids, pixels), (given, wanted) = arrays(), STATES[state]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": given(pixels)}
    inputs = vlkv.Inputs.of(batch, CONFIG)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(inputs))
    np.testing.assert_array_equal(inputs.pixels[:1], wanted(pixels).numpy())
    np.testing.assert_array_equal(inputs.tokens[0, 26:29], [9, 8, 7])


def test_tensors_without_values_are_refused_in_a_line():
    ids, pixels = arrays()
    with pytest.raises(vlkv.InputError, match="input_ids: this tensor has no values to read: Cannot copy out of meta"):
        vlkv.Inputs.of({"input_ids": ids.to("meta")}, CONFIG)
    with pytest.raises(vlkv.InputError, match="pixel_values: this tensor has no values to read") as error:
        vlkv.Inputs.of({"input_ids": ids, "pixel_values": pixels.to_sparse()}, CONFIG)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 200
    with pytest.raises(vlkv.InputError, match="input_ids must be whole numbers"):
        vlkv.Inputs.of({"input_ids": ids.float()}, CONFIG)


files = Later("safetensors.torch")
HEAD = "lm_head.weight"
TIES = (True, False, None)


def theirs_files(folder):
    auto = transformers.AutoModelForCausalLM if "text" in folder.name else transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(folder)
    return [module.weight.detach().numpy() for module in (model.get_input_embeddings(), model.get_output_embeddings())]


def ours(params):
    table = params.decoder.embedding.weight
    return [np.asarray(table), np.asarray(table if params.decoder.head is None else params.decoder.head.weight)]


def same(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("pickles", [False, True])
def test_a_single_file_is_preferred_to_an_index(tmp_path, pickles):
    """A model that is saved again as one file leaves the old shards and their index."""
    model, folder = make_text("llama"), tmp_path / "text"
    old = copy.deepcopy(model)
    with torch.no_grad():
        old.lm_head.weight.mul_(-1)
    model.save_pretrained(folder)
    if pickles:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        torch.save(old.state_dict(), folder / "old.bin")
        (folder / "model.safetensors").unlink()
        index = {"weight_map": dict.fromkeys(old.state_dict(), "old.bin")}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        old.save_pretrained(tmp_path / "old", max_shard_size="50KB")
        for file in (tmp_path / "old").glob("model*"):
            file.rename(folder / file.name)
        assert (folder / "model.safetensors.index.json").exists()
        same(ours(vlkv.load_params(folder)), theirs_files(folder))
    convert(folder, tmp_path / "out", progress=False)
    same(ours(vlkv.load_params(tmp_path / "out")), theirs_files(folder))
    np.testing.assert_array_equal(theirs_files(folder)[1], model.lm_head.weight.detach().numpy())


@pytest.mark.parametrize("family", [
    "llava", "llava_next", "llava_next_video", "llava_onevision", "internvl", "qwen2_vl", "qwen2_5_vl",
    "idefics3", "smolvlm", "llama", "mistral", "qwen2", "phi3", "gemma3", "qwen3_vl_moe", "qwen3_5",
])  # fmt: skip
def test_whether_a_config_ties_the_head(family):
    raw = {**tiny.RAW.get(family, forms.DECODER), "model_type": family, "sliding_window": None}
    raw.pop("tie_word_embeddings", None)
    for outer in TIES:
        for inner in TIES if "text_config" in raw else (None,):
            made = copy.deepcopy(raw)
            for part, value in ((made, outer), (made.get("text_config", {}), inner)):
                part.pop("tie_word_embeddings", None)
                part.update({} if value is None else {"tie_word_embeddings": value})
            reference = transformers.CONFIG_MAPPING[family].from_dict(copy.deepcopy(made)).tie_word_embeddings
            assert config_from_hf(made).decoder.tied == reference, (outer, inner)


@pytest.mark.parametrize("family", ["llava_llama", "llava_qwen", "mobilevlm", "internvl_chat", "qwen", "eve"])
def test_the_authors_configs(family):
    raw = {**copy.deepcopy(tiny.RAW[family]), "model_type": family}
    part = raw.get("llm_config", raw)
    for value in TIES:
        part.pop("tie_word_embeddings", None)
        part.update({} if value is None else {"tie_word_embeddings": value})
        assert config_from_hf(raw).decoder.tied == bool(value)


MAKERS = {"llava": make_llava, "text": lambda tied: make_text("qwen2", tie_word_embeddings=tied),
          "internvl": lambda tied: make_internvl("qwen2", SMALL_VIT, tied=tied)}  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_an_untied_model_without_its_head_is_refused(tmp_path, kind):
    folder = tmp_path / kind
    MAKERS[kind](tied=False).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = files.load_file(file)
    head = next(key for key in weights if key.endswith(HEAD))
    files.save_file({key: x for key, x in weights.items() if key != head}, file)
    for read in (vlkv.load_params, lambda source: convert(source, tmp_path / "out", progress=False)):
        with pytest.raises(vlkv.InputError, match=r"missing key lm_head[.]weight, the output head"):
            read(folder)
    assert sorted(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("head", ["other", "none", "only"])
def test_a_tied_model_with_and_without_a_head(tmp_path, kind, head):
    """transformers uses a head that differs, and ties in both directions."""
    folder = tmp_path / kind
    MAKERS[kind](tied=True).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = files.load_file(file)
    table = next(key for key in weights if key.endswith("embed_tokens.weight"))
    name = "language_model.lm_head.weight" if table.startswith("language_model.") else HEAD
    values = weights[table].clone()
    weights |= {name: 2 * values if head == "other" else values}
    weights.pop({"other": "", "none": name, "only": table}[head], None)
    files.save_file(weights, file, metadata={"format": "pt"})
    same(ours(vlkv.load_params(folder)), theirs_files(folder))
    assert describe(folder).tied and vlkv.load_params(folder).config.decoder.tied == (head != "other")
    convert(folder, tmp_path / f"{kind} out", progress=False)
    same(ours(vlkv.load_params(tmp_path / f"{kind} out")), theirs_files(folder))
    same(theirs_files(tmp_path / f"{kind} out"), theirs_files(folder))


def test_a_converted_folder_without_its_head_is_refused(tmp_path):
    make_text("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "text")
    convert(tmp_path / "text", tmp_path / "out", format="orbax", progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(vlkv.InputError, match=r"decoder[.]head[.]weight has shape None, config.json says"):
        vlkv.load_params(tmp_path / "out")
