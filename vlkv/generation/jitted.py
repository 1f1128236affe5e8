"""Jitted forms of the functions that read prompts and decode, for code that calls them from Python."""

from __future__ import annotations

import jax

from vlkv.compression.reselecting import recompress as _recompress
from vlkv.generation.begin import begin as _begin
from vlkv.generation.decode import decode as _decode
from vlkv.generation.decode import decode_step as _decode_step
from vlkv.generation.extend import extend as _extend
from vlkv.generation.prefill import fill_cache_with as _fill_cache_with
from vlkv.generation.prefill import prefill as _prefill
from vlkv.generation.prompt import read_prompt

read_prompt = jax.jit(read_prompt)
fill_cache_with = jax.jit(_fill_cache_with, static_argnames="new_tokens")
prefill = jax.jit(_prefill, static_argnames="new_tokens")
begin = jax.jit(_begin, static_argnames="new_tokens")
decode = jax.jit(_decode, static_argnames="sampling")
decode_step = jax.jit(_decode_step)
extend = jax.jit(_extend)
recompress = jax.jit(_recompress)
