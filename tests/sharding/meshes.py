"""The processes that test_sharding.py starts: the same work on one device and on meshes of several devices.

`python -m tests.sharding.meshes compare CASE ...`, `tpu` and `process I PORT` (one of two hosts) each print one line of
JSON.
"""

import contextlib
import dataclasses
import json
import math
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import vlkv
from tests.families.tiny import QUICK
from tests.mechanisms import IN_BITS
from tests.models import CONFIG, IMAGE_TOKEN, SMALL, Uneven, padded
from vlkv import policies, sharding
from vlkv.cache.packing import align
from vlkv.cache.resizing import resize
from vlkv.families.text import TextConfig

NEW = 6
POLICIES = {
    "Full": policies.Full(),
    "H2O": policies.H2O(keep=0.3),
    "AVL": policies.AVL(keep=0.5, refresh=2),
    "AVL window": policies.AVL(keep=0.5, refresh=2, text=0.5),
    "FastV": policies.FastV(keep=0.5, layer=1),
    "AirCache": policies.AirCache(keep=0.3),
    "KIVI": policies.KIVI(bits=4, group=8),
    "TurboQuant": policies.TurboQuant(bits=3, tail=True),
    **IN_BITS,
    "KVzip": policies.KVzip(keep=0.3, instruction=(7, 8)),
    "Random": policies.Random(keep=0.3),
    "again": policies.compose(policies.AdaKV(budget=12, window=2), every=4),
    "Uneven": policies.compose(policies.H2O(keep=0.3), allocate=Uneven),  # one column, so slots are split
}
TURNS = ("Full", "KIVI")  # policies that are tested with a second turn
# The model has 2 key heads: `model` splits the heads up to 2 devices, and also the slots beyond.
CASES = {
    "data": ((4, 1), ("FastV",)),
    "heads": ((2, 2), ("H2O", "KIVI", *IN_BITS, "Uneven", "again")),
    "slots": ((2, 4), ("Full", "H2O", "AVL", "AVL window", "AirCache", "again")),
    "more slots": ((1, 8), ("Random", "AirCache", "TurboQuant", "KVzip")),  # fewer queries of a key head than devices
    "not set": ((2, 2), ("Random",)),  # without jax.set_mesh
}
ONE = {"kept": 1, "longest": 1, "layers": 1, "vision": 0, "text": 1, "new_tokens": 1}


def parameters() -> vlkv.families.Model:
    """Random weights, large enough that attention is far from uniform."""
    leaves, structure = jax.tree.flatten(vlkv.families.abstract(SMALL))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(structure, [rng.normal(size=x.shape).astype(np.float32) * 0.3 for x in leaves])


def placed(params: vlkv.families.Model, mesh: jax.sharding.Mesh) -> vlkv.families.Model:
    """The parameters placed on a mesh as `load_params` does."""
    return jax.tree_util.tree_map_with_path(lambda path, x: sharding.place(sharding.path_name(path), x, mesh), params)


def first_turn() -> list[list[int]]:
    """Rows with two, one, no and one image."""
    rng = np.random.default_rng(0)
    image = [IMAGE_TOKEN] * 25
    return [
        [1, *rng.integers(6, 50, 5).tolist(), *image, 8, *image, *rng.integers(6, 50, 7).tolist()],
        [1, *rng.integers(6, 50, 3).tolist(), *image, *rng.integers(6, 50, 14).tolist()],
        [1, *rng.integers(6, 50, 11).tolist()],
        [1, *image, *rng.integers(6, 50, 9).tolist()],
    ]


def second_turn() -> list[list[int]]:
    """Rows of text with unequal lengths."""
    rng = np.random.default_rng(1)
    return [rng.integers(6, 50, n).tolist() for n in (5, 3, 4, 5)]


def batch(rows: list[list[int]], pictures: bool = True) -> vlkv.Inputs:
    """Rows padded on the right, with or without the first turn's images."""
    found = padded(rows)
    if pictures:
        found["pixel_values"] = np.random.default_rng(2).normal(size=(4, 3, 20, 20)).astype(np.float32)
    return vlkv.Inputs.from_hf(found, SMALL)


# Compiling takes almost all of the time.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, **QUICK}


@partial(jax.jit, compiler_options=OPTIONS)
def answer(params, inputs, policy, key, more=None):
    """Logits [S, B, vocab] and tokens [B, S] of a greedy decode, after a second turn if `more` is given.

    The tail is enlarged after prefill. On a mesh `resize` gets the smallest number that it rounds up to enough slots,
    so that the test needs every slot.
    """
    updater = policies.slots_of(policy).step
    evicts = updater is not None and updater.decode_bounds(**ONE) is not None
    added = NEW + (0 if more is None else more.tokens.shape[1])
    cache, first = vlkv.prefill(params, inputs, policy, new_tokens=added if evicts else 1, key=key)
    logits = first
    if not cache.reuses:
        cache = resize(cache, max(align(added, cache.parts) - cache.parts + 1, cache.new_tokens))
    if more is not None:
        cache, logits = vlkv.extend(params, cache, more)

    def step(state, _):
        cache, logits = state
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return vlkv.decode_step(params, cache, token), (logits, token)

    (_, last), (seen, tokens) = jax.lax.scan(step, (cache, logits), length=NEW)
    return jnp.concatenate([first[None], seen, last[None]]), tokens.T


