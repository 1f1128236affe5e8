"""Compiles decode steps of models of many shapes, and looks for copies of the cache in the compiled programs.

`python -m tests.pool_copies tpu CASE ...` compiles for absent v5e chips, `python -m tests.pool_copies cpu CASE ...` for
this CPU. A case such as `H2O 4 7 128 8` names a policy, the key heads of a chip, the query heads of each, the head dim,
and the number of chips that share the slots. It prints one line of JSON: for each case the bytes of keys in the pool
and of the program's temporary arrays, on one chip, and the copies of large arrays.
"""

import dataclasses
import json
import math
import re
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vlkv
from pallas_kernels import Kernels
from tests.models import CONFIG, Uneven
from vlkv import policies, sharding
from vlkv.families.text import TextConfig

LAYERS, ROWS, NEW, POOL_BYTES = 2, 2, 150, 2**26
POLICIES = {
    "SnapKV": policies.SnapKV(keep=0.5),
    "H2O": policies.H2O(keep=0.5),
    "AVL": policies.AVL(keep=0.5, core=0.1),  # exchanges slots
    "Uneven": policies.compose(policies.H2O(keep=0.5), allocate=Uneven),  # one column
}
TOPOLOGIES = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}  # with at least so many chips


def step(policy: policies.Policy, kv_heads: int, group: int, head_dim: int, mesh: Any, dtype: Any) -> tuple[Any, int]:
    """The compiled decode step, and the bytes of keys in the pool, which are about POOL_BYTES."""
    prompt = POOL_BYTES // (kv_heads * head_dim * LAYERS * ROWS * jnp.dtype(dtype).itemsize) * 2 // 16 * 16
    decoder = dataclasses.replace(
        CONFIG.decoder, layers=LAYERS, width=256, heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim,
        max_positions=2 * prompt,
    )  # fmt: skip
    config = TextConfig(family="qwen2", decoder=decoder, stop=CONFIG.stop)
    ids = np.ones((ROWS, prompt), np.int32)
    plain = vlkv.Inputs.from_hf({"input_ids": 6 * ids, "attention_mask": ids}, config)
    inputs = sharding.place_inputs(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plain), mesh)
    params = vlkv.families.abstract(config, dtype, mesh)
    with jax.set_mesh(mesh):
        # Only shapes are needed, which plain XLA gives soonest: tracing the TPU kernel of prefill takes seconds here.
        prefill = partial(vlkv.prefill, policy=policy, new_tokens=NEW, kernels=Kernels(prefill_attention="xla"))
        made, _ = jax.eval_shape(prefill, params, inputs)
        cache = dataclasses.replace(sharding.place_cache(made, mesh), kernels=Kernels())
        token = sharding.place_inputs(jax.ShapeDtypeStruct((ROWS,), jnp.int32), mesh)
        program = jax.jit(vlkv.decode_step, donate_argnames="cache").lower(params, cache, token).compile()
    return program, cache.k.size * cache.k.dtype.itemsize


def large_copies(program: str, dtype: str, least: int) -> list[str]:
    """Copies and transposes of arrays of this dtype with at least `least` elements."""
    found = re.findall(rf"= \(?{dtype}\[([\d,]*)\]\S* (copy|transpose|copy-start)\(", program)
    sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape, _ in found]
    return [f"{operation} of [{shape}]" for (shape, operation), size in zip(found, sizes, strict=True) if size >= least]


def main(platform: str, *cases: str) -> None:
    """Prints what the module says."""
    found = {}
    for case in cases:
        name, *numbers = case.split()
        kv_heads, group, head_dim, parts = map(int, numbers)
        if platform == "tpu":
            from jax.experimental import topologies

            described = topologies.get_topology_desc(platform="tpu", topology_name=f"v5e:{TOPOLOGIES[parts]}")
            devices = described.devices[:parts]
        else:
            devices = jax.devices()[:parts]
        mesh = sharding.make_mesh(data=1, model=parts, devices=devices)
        dtype = jnp.dtype(jnp.bfloat16 if platform == "tpu" else jnp.float32)
        program, size = step(POLICIES[name], kv_heads, group, head_dim, mesh, dtype)
        spelling, least = "bf16" if platform == "tpu" else "f32", size // parts // dtype.itemsize // 8
        found[case] = {
            "pool": size // parts, "temporary": program.memory_analysis().temp_size_in_bytes,
            "copies": large_copies(program.as_text(), spelling, least),
        }  # fmt: skip
        print(case, found[case], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
