"""A mesh: virtual devices give the logits and tokens of one; weights are split, not copied, wherever they come from."""

import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vlkv
from tests.models import tiny_llava, unequal_batch
from tests.sharding.meshes import CASES
from vlkv import policies, sharding
from vlkv.cache import PackedCache
from vlkv.cache.parts import Part, slot_of, slot_parts, split
from vlkv.cache.pool import entries
from vlkv.cache.resizing import resize
from vlkv.compression.sizes import cache_spec

CODE = """
import tempfile
from pathlib import Path
import jax, numpy as np
from checkpoints_convert.__main__ import convert
import vlkv
from vlkv import sharding
from vlkv.mini import CHECKPOINT

mesh = sharding.make_mesh(data=2, model=2)
params = vlkv.load_params(CHECKPOINT, mesh=mesh)
layer = params.decoder.layers[0]
for split in (layer.query.weight, layer.key.weight, layer.gate.weight, layer.down.weight):
    array = split[...]
    shard = array.addressable_shards[0].data
    assert len(array.sharding.device_set) == 4 and 2 * shard.size == array.size, array.shape
assert layer.mlp_norm.weight[...].sharding.is_fully_replicated

with tempfile.TemporaryDirectory() as folder:
    convert(CHECKPOINT, Path(folder) / "orbax", format="orbax", progress=False)
    from_orbax = vlkv.load_params(Path(folder) / "orbax", mesh=mesh)
whole, drawn = (vlkv.init(params.config, jax.random.key(1), where) for where in (None, mesh))
for ours, a, b, c in zip(*map(jax.tree.leaves, (params, from_orbax, whole, drawn)), strict=True):
    assert a.sharding.is_equivalent_to(ours.sharding, a.ndim) and c.sharding.is_equivalent_to(ours.sharding, c.ndim)
    np.testing.assert_array_equal(ours, a)
    np.testing.assert_allclose(b, c, rtol=1e-6)
"""

# Sliding windows with images that attend in both directions; and recurrent layers, in which three value heads share
# each of two key heads, with gated attention.
KINDS = """
import dataclasses
import jax, numpy as np
import vlkv
from tests.models import CONFIG, random_model, unequal_batch
from tests.sharding.meshes import OPTIONS, placed
from vlkv import policies, sharding
from vlkv.config import RecurrentConfig

recurrent = RecurrentConfig(layers=(0, 2), key_heads=2, heads=6, key_dim=8, value_dim=8, taps=4)
h2o, sampling = policies.H2O(keep=0.3), vlkv.Greedy(max_new_tokens=8, stop=())
late = policies.compose(policies.SnapKV(keep=0.3, window=4), allocate=policies.AdaKV, answer=3)
generate, prefill = (jax.jit(f, compiler_options=OPTIONS) for f in (vlkv.generate, vlkv.prefill))
for fields, plan in (
    (dict(layers=2, windows=(12, None), image_block=25), (h2o, late)), (dict(recurrent=recurrent, gated=True), (h2o,)),
):
    decoder = dataclasses.replace(CONFIG.decoder, **fields)
    params, batch = random_model(dataclasses.replace(CONFIG, decoder=decoder)), unequal_batch(padding="left")
    alone = [generate(params, batch, policy=policy, sampling=sampling) for policy in plan]
    single, _ = prefill(params, batch, h2o)
    for data, model in ((1, 2), (1, 4), (3, 1)):  # 2 key heads and 3 rows
        mesh = sharding.make_mesh(data=data, model=model, devices=jax.devices()[: data * model])
        with jax.set_mesh(mesh):
            ours, inputs = placed(params, mesh), sharding.place_inputs(batch, mesh)
            for policy, expected in zip(plan, alone, strict=True):
                output = generate(ours, inputs, policy=policy, sampling=sampling)
                assert output.slots == vlkv.pool_slots(params, batch, policy, new_tokens=8)
                np.testing.assert_array_equal(sharding.gather(output.tokens), expected.tokens)
            cache, _ = jax.eval_shape(lambda *x: vlkv.prefill(*x, policies.Full(), new_tokens=7), ours, batch)
            assert "windows" not in fields or cache.new_tokens == 7, "the rings have no more, even if the tail has"
            cache, _ = prefill(ours, inputs, h2o)
        if "recurrent" in fields:
            here, there = sharding.place_cache(single, mesh).states[0].memory, cache.states[0].memory
            np.testing.assert_allclose(sharding.gather(there), single.states[0].memory, atol=1e-5)
            heads = 6 if model == 4 else 6 // model
            assert here.sharding.shard_shape(here.shape) == (3 // data, heads, 8, 8)
"""


