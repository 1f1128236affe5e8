"""Large vision-language models in JAX with a compressed key-value cache."""

from vlkv import cache, policies, sampling
from vlkv.cache import PackedCache
from vlkv.errors import InputError
from vlkv.generate import Output, decode_step, forward, generate, prefill, score, stream
from vlkv.inputs import Buckets, Inputs
from vlkv.loading import load, load_params, load_processor
from vlkv.models import init
from vlkv.sampling import Greedy, Sample

__all__ = [
    "Buckets", "Greedy", "InputError", "Inputs", "Output", "PackedCache", "Sample", "cache", "decode_step", "forward",
    "generate", "init", "load", "load_params", "load_processor", "policies", "prefill", "sampling", "score", "stream",
]  # fmt: skip
