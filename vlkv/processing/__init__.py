"""From a picture and a question to `Inputs`, on the host: numpy, PIL, tokenizers and jinja2."""

from vlkv.processing.pictures import Video
from vlkv.processing.processor import Processor

__all__ = ["Processor", "Video"]
