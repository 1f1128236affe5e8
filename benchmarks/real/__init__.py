"""Published checkpoints that can be installed as packages, and measurements on them."""

from checkpoints_convert import packaged as folders

__all__ = ["folders"]
