"""Large vision-language models in JAX with a compressed key-value cache."""

from vlkv import cache, policies, sampling
from vlkv.buckets import Buckets
from vlkv.cache import PackedCache
from vlkv.errors import InputError
from vlkv.extend import extend
from vlkv.generate import Output, decode, decode_step, forward, generate, log_probabilities, score, stream
from vlkv.inputs import Inputs
from vlkv.loading import load, load_params, load_processor
from vlkv.models import init
from vlkv.prefill import fill_cache, prefill
from vlkv.presets import presets
from vlkv.reading import Prompt, read_prompt
from vlkv.sampling import Greedy, Sample
from vlkv.saving import load_cache, save_cache

__all__ = [
    "Buckets",
    "Greedy",
    "InputError",
    "Inputs",
    "Output",
    "PackedCache",
    "Prompt",
    "Sample",
    "cache",
    "decode",
    "decode_step",
    "extend",
    "fill_cache",
    "forward",
    "generate",
    "init",
    "load",
    "load_cache",
    "load_params",
    "load_processor",
    "log_probabilities",
    "policies",
    "prefill",
    "presets",
    "read_prompt",
    "sampling",
    "save_cache",
    "score",
    "stream",
]
