"""Jitted forms of `read_prompt`, `fill_cache` and `prefill`, for code that calls them from Python."""

from __future__ import annotations

import jax

from vlkv import reading
from vlkv.prefill import fill_cache_with as _fill_cache_with
from vlkv.prefill import prefill as _prefill

read_prompt = jax.jit(reading.read_prompt)
fill_cache_with = jax.jit(_fill_cache_with, static_argnames="new_tokens")
prefill = jax.jit(_prefill, static_argnames="new_tokens")
