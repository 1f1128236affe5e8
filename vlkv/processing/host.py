"""The base class of all families' configs, which convert pictures and prompts to arrays on the host."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from typing_extensions import override

from vlkv.buckets import Buckets
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens, count_up
from vlkv.processing.pictures import Pictures
from vlkv.processing.pixels import Layout
from vlkv.processing.templates import ChatTemplate


class HostConfig(ModelConfig):
    """Config of a model without a tower, with the methods that other families override."""

    # The documented format of the family's prompts as a chat template, for folders without one. None: it has several.
    prompt_format: ClassVar[str | None] = None

    def open_pictures(self, folder: Path, layout: Layout) -> Pictures | None:
        """The converter from pictures to arrays, with a checkpoint folder's settings; None for a model without a tower.

        Raises:
            InputError: settings in the folder, or the layout, are not supported.
        """
        return None

    def template(self, folder: Path) -> ChatTemplate | None:
        """The chat template of a checkpoint folder, else the family's `prompt_format`.

        None: a text model without a template, whose prompts are plain text.

        Raises:
            InputError: the folder has no template, and the family's format depends on the checkpoint.
        """
        found = ChatTemplate.from_folder(folder)
        if found is not None or self.vision is None:
            return found
        if self.prompt_format is None:
            raise InputError(f"{folder}: no chat template, and the format of {self.family} depends on the checkpoint; "
                             "copy chat_template.jinja or chat_template.json from its source")  # fmt: skip
        return ChatTemplate.from_text(self.prompt_format, f"the prompt format of {self.family}")

    @override
    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        if batch.get("pixel_values") is not None:
            raise InputError("the model has no vision tower and cannot be given pixel_values")
        none = np.full((*tokens.shape, 3), -1, np.int32)
        return Arranged(vision_index=none[..., 0], grid=none, positions=count_up(valid))

    def check_layout(self, layout: Layout, *supported: Layout) -> None:
        """Raises InputError for a layout that is neither that of the checkpoint nor one of `supported`."""
        if layout not in ("checkpoint", *supported):
            raise InputError(f"layout={layout!r} is not supported for {self.family}; leave it out")
