"""Opening pictures: odd but legal ones as transformers does, anything else refused in one line; and their pixels."""

import base64
import io
import json
import warnings

import numpy as np
import PIL.features
import PIL.Image
import pytest

from tests.processing.conftest import image_settings, noise, png_header
from vlkv.errors import InputError
from vlkv.families.llava_form import LLAVA_KINDS
from vlkv.processing.images import open_image
from vlkv.processing.pixels import RawSettings, find_settings, to_pixels


def drawn(mode="RGB", size=(23, 17)):
    random = np.random.default_rng(0)
    if mode == "I;16":
        return PIL.Image.fromarray(random.integers(0, 1000, size[::-1]).astype(np.uint16))
    if mode in ("I", "F"):
        return PIL.Image.fromarray(random.integers(-50, 400, size[::-1]).astype({"I": "i4", "F": "f4"}[mode]))
    bands = {"RGB": 3, "RGBA": 4, "CMYK": 4, "LA": 2, "L": 1}.get(mode)
    if bands is None:
        return drawn().convert(mode)
    array = random.integers(0, 256, (*size[::-1], bands)).astype(np.uint8)
    return PIL.Image.fromarray(array.squeeze(), mode=mode)


def encoded(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def rotated(orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return encoded(drawn(), "PNG", exif=exif)


def animation():
    frames = [PIL.Image.new("P", (8, 8), color) for color in (0, 1, 2)]
    for frame in frames:
        frame.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


ODD = {
    **{mode: encoded(drawn(mode), "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1")},
    "CMYK": encoded(drawn("CMYK"), "TIFF"),
    "CMYK jpeg": encoded(drawn("CMYK"), "JPEG"),
    "jpeg 2000": encoded(drawn(), "JPEG2000"),
    "tga": encoded(drawn(), "TGA"),
    "grey with a transparent value": encoded(drawn("L"), "PNG", transparency=3),
    "palette with transparency": encoded(drawn("P"), "PNG", transparency=bytes([0, 128] + [255] * 254)),
    "animation": animation(),
    **{f"rotation {orientation}": rotated(orientation) for orientation in range(1, 9)},
}


def test_pictures_by_hand():
    """Alpha is dropped, an animation gives its first frame, a rotation is applied; the given image stays as it was."""
    image = PIL.Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    opened = open_image(image)
    np.testing.assert_array_equal(np.array(opened)[0, 0], [10, 20, 30])
    opened.putpixel((0, 0), (1, 2, 3))
    assert image.mode == "RGBA" and image.getpixel((0, 0)) == (10, 20, 30, 0)
    np.testing.assert_array_equal(np.array(open_image(ODD["animation"]))[0, 0], [255, 0, 0])
    assert open_image(ODD["rotation 6"]).size == (17, 23)
    assert "no pixels" in refusal(PIL.Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "JPEG2000", "PPM"])
def test_16_bit_grey_is_scaled(form):
    grey = np.random.default_rng(0).integers(0, 2**16, (5, 7)).astype(np.uint16)
    image = PIL.Image.fromarray(grey)
    for picture in (image, encoded(image, form, **({"irreversible": False} if form == "JPEG2000" else {}))):
        got = np.array(open_image(picture))
        np.testing.assert_array_equal(got, np.repeat(grey[..., None] // 256, 3, axis=2))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bit_and_float_pictures_are_clipped_with_a_warning(mode):
    data = encoded(drawn(mode), "TIFF")
    with pytest.warns(UserWarning, match=r"values from -\d+ to \d+ are clipped"):
        got = open_image(data)
    np.testing.assert_array_equal(np.array(got)[..., 0], np.clip(np.array(drawn(mode)), 0, 255).astype(np.uint8))
    dark = PIL.Image.fromarray(np.full((2, 2), 0.5, np.float32))
    with pytest.warns(UserWarning, match="the given PIL image: values from 0.5 to 0.5"):
        open_image(dark)
    eight = np.array([[0, 7, 255]])
    for dtype in (np.int32, np.float32):  # no warning, because these are 8-bit values
        image = open_image(PIL.Image.fromarray(eight.astype(dtype)))
        np.testing.assert_array_equal(np.array(image)[..., 0], eight)


def test_base64(tmp_path, monkeypatch):
    data = encoded(drawn(), "PNG")
    text = base64.b64encode(data).decode()
    lines = base64.encodebytes(data).decode()
    for picture in (f"data:image/png;base64,{text}", f"data:;base64,{lines}", f"DATA:image/png;BASE64,{text}", text,
                    lines, f"data:image/png;base64,{text.replace('+', '%2B').replace('/', '%2F')}"):  # fmt: skip
        np.testing.assert_array_equal(np.array(open_image(picture)), np.array(drawn()))
    monkeypatch.chdir(tmp_path)
    PIL.Image.new("RGB", (1, 1)).save("page", "PNG")
    assert open_image("page").size == (1, 1), "a file whose name is valid base64"
    assert "no such image file" in refusal("pages")
    cut = base64.b64encode(data[: len(data) // 2]).decode()
    assert "truncated" in refusal(cut) and "truncated" in refusal(f"data:image/png;base64,{cut}")
    assert "not an image" in refusal(f"data:image/png;base64,{base64.b64encode(b'no picture').decode()}")
    for bad in (
        "data:image/png;base64,@" + text,
        f"data:image/png,{text}",
        "data:",
        f"data:image/png;base64,{text[:-1]}",
    ):
        assert "not a data URI in base64" in refusal(bad)
    assert "no such image file" in refusal("@" * 100_000)


def refusal(picture):
    with pytest.raises(InputError) as caught:
        open_image(picture)
    message = str(caught.value)
    assert "\n" not in message and len(message) <= 200
    return message


def test_what_is_no_image(tmp_path):
    (tmp_path / "notes.txt").write_text("not a picture")
    (tmp_path / "empty.png").write_bytes(b"")
    for picture, said in (
        (tmp_path / "none.png", "none.png': no such image file"),
        (tmp_path, "folder"),
        (tmp_path / "notes.txt", "notes.txt': not an image"),
        (tmp_path / "empty.png", "empty file"),
        ("https://example.org/page.png", "download"),
        (np.zeros((3, 4, 4), np.float32), "uint8 [height, width, 3]"),
        ("a\0b", "check the path"),
        ("two\nlines.png", ""),
        (b"", ""),
    ):
        assert said in refusal(picture)


def test_damage_is_an_input_error(tmp_path):
    random = np.random.default_rng(0)
    for form in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"):
        data, path = encoded(drawn(size=(64, 64)), form), tmp_path / f"cut.{form.lower()}"
        path.write_bytes(data[: len(data) * 6 // 10])
        message = refusal(path)
        assert path.name in message and ("truncated" in message or "damaged" in message)
        for _ in range(30):
            broken = bytearray(encoded(drawn(), form))
            for place in random.integers(0, len(broken), 6):
                broken[place] = random.integers(0, 256)
            try:
                open_image(bytes(broken))
            except InputError as error:
                assert "\n" not in str(error)  # some damage leaves a legal picture


def test_a_bomb_is_refused_and_not_decoded(tmp_path, monkeypatch):
    """PIL warns of the first and refuses the second; an icon names its inner picture's size twice, and one may lie."""
    limit, filters = PIL.Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    monkeypatch.setattr(PIL.Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    for side in (10_000, 20_000):
        (tmp_path / "bomb.png").write_bytes(png_header(side, side))
        assert "bomb.png" in (message := refusal(tmp_path / "bomb.png")) and "bomb" in message.replace("bomb.png", "")
    assert limit == PIL.Image.MAX_IMAGE_PIXELS and filters == warnings.filters
    data = encoded(PIL.Image.new("RGB", (64, 64)), "ICO", sizes=[(64, 64)])
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
    assert "bomb" in refusal(data)


VARIANTS = {
    "defaults": None,
    "crop larger than the picture": {"do_resize": False, "crop_size": {"height": 301, "width": 128}},
    "odd crop": {"crop_size": {"height": 27, "width": 26}},
    "crop larger than the resized": {"size": {"shortest_edge": 20}},
    "one mean": {"image_mean": 0.5, "image_std": [0.5, 0.25, 1.0]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_with_clip(variant):
    """`test_every_processor.py` has other settings and sizes."""
    clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    raw = {} if VARIANTS[variant] is None else image_settings(**VARIANTS[variant])
    settings = RawSettings(raw, "test").pixels()
    if isinstance(raw.get("image_mean"), float):  # transformers' own argument check refuses a number
        raw["image_mean"] = [raw["image_mean"]] * 3
    for seed, size in enumerate([(301, 250), (1, 1), (1, 100), (28, 57)]):
        image = noise(*size, seed)
        wanted = clip.CLIPImageProcessorPil(**raw)(image, return_tensors="np")["pixel_values"][0]
        got = to_pixels(image, settings)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=0)


def test_padding_is_asked_for_in_the_file_or_by_the_layout():
    """Its parity is tested with the whole processor."""
    raw = image_settings(image_processor_type="LlavaImageProcessorFast", do_pad=True)
    by_file = RawSettings(raw, "test", LLAVA_KINDS).pixels()
    assert by_file == RawSettings(image_settings(), "test").pixels("pad") and by_file.square


def test_values_by_hand():
    raw = image_settings(image_mean=[0.0, 0.5, 1.0], image_std=[1.0, 0.5, 2.0])
    pixels = to_pixels(PIL.Image.new("RGB", (90, 60), (255, 255, 51)), RawSettings(raw, "test").pixels())
    assert pixels.shape == (3, 28, 28)
    np.testing.assert_allclose(pixels[:, 0, 0], [1.0, 1.0, -0.4], atol=1e-6)


def test_both_generations_of_files(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_settings(resample=2)))
    assert find_settings(tmp_path).pixels().resample == PIL.Image.Resampling.BILINEAR
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor"}))
    assert find_settings(tmp_path).pixels().resample == PIL.Image.Resampling.BILINEAR
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": image_settings(resample=0)}))
    assert find_settings(tmp_path).pixels().resample == PIL.Image.Resampling.NEAREST
    assert not find_settings(tmp_path).pixels().square
    assert find_settings(tmp_path).pixels("pad").square


def test_files_that_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"preprocessor_config\.json: no such file"):
        find_settings(tmp_path).pixels()
    path = tmp_path / "processor_config.json"
    for content, reason in ((b'{"image_processor"', "JSON"), (b"[]", "list"), (b"\xff\xfe", "text")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"processor_config\.json.*{reason}"):
            find_settings(tmp_path).pixels()


def test_a_line_of_pixels_does_not_fill_the_memory():
    line = PIL.Image.new("RGB", (1, 1_000_000))
    for layout in ("checkpoint", "pad"):
        with pytest.raises(InputError, match=r"after (resizing|padding)"):
            to_pixels(line, RawSettings(image_settings(size={"shortest_edge": 336}), "test").pixels(layout))
