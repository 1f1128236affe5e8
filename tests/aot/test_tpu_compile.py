"""Every TPU kernel through the real TPU compiler, within VMEM, for hardware that is not there.

A mesh of the topology's first device is set and no implementation named: None must pick the kernel by itself, which
the compiled text shows. Shapes are those of 7B and 26B models.
"""

import os

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # beside another test process
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # asks no cloud what machine this is

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from pallas_kernels import attention_mass, attention_mass_rows, core_attention, decode_attention, prefill_attention
from pallas_kernels.decode_attention import mosaic_tpu as decode_kernel

pytest.importorskip("libtpu")  # a wheel for Linux only

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LLAVA_7B = {"heads": 32, "kv_heads": 32}
QWEN2_7B = {"heads": 28, "kv_heads": 4}
INTERN_26B = {"heads": 48, "kv_heads": 8}
BATCH, PROMPT, ROWS = 4, 8192, 64


@functools.cache
def mesh(generation):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices
    return jax.sharding.Mesh(np.array(devices[:1]), ("x",))


def compile_for(generation, function, *shapes):
    """The compiled program; shapes are (shape, dtype)."""
    everywhere = jax.sharding.NamedSharding(mesh(generation), jax.sharding.PartitionSpec())
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in shapes]
    with jax.set_mesh(mesh(generation)):
        return jax.jit(function).lower(*args).compile()


def kernels(program):
    return program.as_text().count('custom_call_target="tpu_custom_call"')


def pools(heads, kv_heads, slots, head_dim=128, dtype=jnp.bfloat16):
    """Of decode attention: q, k, v, start, length."""
    pool, segment = ((BATCH, kv_heads, slots, head_dim), dtype), ((BATCH, kv_heads), jnp.int32)
    return ((BATCH, heads, head_dim), dtype), pool, pool, segment, segment


def prompt(heads, kv_heads, rows):
    """Of the masses: q, k, weights of rows or keys, key mask."""
    q, k = (((n, length, 128), jnp.bfloat16) for n, length in ((heads, rows), (kv_heads, PROMPT)))
    return q, k, ((2, PROMPT), jnp.float32), ((PROMPT,), bool)


MODELS = {"7B": (LLAVA_7B, 8192), "Qwen2-7B": (QWEN2_7B, 16384), "26B": (INTERN_26B, 32768)}  # slots of the pool
CASES = [*((generation, "7B") for generation in TOPOLOGIES), *(("v5e", model) for model in ("Qwen2-7B", "26B"))]


@pytest.mark.full
@pytest.mark.parametrize(("generation", "model"), CASES)
def test_every_kernel(generation, model):
    model, slots = MODELS[model]
    *arrays, segment = pools(**model, slots=slots)
    memory = ((BATCH, model["kv_heads"], PROMPT), bool)
    core = ((BATCH, PROMPT // 2), jnp.int32), ((BATCH,), jnp.int32), segment

    def everything(q, k, v, start, length, memory, rows, count, text, prompt_q, prompt_k, weight, mask):
        decode = q, k, v, start, length
        return (
            decode_attention(*decode, max_length=PROMPT),
            decode_attention(*decode, max_length=PROMPT, valid=memory, return_mass=True),
            core_attention(*decode, rows, count, text, max_length=PROMPT),
            attention_mass(prompt_q, prompt_k, row_weight=weight, key_mask=mask),
            attention_mass_rows(prompt_q, prompt_k, key_weight=weight, key_mask=mask),
        )

    program = compile_for(generation, everything, *arrays, segment, memory, *core, *prompt(**model, rows=PROMPT))
    assert kernels(program) == 1 + 1 + 1 + 2 + 1
    pool = 2 * math.prod(arrays[1][0])
    assert program.memory_analysis().temp_size_in_bytes < pool / 2, "no copy of the keys"


@pytest.mark.default("v5e")
@pytest.mark.parametrize(
    ("generation", "model"), [("v4", LLAVA_7B), ("v5p", INTERN_26B), ("v5e", QWEN2_7B), ("v6e", LLAVA_7B)]
)
def test_prefill_attention(generation, model):
    shapes = [((2, PROMPT, model[name], 128), jnp.bfloat16) for name in ("heads", "kv_heads", "kv_heads")]

    def attend(q, k, v, valid):
        return prefill_attention(q, k, v, valid=valid)

    assert kernels(compile_for(generation, attend, *shapes, ((2, PROMPT), bool))) == 1


def test_two_cores_that_share_a_segment(monkeypatch):
    monkeypatch.setattr(decode_kernel, "cores", lambda: 2)  # as v4 and v5p say when their cores are joined
    assert kernels(compile_for("v5p", decode_attention, *pools(**QWEN2_7B, slots=8192))) == 1


def test_a_batch_of_prompts_is_one_kernel():
    q, k, weight, mask = (((2, *shape), dtype) for shape, dtype in prompt(**QWEN2_7B, rows=PROMPT))
    rows = jax.vmap(lambda q, k, weight, mask: attention_mass_rows(q, k, key_weight=weight, key_mask=mask))
    assert kernels(compile_for("v5e", rows, q, k, weight, mask)) == 1
