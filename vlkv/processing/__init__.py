"""Converts images and questions to `Inputs`. Host code with numpy, PIL, tokenizers and jinja2."""

from vlkv.processing.pictures import Video
from vlkv.processing.processor import Processor
from vlkv.processing.videos import read_video

__all__ = ["Processor", "Video", "read_video"]
