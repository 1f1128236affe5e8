"""Open a picture that may be anything at all: it comes back upright and in RGB, or it is refused in one line.

What `transformers.image_utils.load_image` makes of a file is the reference: the EXIF rotation is applied,
then PIL converts to RGB. So alpha is dropped, not blended, and 16-bit grey is clipped at 255. A path, the
file's bytes and the opened `PIL.Image` of one picture all give the same pixels here; in transformers they may
not, because its processors skip the rotation for a `PIL.Image`, and late 5.x ones blend its alpha onto white.
"""

from __future__ import annotations

import contextlib
import io
import os
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
    """The picture in RGB, upright; the first frame of an animation. An image passed in stays as it was.

    Args:
        picture: a path, the bytes of an image file, a `PIL.Image.Image`, or an array uint8 [height, width, 3] (grey:
            [height, width]).

    Raises:
        InputError: missing, a folder, not an image, truncated, without pixels, or with more of them than
            `PIL.Image.MAX_IMAGE_PIXELS` (such a file is never decoded).
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
            raise InputError(f"the given array has no pixels {list(picture.shape)}; give another")
        return _decode(PIL.Image.fromarray(picture), "the given array")
    if isinstance(picture, bytes):
        return _open(io.BytesIO(picture), f"the given {len(picture)} bytes")
    if not isinstance(picture, str | os.PathLike):
        raise InputError(f"an image must be a path, bytes, a PIL.Image or a numpy array, not {type(picture).__name__}")
    name = repr(os.fspath(picture))
    try:
        path = Path(picture).expanduser()
        if path.is_dir():
            raise InputError(f"{name}: a folder, not an image; name a file in it")
        if not path.exists():
            remedy = "download it first" if "://" in name else "check the path"
            raise InputError(f"{name}: no such image file; {remedy}")
        if not path.is_file():  # reading a pipe or a device might never end
            raise InputError(f"{name}: not a regular file; save the image to one")
        with path.open("rb") as file:
            return _open(file, name)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # no permission, NUL in the name, no home for ~
        raise InputError(f"{name}: cannot be read ({one_line(error)}); check the path") from None


# Named, because PIL would try every reader it has, Ghostscript for EPS among them.
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "ICO", "PPM")


def check_area(width: int, height: int, name: str) -> None:
    """Refuses more pixels than PIL's own limit, which a user may raise or lift (None) as PIL documents.

    Raises:
        InputError: too many pixels; the message starts with `name`.
    """
    limit = PIL.Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise InputError(
            f"{name}: {width} x {height} pixels, above the limit of {limit} (a decompression bomb?); "
            "scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        )


def _open(file: io.BytesIO | io.BufferedReader, name: str) -> PIL.Image.Image:
    try:
        with _reading(name):
            image = PIL.Image.open(file, formats=FORMATS)
    except InputError:
        raise
    except Exception:  # PIL's readers raise almost anything on a file that is not what its first bytes say
        size = file.seek(0, io.SEEK_END)
        what = "not an image, or a damaged one" if size else "an empty file"
        raise InputError(f"{name}: {what}; give a PNG, JPEG, WebP, TIFF, BMP or GIF file") from None
    return _decode(image, name)


def _decode(image: PIL.Image.Image, name: str) -> PIL.Image.Image:
    if 0 in image.size:
        raise InputError(f"{name}: the image has no pixels ({image.width} x {image.height}); give another")
    check_area(image.width, image.height, name)
    try:
        with _reading(name):  # again: some containers (ICO) hold an inner image, whose size shows only now
            image.load()
            return PIL.ImageOps.exif_transpose(image).convert("RGB")
    except InputError:
        raise
    except Exception as error:  # PIL's decoders raise OSError, SyntaxError, EOFError...
        raise InputError(
            f"{name}: the image is truncated or damaged ({one_line(error)}); copy or export it again"
        ) from None


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turns PIL's alarm about a bomb into ours; lesser warnings would be further lines on the terminal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Between once and twice its limit PIL only warns, beyond that it raises.
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            yield
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        raise InputError(
            f"{name}: {one_line(error).rstrip('.')}; scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        ) from None
