"""Opening pictures: odd but legal ones as transformers does, anything else refused in one line."""

import base64
import io
import subprocess
import sys
import warnings

import numpy as np
import PIL.features
import PIL.Image
import pytest

from vlkv.errors import InputError
from vlkv.processing.images import open_image


def noise(mode="RGB", size=(23, 17)):
    random = np.random.default_rng(0)
    if mode == "I;16":
        return PIL.Image.fromarray(random.integers(0, 1000, size[::-1]).astype(np.uint16))
    if mode in ("I", "F"):
        return PIL.Image.fromarray(random.integers(-50, 400, size[::-1]).astype({"I": "i4", "F": "f4"}[mode]))
    bands = {"RGB": 3, "RGBA": 4, "CMYK": 4, "LA": 2, "L": 1}.get(mode)
    if bands is None:
        return noise().convert(mode)
    array = random.integers(0, 256, (*size[::-1], bands)).astype(np.uint8)
    return PIL.Image.fromarray(array.squeeze(), mode=mode)


def encoded(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def palette_with_transparency():
    image = noise("P")
    return encoded(image, "PNG", transparency=bytes([0, 128] + [255] * 254))


def rotated(orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return encoded(noise(), "PNG", exif=exif)


def animation():
    frames = [PIL.Image.new("P", (8, 8), color) for color in (0, 1, 2)]
    for frame in frames:
        frame.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


ODD = {
    **{mode: encoded(noise(mode), "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1")},
    "CMYK": encoded(noise("CMYK"), "TIFF"),
    "CMYK jpeg": encoded(noise("CMYK"), "JPEG"),
    "jpeg 2000": encoded(noise(), "JPEG2000"),
    "tga": encoded(noise(), "TGA"),
    "grey with a transparent value": encoded(noise("L"), "PNG", transparency=3),
    "palette with transparency": palette_with_transparency(),
    "animation": animation(),
    **{f"rotation {orientation}": rotated(orientation) for orientation in range(1, 9)},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_images_are_what_transformers_loads(name, tmp_path):
    pytest.importorskip("torch")
    load_image = pytest.importorskip("transformers.image_utils").load_image
    path = tmp_path / "picture"
    path.write_bytes(ODD[name])
    wanted = np.array(load_image(str(path)))
    for picture in (path, str(path), ODD[name], PIL.Image.open(path)):
        got = open_image(picture)
        assert got.mode == "RGB"
        np.testing.assert_array_equal(np.array(got), wanted)


def test_alpha_is_dropped():
    image = PIL.Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    np.testing.assert_array_equal(np.array(open_image(image))[0, 0], [10, 20, 30])


@pytest.mark.parametrize("form", ["PNG", "TIFF", "JPEG2000", "PPM"])
def test_16_bit_grey_is_scaled(form):
    grey = np.random.default_rng(0).integers(0, 2**16, (5, 7)).astype(np.uint16)
    image = PIL.Image.fromarray(grey)
    for picture in (image, encoded(image, form, **({"irreversible": False} if form == "JPEG2000" else {}))):
        got = np.array(open_image(picture))
        np.testing.assert_array_equal(got, np.repeat(grey[..., None] // 256, 3, axis=2))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bit_and_float_pictures_are_clipped_with_a_warning(mode):
    data = encoded(noise(mode), "TIFF")
    with pytest.warns(UserWarning, match=r"values from -\d+ to \d+ are clipped"):
        got = open_image(data)
    np.testing.assert_array_equal(np.array(got)[..., 0], np.clip(np.array(noise(mode)), 0, 255).astype(np.uint8))
    dark = PIL.Image.fromarray(np.full((2, 2), 0.5, np.float32))
    with pytest.warns(UserWarning, match="the given PIL image: values from 0.5 to 0.5"):
        open_image(dark)
    eight = np.array([[0, 7, 255]])
    for dtype in (np.int32, np.float32):  # no warning, because these are 8-bit values
        image = open_image(PIL.Image.fromarray(eight.astype(dtype)))
        np.testing.assert_array_equal(np.array(image)[..., 0], eight)


def test_avif(tmp_path):
    if not PIL.features.check("avif"):
        pytest.skip("this Pillow is built without AVIF")
    (tmp_path / "page.avif").write_bytes(encoded(noise(), "AVIF", quality=100, subsampling="4:4:4"))
    assert abs(np.array(open_image(tmp_path / "page.avif"), float) - np.array(noise())).mean() < 2


def test_base64(tmp_path, monkeypatch):
    data = encoded(noise(), "PNG")
    text = base64.b64encode(data).decode()
    lines = base64.encodebytes(data).decode()
    for picture in (f"data:image/png;base64,{text}", f"data:;base64,{lines}", f"DATA:image/png;BASE64,{text}", text,
                    lines, f"data:image/png;base64,{text.replace('+', '%2B').replace('/', '%2F')}"):  # fmt: skip
        np.testing.assert_array_equal(np.array(open_image(picture)), np.array(noise()))
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
        "data:image/png;base64," + text[:-1],
    ):
        assert "not a data URI in base64" in refusal(bad)
    assert "no such image file" in refusal("@" * 100_000)


def test_an_animation_gives_its_first_frame():
    np.testing.assert_array_equal(np.array(open_image(ODD["animation"]))[0, 0], [255, 0, 0])


def test_exif_rotation_is_applied():
    assert open_image(ODD["rotation 6"]).size == (17, 23)


def test_the_image_passed_in_stays_as_it_was():
    image = noise("RGBA")
    before = np.array(image)
    open_image(image).putpixel((0, 0), (1, 2, 3))
    assert image.mode == "RGBA"
    np.testing.assert_array_equal(np.array(image), before)


def refusal(picture):
    with pytest.raises(InputError) as caught:
        open_image(picture)
    message = str(caught.value)
    assert "\n" not in message and len(message) <= 200
    return message


def test_missing_and_folder_and_not_an_image(tmp_path):
    assert "no such image file" in (message := refusal(tmp_path / "none.png"))
    assert "none.png" in message
    assert "folder" in refusal(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("not a picture")
    assert "not an image" in (message := refusal(text))
    assert "notes.txt" in message
    empty = tmp_path / "empty.png"
    empty.write_bytes(b"")
    assert "empty file" in refusal(empty)
    assert "download" in refusal("https://example.org/page.png")
    assert "uint8 [height, width, 3]" in refusal(np.zeros((3, 4, 4), np.float32))
    assert "check the path" in refusal("a\0b")
    refusal("two\nlines.png")
    refusal(b"")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_truncated(form, tmp_path):
    data = encoded(noise(size=(64, 64)), form)
    path = tmp_path / f"cut.{form.lower()}"
    path.write_bytes(data[: len(data) * 6 // 10])
    message = refusal(path)
    assert path.name in message
    assert "truncated" in message or "damaged" in message


def test_any_damage_is_an_input_error():
    random = np.random.default_rng(0)
    for form in ("PNG", "JPEG", "GIF", "TIFF", "WEBP"):
        data = encoded(noise(), form)
        for _ in range(30):
            broken = bytearray(data)
            for place in random.integers(0, len(data), 6):
                broken[place] = random.integers(0, 256)
            try:
                open_image(bytes(broken))
            except InputError as error:
                assert "\n" not in str(error)  # some damage leaves a legal picture


@pytest.mark.parametrize("side", [10000, 20000])  # PIL warns of the one and refuses the other
def test_a_bomb_is_refused_and_not_decoded(side, tmp_path, monkeypatch):
    path = tmp_path / "bomb.png"
    PIL.Image.new("1", (side, side)).save(path)
    limit = PIL.Image.MAX_IMAGE_PIXELS
    filters = list(warnings.filters)
    monkeypatch.setattr(PIL.Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    assert "bomb" in (message := refusal(path))
    assert "bomb.png" in message
    assert limit == PIL.Image.MAX_IMAGE_PIXELS
    assert filters == warnings.filters


def test_a_bomb_hidden_in_the_second_header_is_refused(monkeypatch):
    # An icon names its inner picture's size twice, and the first may lie.
    data = encoded(PIL.Image.new("RGB", (64, 64)), "ICO", sizes=[(64, 64)])
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
    assert "bomb" in refusal(data)


def test_no_pixels():
    assert "no pixels" in refusal(PIL.Image.new("RGB", (0, 5)))


def test_needs_neither_torch_nor_transformers():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
        "import vlkv.processing.processor as p; print(p.Processor.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Processor"
