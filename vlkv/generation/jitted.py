"""Jitted forms of `read_prompt`, `fill_cache`, `prefill` and `begin`, for code that calls them from Python."""

from __future__ import annotations

import jax

from vlkv.generation.begin import begin as _begin
from vlkv.generation.prefill import fill_cache_with as _fill_cache_with
from vlkv.generation.prefill import prefill as _prefill
from vlkv.generation.prompt import read_prompt

read_prompt = jax.jit(read_prompt)
fill_cache_with = jax.jit(_fill_cache_with, static_argnames="new_tokens")
prefill = jax.jit(_prefill, static_argnames="new_tokens")
begin = jax.jit(_begin, static_argnames="new_tokens")