def start(*arguments: str, devices: int, root) -> subprocess.Popen:
    """`python *arguments` on so many virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], env=environment, cwd=root, text=True, **pipes)


def result(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-2000:]
    return out


@pytest.mark.full
def test_weights_are_split_from_wherever_they_come(root):
    result(start("-c", CODE, devices=4, root=root))


@pytest.mark.full
def test_sliding_windows_and_recurrent_layers_on_a_mesh(root):
    result(start("-c", KINDS, devices=4, root=root))


@pytest.fixture(scope="module")
def answers(root, request):
    """One process runs the cases of all tests that were selected."""
    ours = (item for item in request.session.items if item.path == request.path and "answers" in item.fixturenames)
    cases = {item.callspec.params["case"] for item in ours}
    return json.loads(result(start("-m", "tests.sharding.meshes", "compare", *sorted(cases), devices=8, root=root)))


@pytest.mark.default("more slots: AirCache")
@pytest.mark.parametrize("case", [f"{mesh}: {policy}" for mesh, (_, names) in CASES.items() for policy in names])
def test_a_mesh_answers_as_one_device(answers, case):
    found = answers[case]
    assert found["off"] < 1e-4 and found["tokens"] == found["expected"]
    assert len(set(map(tuple, found["tokens"]))) > 1, "rows that answer alike would show little"


@pytest.mark.default("slots")
@pytest.mark.parametrize("case", ["heads: step", "slots: step"])
def test_a_decode_step_gathers_neither_the_pool_nor_a_weight(answers, case):
    step = answers[case]
    assert step["collectives"] and max(elements for _, elements in step["collectives"]) < step["pool"] / 8


@pytest.mark.full
@pytest.mark.parametrize("case", ["more slots: Random"])
def test_two_hosts_answer_as_one_device(answers, case, root):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    hosts = [start("-m", "tests.sharding.meshes", "process", str(i), port, devices=2, root=root) for i in range(2)]
    for host in hosts:
        *_, last = result(host).splitlines()  # gloo greets on the same pipe
        assert json.loads(last) == answers[case]["expected"]


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(vlkv.InputError, match="needs 6 devices, but there are"):
        sharding.make_mesh(data=2, model=3)
    explicit = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(explicit), pytest.raises(vlkv.InputError, match="explicit axes"):
        slot_parts(2)
    with pytest.raises(vlkv.InputError, match="set a mesh with model=4"):
        split(lambda part, x: x, ("B",), "B", batch=1, kv_heads=1, parts=4)


@pytest.mark.parametrize("parts", [1, 4])
def test_every_entry_has_a_slot_of_its_own(parts):
    slots, start, length = 64, 3, 30
    taken = [slot_of(i, start, slots, parts) for i in range(length)]
    assert len(set(taken)) == length and (parts == 1) == (taken == list(range(3, 33)))
    assert max(taken) < slots and [s // (slots // parts) for s in taken] == [i % parts for i in range(length)]
    token = np.full((1, 1, slots), -1, np.int32)
    token[0, 0, taken] = 100 + np.arange(length)
    lengths = np.array([[length]], np.int32)
    found = entries(jnp.asarray(token), jnp.full((1, 1), start), jnp.asarray(lengths), 40, parts)
    np.testing.assert_array_equal(found[0, 0], [*range(100, 130), *[-1] * 10])


@pytest.mark.parametrize(("layers", "vision", "text", "new", "parts"), [(3, 50, 32, 4, 4), (28, 576, 64, 33, 8)])
def test_slots_in_parts_are_counted(layers, vision, text, new, parts):
    policy = policies.SnapKV(keep=0.3)
    sizes = {"layers": layers, "vision": vision, "text": text, "new_tokens": new}
    whole, split = (cache_spec(policy, **sizes).allocated(m) for m in (1, parts))
    assert split % parts == 0
    # Of each layer every part may waste a tile, and one entry each of segment and tail.
    assert whole - layers * 16 <= split <= whole + layers * parts * (16 + 2)


def test_slots_are_counted_for_the_mesh():
    """Three devices cannot split two key heads, so the pool has three parts."""
    inputs, policy = unequal_batch(), policies.SnapKV(keep=0.3)
    params = jax.eval_shape(tiny_llava)
    sizes = {"vision": inputs.max_vision, "text": inputs.max_text, "images": inputs.max_images, "new_tokens": 4}
    spec = cache_spec(policy, layers=len(params.decoder.layers), **sizes)
    three = jax.sharding.AbstractMesh((3,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(three):
        assert vlkv.pool_slots(params, inputs, policy, new_tokens=4) == spec.allocated(3) != spec.allocated()


def test_a_tail_in_parts_grows_and_shrinks_around_its_entries():
    parts, used = 2, 5

    def tail(slots):
        made = np.zeros((1, 1, 1, slots, 1), np.float32)
        for i in range(used):
            made[0, 0, 0, slot_of(i, 0, slots, parts)] = 1 + i
        return jnp.asarray(made)

    nothing = jnp.zeros((1, 1, 32, 1))
    table = jnp.zeros((1, 1, 1), jnp.int32)
    held = PackedCache(
        k=nothing, v=nothing, token=jnp.full((1, 1, 32), -1), start=table, extent=table, tail_k=tail(8),
        tail_v=tail(8), used=jnp.array([used]), next_position=jnp.array([[used]]), parts=parts,
    )  # fmt: skip
    for room, slots in ((20, 20), (13, 14), (5, 6)):
        np.testing.assert_array_equal(resize(held, room).tail_k, tail(slots))


def test_what_follows_a_list_is_not_local():
    entries, count = Part(index=1, count=2).listed(jnp.array([[1, 3, 4, 7, 1, 1]]), jnp.array([4]))
    assert int(count[0]) == 3
    np.testing.assert_array_equal(entries[0, :3], [0, 1, 3])
