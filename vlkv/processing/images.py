"""Opens an image: returns it upright and in RGB, or raises an error of one line.

The reference is `transformers.image_utils.load_image` for a file: the EXIF rotation is applied, then PIL converts to
RGB. So alpha is dropped, not blended. A path, the bytes of the file and the opened `PIL.Image` give the same pixels
here. In transformers they may differ, because its processors do not rotate a `PIL.Image`, and those of late 5.x
versions blend alpha onto white.

One difference: 16-bit grey is scaled to 8 bits, as PIL scales 16-bit colour; transformers clips it at 255, which makes
most such pictures white. 32-bit and float pictures have no fixed range. They are clipped as in transformers, with a
warning if that changes them.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import urllib.parse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import PIL.Image
import PIL.ImageOps

from vlkv.errors import InputError
from vlkv.files import one_line

Picture: TypeAlias = str | os.PathLike[str] | bytes | PIL.Image.Image | np.ndarray


def open_image(picture: Picture) -> PIL.Image.Image:
    """Returns the image upright and in RGB; of an animation, the first frame. A given PIL image is not changed.

    `picture` is a path, the bytes of an image file, a PIL image, an array uint8 [height, width, 3] (grey: [height,
    width]), or an image file in base64, as a data URI or as bare text. Raises InputError for what is missing, a folder,
    not an image, truncated, without pixels, or has more than `PIL.Image.MAX_IMAGE_PIXELS` pixels (such a file is not
    decoded).
    """
    if isinstance(picture, PIL.Image.Image):
        return _decode(picture, "the given PIL image")
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or not (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (3, 4))):
            raise InputError(
                f"an image given as an array must be uint8 [height, width, 3], not {picture.dtype} "
                f"{list(picture.shape)}; several images are a list of arrays"
            )
        if not picture.size:
            raise InputError(f"the given array of shape {list(picture.shape)} has no pixels")
        return _decode(PIL.Image.fromarray(picture), "the given array")
    if isinstance(picture, bytes):
        return _open(io.BytesIO(picture), f"the given {len(picture)} bytes")
    if not isinstance(picture, str | os.PathLike):
        raise InputError(f"an image must be a path, bytes, a PIL.Image or a numpy array, not {type(picture).__name__}")
    if isinstance(picture, str) and _is_data_uri(picture):
        return _from_data_uri(picture)
    return _from_path(picture)


def is_embedded(text: str) -> bool:
    """Whether a text is not the path of an image, but the image: a data URI, or an image file in base64."""
    data = None if _is_data_uri(text) else _from_base64(text)
    return _is_data_uri(text) or (data is not None and _identify(io.BytesIO(data), "the base64 text") is not None)


def _is_data_uri(text: str) -> bool:
    return text[:5].lower() == "data:"


def _from_path(picture: str | os.PathLike[str]) -> PIL.Image.Image:
    name = repr(os.fspath(picture))
    try:
        path = Path(picture).expanduser()
        if not os.path.exists(path):  # Path.exists raises an error for a name that is too long, such as base64
            data = _from_base64(picture) if isinstance(picture, str) else None
            image = _identify(io.BytesIO(data), "the base64 text") if data else None
            if image is not None:
                return _decode(image, "the base64 text")
            remedy = "download it first" if "://" in name else "check the path"
            raise InputError(f"{name}: no such image file; {remedy}")
        if path.is_dir():
            raise InputError(f"{name}: a folder, not an image; name a file in it")
        if not path.is_file():  # a pipe or a device, which may never end
            raise InputError(f"{name}: not a regular file; save the image to a file")
        with path.open("rb") as file:
            return _open(file, name)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # no permission, NUL in the name, no home for ~
        raise InputError(f"{name}: cannot be read ({one_line(error)}); check the path") from None


# Given to PIL, because it would otherwise try all its readers, including Ghostscript for EPS. TGA is the last one,
# because its files begin with no signature.
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "ICO", "PPM", "JPEG2000", "AVIF", "TGA")


def check_area(width: int, height: int, name: str) -> None:
    """Raises InputError for more pixels than PIL.Image.MAX_IMAGE_PIXELS. The message starts with `name`."""
    limit = PIL.Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise InputError(
            f"{name}: {width} x {height} pixels, above the limit of {limit} (a decompression bomb?); "
            "scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        )


def _from_data_uri(uri: str) -> PIL.Image.Image:
    header, _, content = uri.partition(",")
    data = _from_base64(urllib.parse.unquote(content)) if header.lower().endswith(";base64") else None
    if data is None:
        raise InputError(f"{uri!r}: not a data URI in base64; give data:image/png;base64,... or the file's bytes")
    return _open(io.BytesIO(data), "the data URI")


def _from_base64(text: str) -> bytes | None:
    """The bytes of base64 text, which may contain white space; None if it is not base64."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        return None


def _open(file: io.BytesIO | io.BufferedReader, name: str) -> PIL.Image.Image:
    image = _identify(file, name)
    if image is None:
        size = file.seek(0, io.SEEK_END)
        what = "not an image, or a damaged one" if size else "an empty file"
        raise InputError(f"{name}: {what}; give a PNG, JPEG, WebP, TIFF, BMP, GIF or AVIF file")
    return _decode(image, name)


def _identify(file: io.BytesIO | io.BufferedReader, name: str) -> PIL.Image.Image | None:
    """The image, not decoded yet; None if it has none of the formats, or a damaged header."""
    PIL.Image.init()
    formats = [form for form in FORMATS if form in PIL.Image.OPEN]  # older versions of PIL do not read AVIF
    try:
        with _reading(name):
            return PIL.Image.open(file, formats=formats)
    except InputError:
        raise
    except Exception:  # PIL's readers raise many kinds of errors for a damaged file
        return None


def _decode(image: PIL.Image.Image, name: str) -> PIL.Image.Image:
    if 0 in image.size:
        raise InputError(f"{name}: the image has no pixels ({image.width} x {image.height})")
    check_area(image.width, image.height, name)
    try:
        with _reading(name):  # checks again, because a container such as ICO shows the size of its image only now
            image.load()
            rgb, clipped = _to_rgb(PIL.ImageOps.exif_transpose(image), deep=image.format == "PPM")
    except InputError:
        raise
    except Exception as error:  # PIL's decoders raise OSError, SyntaxError, EOFError...
        raise InputError(
            f"{name}: the image is truncated or damaged ({one_line(error)}); copy or export it again"
        ) from None

    if clipped:
        warnings.warn(f"{name}: {clipped}", stacklevel=2)
    return rgb


def _to_rgb(image: PIL.Image.Image, *, deep: bool) -> tuple[PIL.Image.Image, str]:
    """The image in RGB, and a warning about the range of its values, or "". `deep`: mode I is 16-bit grey."""
    if image.mode.startswith("I;16") or (image.mode == "I" and deep):
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB"), ""
    problem = ""
    if image.mode in ("I", "F"):
        low, high = map(float, image.getextrema())  # type: ignore[arg-type]  # these modes have one channel
        if not (low >= 0 and high <= 255) or (image.mode == "F" and 0 < high <= 1):
            problem = f"values from {low:g} to {high:g} are clipped and rounded to 0..255; scale them to 8 bits first"
    return image.convert("RGB"), problem


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turns PIL's warning about a decompression bomb into InputError, and hides other warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Up to twice its limit PIL warns, beyond that it raises an error.
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            yield
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        raise InputError(
            f"{name}: {one_line(error).rstrip('.')}; scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        ) from None
