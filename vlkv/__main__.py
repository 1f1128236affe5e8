"""`python -m vlkv`: the same as `vlkv`."""

from vlkv.cli import script

script()
