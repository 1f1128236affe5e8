"""The shipped folder: small, a true LLaVA checkpoint, the same answers in transformers."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import vlkv
from tests import programs
from tests.models import padded
from vlkv.files import replacing_folder
from vlkv.inputs import Inputs
from vlkv.mini import CHECKPOINT, folder, pages


@pytest.fixture(scope="module")
def read():
    """Four unseen pages with their answers, as a transformers processor would return them, and our logits."""
    samples, params = list(pages.held_out(4, seed=11)), vlkv.load_params(CHECKPOINT)
    images = "<image>" * pages.GRID**2
    texts = [f"USER: {images}\n{sample.question} ASSISTANT: {sample.answer}" for sample in samples]
    rows = [folder.tokenizer().encode(text).ids for text in texts]
    pixels = np.stack([np.asarray(sample.image, np.float32).transpose(2, 0, 1) / 127.5 - 1 for sample in samples])
    inputs = Inputs.from_hf({**padded(rows), "pixel_values": pixels}, params.config)
    return samples, rows, pixels, np.asarray(programs.forward(params, inputs))


def test_tokenizer_round_trip():
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    for text in ("what does row three say ?", "3 4 1 / 0 9", "what does 4 say ?", *pages.ORDINALS, pages.READ_PAGE):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.token_to_id("<unk>") not in ids
        assert tokenizer.decode(ids) == text
    question = ["what", "does", "row", "three", "say", "?"]
    prompt = tokenizer.encode("USER: <image><image>\nWhat does row three say? ASSISTANT:").tokens
    assert prompt == ["<s>", "user", ":", "<image>", "<image>", *question, "assistant", ":"]
    assert tokenizer.encode("341").tokens == ["<s>", "3", "4", "1"]


def test_folder_is_what_the_code_writes(tmp_path):
    params = vlkv.load_params(CHECKPOINT)
    folder.write(tmp_path / "new", params, log={})
    for file in CHECKPOINT.iterdir():
        if file.suffix != ".safetensors" and file.name != "training_log.json":
            assert (tmp_path / "new" / file.name).read_bytes() == file.read_bytes(), file.name
    shipped, written = (load_file(at / "model.safetensors") for at in (CHECKPOINT, tmp_path / "new"))
    assert shipped.keys() == written.keys()
    for name, array in shipped.items():
        np.testing.assert_array_equal(array, written[name], err_msg=name)
    assert params.config == folder.config()
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 12_000_000
    assert folder.config().decoder.layers >= 6
    assert folder.config().vision.tokens == 576


@pytest.mark.parametrize("dtype", ["int8", "bf16", "float64", bool])
def test_a_dtype_that_loses_the_weights_is_refused(dtype):
    for load in (vlkv.load, vlkv.load_params):
        with pytest.raises(vlkv.InputError, match="must be float32, bfloat16 or float16"):
            load("mini", dtype=dtype)


def test_reads_unseen_pages(read):
    """A handful; benchmarks/quality.py has the real numbers."""
    right = total = 0
    for sample, row, logits in zip(read[0], read[1], read[3], strict=True):
        ids = folder.tokenizer().encode(sample.answer, add_special_tokens=False).ids
        best = logits.argmax(-1)[len(row) - len(ids) - 1 : len(row)]
        right, total = right + int(np.sum(best == [*ids, folder.EOS])), total + len(best)
    assert right / total > 0.7


@pytest.mark.filterwarnings("ignore")
def test_transformers_gives_the_same_logits(read):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    llava = transformers.LlavaForConditionalGeneration
    theirs, report = llava.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not any(report.values()), report
    processor = transformers.AutoProcessor.from_pretrained(CHECKPOINT)
    sample, row, pixels, logits = (part[0] for part in read)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": sample.question}]}
    text = f"{processor.apply_chat_template([message], add_generation_prompt=True)} {sample.answer}"
    batch = processor(images=sample.image, text=text, return_tensors="pt")
    np.testing.assert_array_equal(batch["input_ids"], [row])
    np.testing.assert_allclose(batch["pixel_values"], pixels[None], atol=1e-6)
    with torch.no_grad():
        want = theirs(**batch).logits[0].numpy()
    np.testing.assert_allclose(logits[: len(want)], want, atol=1e-4)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    """An error leaves the old folder alone. After a kill between the two renames, the next call restores it."""
    folder = tmp_path / "model"
    with replacing_folder(folder) as fresh:
        (fresh / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing_folder(folder) as fresh:
        (fresh / "a").write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (folder / "a").read_text() == "old"
    folder.rename(tmp_path / "model.old")
    with pytest.raises(KeyboardInterrupt), replacing_folder(folder):
        raise KeyboardInterrupt
    assert (folder / "a").read_text() == "old"
