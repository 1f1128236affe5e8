"""Converts images and questions to `Inputs`. Host code with numpy, PIL, tokenizers and jinja2."""

from vlkv.processing.pictures import Video, read_video, stream_video
from vlkv.processing.processor import Processor

__all__ = ["Processor", "Video", "read_video", "stream_video"]