def collectives(text: str) -> list[tuple[str, int]]:
    """Kind and number of elements of every collective operation of a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", text)
    sizes = [[math.prod(map(int, filter(None, s.split(",")))) for s in re.findall(r"\w+\[([\d,]*)\]", shape)]
             for shape, _ in found]  # fmt: skip
    return [(kind, sum(size)) for (_, kind), size in zip(found, sizes, strict=True)]


def step_program(split, inputs, policy, mesh) -> dict:
    """The collectives of a compiled decode step, and the elements of one device's part of the pool."""
    with jax.set_mesh(mesh):
        prefill = partial(vlkv.prefill, policy=policy, new_tokens=NEW)
        held = sharding.place_cache(jax.eval_shape(prefill, split, inputs)[0], mesh)
        token = sharding.place_inputs(jax.ShapeDtypeStruct((4,), jnp.int32), mesh)
        program = jax.jit(vlkv.decode_step, donate_argnames="cache").lower(split, held, token).compile()
    return {"collectives": collectives(program.as_text()), "pool": held.k.size // mesh.size}


def compare(*wanted: str) -> None:
    """Prints differences of logits, tokens, and the collectives of a decode step, for the given cases.

    Args:
        wanted: "MESH: POLICY" of CASES, or "MESH: step" for the program of a decode step.
    """
    params, inputs, key = parameters(), batch(first_turn()), jax.random.key(3)
    turns = {name: batch(second_turn(), pictures=False) for name in TURNS}
    expected, found = {}, {}
    for name, (shape, names) in CASES.items():
        mesh = sharding.make_mesh(data=shape[0], model=shape[1], devices=jax.devices()[: shape[0] * shape[1]])
        split, given = placed(params, mesh), sharding.place_inputs(inputs, mesh)
        for policy in (policy for policy in names if f"{name}: {policy}" in wanted):
            more = turns.get(policy)
            if policy not in expected:
                expected[policy] = jax.device_get(answer(params, inputs, POLICIES[policy], key, more))
            with contextlib.nullcontext() if name == "not set" else jax.set_mesh(mesh):
                logits, tokens = sharding.gather(
                    answer(split, given, POLICIES[policy], key, sharding.place_inputs(more, mesh))
                )
            off = np.abs(logits - expected[policy][0]).max()
            found[f"{name}: {policy}"] = {
                "off": float(off), "tokens": tokens.tolist(), "expected": expected[policy][1].tolist()
            }  # fmt: skip
        if f"{name}: step" in wanted:
            found[f"{name}: step"] = step_program(split, given, POLICIES["Full"], mesh)
    print(json.dumps(found))


def process(number: str, port: str) -> None:
    """One of two hosts with two devices each; the `model` axis has all four, so the slots of the cache are in parts."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(number))
    mesh = sharding.make_mesh(data=1, model=4)
    params, inputs = placed(parameters(), mesh), sharding.place_inputs(batch(first_turn()), mesh)
    with jax.set_mesh(mesh):
        made = sharding.gather(answer(params, inputs, POLICIES["Random"], jax.random.key(3)))
    print(json.dumps(made[1].tolist()))


def compile_for_tpu() -> None:
    """Prints kernels and largest collectives of prefill and a decode step, compiled for eight absent TPU chips."""
    from jax.experimental import topologies

    decoder = dataclasses.replace(CONFIG.decoder, width=512, heads=8, head_dim=128, layers=1, max_positions=4096)
    config = TextConfig(family="qwen2", decoder=decoder, stop=CONFIG.stop)
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    rows = np.ones((4, 1024), np.int32)
    plain = vlkv.Inputs.from_hf({"input_ids": 6 * rows, "attention_mask": rows}, config)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plain)
    prefill = partial(vlkv.prefill, policy=policies.SnapKV(keep=0.5), new_tokens=32)
    found = {}
    for name, sizes in {"heads": (4, 2), "slots": (2, 4)}.items():
        mesh = sharding.make_mesh(data=sizes[0], model=sizes[1], devices=devices)
        inputs, params = sharding.place_inputs(shapes, mesh), vlkv.families.abstract(config, jnp.bfloat16, mesh)
        with jax.set_mesh(mesh):
            cache, _ = jax.eval_shape(prefill, params, inputs)
            placed = sharding.place_cache(cache, mesh)
            token = sharding.place_inputs(jax.ShapeDtypeStruct((4,), jnp.int32), mesh)
            first = jax.jit(prefill).lower(params, inputs).compile()
            step = jax.jit(vlkv.decode_step, donate_argnames="cache").lower(params, placed, token).compile()
        made = first.output_shardings[0]
        found[name] = {
            "parts": cache.parts,
            "kernels": [p.as_text().count('custom_call_target="tpu_custom_call"') for p in (first, step)],
            "largest": max(elements for _, elements in collectives(step.as_text())),
            "pool": cache.k.size // 8,
            "same place": all(a.sharding.is_equivalent_to(b, len(a.shape)) for a, b in
                              zip(jax.tree.leaves((placed.k, placed.tail_k)), jax.tree.leaves((made.k, made.tail_k)),
                                  strict=True)),
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    {"compare": compare, "process": process, "tpu": compile_for_tpu}[sys.argv[1]](*sys.argv[2:])
