"""A video file, an image and a folder with its own generation settings: from the files to greedy tokens.

Frames are decoded again with PyAV, and transformers' PIL processor makes their patches; its video processors need
torchvision. Positions and tokens are those of transformers' model, loaded from the same folder.
"""

import json

import numpy as np
import PIL.Image
import pytest

import vlkv
from tests.families.common_qwen import MERGE, PATCH
from tests.families.common_qwen import make as make_qwen
from tests.families.test_qwen2_vl_pictures import SETTINGS, SPECIAL, write_folder
from tests.parity.conftest import torch, transformers
from vlkv.processing import read_video

GENERATION = {
    "eos_token_id": 2, "pad_token_id": 0, "do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2,
    "suppress_tokens": [7, 11], "begin_suppress_tokens": list(range(20, 60)), "bad_words_ids": [[9], [13, 14]],
    "min_new_tokens": 10, "forced_eos_token_id": 2,
}  # fmt: skip
NEW, CHOSEN = 16, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    model = make_qwen("qwen2_5_vl", vocab_size=300)
    model.config.image_token_id, model.config.video_token_id = SPECIAL["<|image_pad|>"], SPECIAL["<|video_pad|>"]
    model.save_pretrained(folder)
    settings = {**SETTINGS, "patch_size": PATCH, "min_pixels": 64, "max_pixels": 4096}
    write_folder(folder, settings)
    video = settings | {"video_processor_type": "Qwen2VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """One and a half seconds of a moving gradient, at 10 frames per second."""
    av = pytest.importorskip("av")
    file = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with av.open(str(file), "w") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height = 32, 24
        ramp = np.add.outer(np.arange(24) * 5, np.arange(32) * 3)
        for i in range(15):
            frame = np.stack([ramp + 8 * i, 255 - ramp, np.full_like(ramp, 16 * i)], axis=-1) % 256
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame.astype(np.uint8), format="rgb24")))
        out.mux(stream.encode())
    return file


def patches(reader, images):
    """Patches of images, and with two of them of a pair of frames, as [patches, channels, frames, side, side]."""
    made = [reader(image, return_tensors="np") for image in images]
    values = [one["pixel_values"].reshape(-1, 3, 2, PATCH, PATCH)[:, :, :1] for one in made]
    pair = np.concatenate(values * (2 // len(values)), axis=2)
    return pair.reshape(len(pair), -1), made[0]["image_grid_thw"][0].tolist()


@pytest.mark.full
def test_from_a_file_to_tokens(folder, clip):
    import av

    pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    reader = pil.Qwen2VLImageProcessorPil(**{**SETTINGS, "patch_size": PATCH, "min_pixels": 64, "max_pixels": 4096})
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 44, 3), dtype=np.uint8))
    params, processor = vlkv.load(folder, dtype="float32")
    inputs = processor([image, read_video(clip, CHOSEN)], "one <image> two <video>?")

    with av.open(str(clip)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    assert len(frames) == 15
    times = [np.rint(i * 14 / 3).astype(int) for i in range(CHOSEN)]  # from the first frame to the last
    pairs = [patches(reader, [frames[times[i]], frames[times[i + 1]]]) for i in (0, 2)]
    of_image, grid = patches(reader, [image])
    of_video, (_, lines, columns) = np.concatenate([pair for pair, _ in pairs]), pairs[0][1]
    tokens = [np.prod(grid) // MERGE**2, 2 * lines * columns // MERGE**2]
    text = f"<|user|>one [{'@' * tokens[0]}] two [{'#' * tokens[1]}]?<|assistant|>"
    marks = {"@": SPECIAL["<|image_pad|>"], "#": SPECIAL["<|video_pad|>"]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    wanted = tokenizer.encode(text.replace("@", "<|image_pad|>").replace("#", "<|video_pad|>"))
    valid = np.asarray(inputs.valid[0])
    ids = np.asarray(inputs.tokens[0])[valid]
    np.testing.assert_array_equal(ids, wanted)
    assert [int((ids == mark).sum()) for mark in marks.values()] == tokens

    batch = {
        "input_ids": torch.tensor([wanted]), "attention_mask": torch.ones(1, len(wanted), dtype=torch.long),
        "pixel_values": torch.tensor(of_image), "image_grid_thw": torch.tensor([grid]),
        "pixel_values_videos": torch.tensor(of_video), "video_grid_thw": torch.tensor([[2, lines, columns]]),
        "second_per_grid_ts": torch.tensor([2 / (CHOSEN / 1.5)]),
        "mm_token_type_ids": torch.tensor([[(t == marks["@"]) + 2 * (t == marks["#"]) for t in wanted]]),
    }  # fmt: skip
    theirs = vlkv.Inputs.from_hf(batch, params.config, processor.buckets)
    np.testing.assert_allclose(inputs.pixels, theirs.pixels, atol=1e-6)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    places = {name: batch[name] for name in batch if not name.startswith("pixel")}
    positions = model.model.get_rope_index(**places)[0][:, 0].numpy()
    np.testing.assert_array_equal(np.asarray(inputs.positions[0])[valid].T, positions)

    with torch.no_grad():
        answer = model.generate(**batch, max_new_tokens=NEW)[0, len(wanted) :].tolist()
    output = vlkv.generate(params, inputs, sampling=vlkv.default_sampling(params, max_new_tokens=NEW))
    assert output.tokens[0].tolist()[: int(output.lengths[0])] == answer
    free = vlkv.generate(params, inputs, sampling=vlkv.Greedy(max_new_tokens=NEW, rules=vlkv.LogitRules()))
    assert free.tokens[0].tolist() != output.tokens[0].tolist(), "or the folder's settings would change nothing"
