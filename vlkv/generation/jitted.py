"""Jitted forms of the functions that read prompts and decode, for code that calls them from Python."""

from __future__ import annotations

from functools import partial

import jax

from vlkv.compression.reselecting import recompress as _recompress
from vlkv.generation.begin import begin as _begin
from vlkv.generation.decode import decode as _decode
from vlkv.generation.decode import decode_step as _decode_step
from vlkv.generation.extend import extend as _extend
from vlkv.generation.prefill import fill_cache_with as _fill_cache_with
from vlkv.generation.prefill import prefill as _prefill
from vlkv.generation.prompt import read_prompt

# XLA compiles for a CPU in three quarters of the time, and programs are as fast (docs/speed.md). Other platforms
# ignore this option.
_jit = partial(jax.jit, compiler_options={"xla_cpu_opt_preset": "CPU_OPT_PRESET_FAST_COMPILE"})

read_prompt = _jit(read_prompt)
fill_cache_with = _jit(_fill_cache_with, static_argnames="new_tokens")
prefill = _jit(_prefill, static_argnames="new_tokens")
begin = _jit(_begin)
decode = _jit(_decode, static_argnames="sampling")
decode_step = _jit(_decode_step)
extend = _jit(_extend)
recompress = _jit(_recompress)
