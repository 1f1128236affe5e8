"""The jitted functions that tests share, so that a worker compiles equal programs once.

A test that needs another form (donated arguments, other static arguments) makes its own and says why.
"""

import jax

import vlkv
from vlkv import policies
from vlkv.generation.prefill import fill_cache_with

generate = jax.jit(vlkv.generate)
forward = jax.jit(vlkv.forward)
score = jax.jit(vlkv.score)
read_prompt = jax.jit(vlkv.read_prompt)
fill_cache = jax.jit(vlkv.fill_cache, static_argnames="new_tokens")
fill_cache_with = jax.jit(fill_cache_with, static_argnames="new_tokens")
prefill = jax.jit(vlkv.prefill, static_argnames="new_tokens")
decode = jax.jit(vlkv.decode)
decode_step = jax.jit(vlkv.decode_step)
extend = jax.jit(vlkv.extend)
select = jax.jit(policies.select, static_argnames="policy")
compress = jax.jit(policies.compress, static_argnames="policy")
