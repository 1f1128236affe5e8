"""What tests/test_sharding.py runs in processes of their own: the same work on one device and on meshes of several.

`python -m tests.meshes compare` prints one line of JSON; `python -m tests.meshes process I PORT` is one of two hosts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import vlkv
from vlkv import policies, sharding

from .models import CONFIG, IMAGE_TOKEN

SMALL = dataclasses.replace(CONFIG, decoder=dataclasses.replace(CONFIG.decoder, layers=2))
NEW = 4
POLICIES = {
    "Full": policies.Full(),
    "SnapKV": policies.SnapKV(keep=0.4),
    "H2O": policies.H2O(keep=0.3),
    "AVL": policies.AVL(keep=0.5, refresh=2),
    "FastV": policies.FastV(keep=0.5, layer=1),
    "AirCache": policies.AirCache(keep=0.3),
    "KIVI": policies.KIVI(bits=4, group=8),
    "Random": policies.Random(keep=0.3),
}
# Key heads are 2: split over `model` up to there, and the slots beyond.
CASES = {
    "data": ((4, 1), ("Full",)),
    "heads": ((2, 2), ("Full", "H2O", "AVL", "FastV", "AirCache", "KIVI")),
    "slots": ((2, 4), ("Full", "H2O", "AVL", "AirCache", "Random")),
    "more slots": ((1, 8), ("SnapKV",)),
}


def parameters() -> vlkv.models.Model:
    """Random weights, queries large, so that attention is peaked."""
    leaves, structure = jax.tree.flatten(vlkv.models.abstract(SMALL))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(structure, [rng.normal(size=x.shape).astype(np.float32) * 0.3 for x in leaves])


def placed(params: vlkv.models.Model, mesh: jax.sharding.Mesh) -> vlkv.models.Model:
    """As `load_params` places them."""
    return jax.tree_util.tree_map_with_path(lambda path, x: sharding.place(sharding.path_name(path), x, mesh), params)


def batch() -> vlkv.Inputs:
    """Four rows of two, one, no and one image."""
    rng = np.random.default_rng(0)
    image = [IMAGE_TOKEN] * 25
    rows = [
        [1, *rng.integers(6, 50, 5), *image, 8, *image, *rng.integers(6, 50, 7)],
        [1, *rng.integers(6, 50, 3), *image, *rng.integers(6, 50, 14)],
        [1, *rng.integers(6, 50, 11)],
        [1, *image, *rng.integers(6, 50, 9)],
    ]
    longest = max(map(len, rows))
    found = {
        "input_ids": np.stack([np.pad(row, (0, longest - len(row))) for row in rows]),
        "attention_mask": np.stack([np.arange(longest) < len(row) for row in rows]),
        "pixel_values": rng.normal(size=(4, 3, 20, 20)).astype(np.float32),
    }
    return vlkv.Inputs.from_hf(found, SMALL)


def question() -> vlkv.Inputs:
    """A second turn, of unequal lengths."""
    rng = np.random.default_rng(1)
    mask = np.arange(5) < np.array([[5], [3], [4], [5]])
    return vlkv.Inputs.from_hf({"input_ids": rng.integers(6, 50, (4, 5)), "attention_mask": mask}, SMALL)


@partial(jax.jit, static_argnames="room", compiler_options={"xla_llvm_disable_expensive_passes": True})
def answer(params, inputs, policy, key, more=None, room=NEW):
    """Logits [S, B, vocab] and tokens [B, S] of a greedy decode, after another turn if there is one."""
    cache, first = vlkv.prefill(params, inputs, policy, new_tokens=room, key=key)
    logits = first
    if more is not None:
        cache, logits = vlkv.extend(params, cache, more)

    def step(state, _):
        cache, logits = state
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return vlkv.decode_step(params, cache, token), (logits, token)

    (_, last), (seen, tokens) = jax.lax.scan(step, (cache, logits), length=NEW)
    return jnp.concatenate([first[None], seen, last[None]]), tokens.T


def compare() -> None:
    """The greatest difference of logits, and whether tokens agree, by mesh and policy."""
    params, inputs, key = parameters(), batch(), jax.random.key(3)
    expected, found = {}, {}
    for name, (shape, names) in CASES.items():
        mesh = sharding.make_mesh(data=shape[0], model=shape[1], devices=jax.devices()[: shape[0] * shape[1]])
        split = placed(params, mesh)
        for policy in names:
            if policy not in expected:
                expected[policy] = jax.device_get(answer(params, inputs, POLICIES[policy], key))
            with jax.set_mesh(mesh):
                made = sharding.gather(answer(split, sharding.place_inputs(inputs, mesh), POLICIES[policy], key))
            off = np.abs(made[0] - expected[policy][0]).max()
            found[f"{name}: {policy}"] = [float(off), bool((made[1] == expected[policy][1]).all())]
    print(json.dumps(found))


if __name__ == "__main__":
    compare()
