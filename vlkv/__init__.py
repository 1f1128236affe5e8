"""Large vision-language models in JAX with a compressed key-value cache."""

from vlkv.errors import InputError
from vlkv.generate import forward
from vlkv.inputs import Buckets, Inputs
from vlkv.loading import load, load_params, load_processor

__all__ = ["Buckets", "InputError", "Inputs", "forward", "load", "load_params", "load_processor"]
