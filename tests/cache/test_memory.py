"""What is allocated: the bytes asked for, and never a T x T matrix. Shapes only, nothing runs."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

from tests.mechanisms import COMPARES_LAYERS
from vlkv import Inputs, init, policies, prefill
from vlkv.compression.sizes import cache_spec
from vlkv.config import DecoderConfig, ModelConfig
from vlkv.towers.vit import ClipConfig

LAYERS, VISION, TEXT, NEW, KEEP = 28, 8192, 64, 512, 0.1
OPTIONS = {"avl": {"core": 0.05, "text": 0.5}, "lightkv": {"layers": (1,), "windows": (4,)}}
OPTIONS |= {name: {"layers": (1,)} for name in ("tome", "pitome", "tofu", "ivtp", "pyramiddrop", "sparsevlm")}
OPTIONS |= {"fastv": {"layer": 1}, "dart": {"layer": 1}}
EVERY = [
    policies.make(name, keep=0.5 if "layers" in OPTIONS.get(name, {}) else KEEP, **OPTIONS.get(name, {}))
    for name, method in policies.registry.items()
    if not issubclass(method, policies.Full)
]
WATCHING = [policy for policy in EVERY if getattr(policy, "class_attention_layers", ())]  # need a tower
EVERY = [policy for policy in EVERY if policy not in WATCHING]
EVERY += [
    policies.Full(),
    policies.KIVI(bits=4),
    policies.TurboQuant(bits=2),
    policies.AirCache(keep=KEEP, window="text", scope="all"),
    policies.AirCache(keep=KEEP, merging=0.5),
    policies.PrefixKV(keep=KEEP, merging="cosine"),
    policies.LookM(keep=KEEP, variant="released"),
    policies.LightKV(layers=(1,), windows=(1,), variant="released"),
    policies.ToMe(keep=0.5, on="cache"),
    policies.compose(policies.SnapKV(keep=KEEP), allocate=policies.PrefixKV, store=policies.KIVI),
]


@pytest.mark.parametrize("method", [policies.AirCache, policies.PrefixKV, policies.SnapKV])
@pytest.mark.parametrize("scope", ["vision", "all"])
def test_pool_at_7b_shapes_is_within_5_percent_of_the_kept_and_new_entries(method, scope):
    kept = math.floor(KEEP * LAYERS * VISION + 0.5) + LAYERS * TEXT
    if scope == "all":
        kept = math.floor(KEEP * LAYERS * (VISION + TEXT) + 0.5)
    policy = method(keep=KEEP, scope=scope)
    slots = cache_spec(policy, layers=LAYERS, vision=VISION, text=TEXT, new_tokens=NEW).allocated()
    new = (
        math.floor(KEEP * NEW) if policies.slots_of(policy).step else NEW
    )  # a method that evicts keeps its share of the new tokens
    assert kept + LAYERS * new <= slots <= 1.05 * (kept + LAYERS * new)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("vision", "text", "keep"), [(575, 33, 0.1), (8192, 1, 0.03), (40, 300, 0.5)])
def test_methods_with_one_total_have_pools_of_one_size(vision, text, keep, parts):
    """Whether they give layers equal budgets or not; otherwise a comparison at equal bytes would depend on tiles."""
    sizes = dict(layers=LAYERS, vision=vision, text=text, new_tokens=NEW)
    methods = policies.AirCache, policies.CSP, policies.SnapKV, policies.VLCache
    assert len({cache_spec(method(keep=keep, scope="vision"), **sizes).allocated(parts) for method in methods}) == 1


LENGTH = 8192
DECODER = DecoderConfig(
    vocab_size=32, width=64, mlp_width=64, layers=2, heads=4, kv_heads=2, head_dim=16, norm_eps=1e-6,
    max_positions=9000,
)  # fmt: skip
CLIP = ClipConfig(
    width=16, mlp_width=16, layers=2, heads=2, image_size=16, patch_size=2, norm_eps=1e-5, feature_layer=-2,
    keep_class_token=False,
)  # fmt: skip
IMAGES = (LENGTH - 64) // CLIP.tokens


def compile_prefill(config, policy, length: int, pixels=None, images: int = 1):
    """For one row, from shapes."""
    shape = jax.ShapeDtypeStruct
    params = jax.eval_shape(lambda: init(config, jax.random.key(0)))

    def leaves(params, row, valid, pixels, seed):
        inputs = Inputs(
            tokens=row, positions=row[..., None], valid=valid, vision_index=row, pixels=pixels,
            grid=jnp.stack([row - row, row // 96, row % 96], axis=-1),
            max_vision=length - 64, max_text=64, max_instruction=64, max_images=images,
        )  # fmt: skip
        return jax.tree.leaves(prefill(params, inputs, policy, new_tokens=64, key=jax.random.key(seed)))

    row, valid = shape((1, length), jnp.int32), shape((1, length), bool)
    return jax.jit(leaves).lower(params, row, valid, pixels, shape((), jnp.int32)).compile()


@pytest.mark.default("windows=(4,)")
@pytest.mark.ci(  # all rows are scored, tokens are compared with each other, or the prompt is read again
    *COMPARES_LAYERS, "H2O(", "RoCo(", "MEDA(", "LookM(", "KVzip(", "AVL(", "FlashCache(", "Composed(", "LightKV(",
    "AirCache(keep=0.1, budget=None, scope='all'", "SparseVLM(", "IVTP(", "DART(", "DivPrune(", "CDPruner(", "PiToMe(",
    "on='cache'", "VisPruner(", "PruMerge(",
)  # fmt: skip
@pytest.mark.parametrize("policy", [*EVERY, *WATCHING], ids=repr)
def test_no_buffer_of_the_compiled_prefill_reaches_t_times_t_elements(policy):
    """Two layers, D = 64, and one row of T = 8192 tokens, one image or 127; compiled from shapes, never run."""
    shape = jax.ShapeDtypeStruct
    config, pixels, images = ModelConfig(family="llama", decoder=DECODER), None, 1
    if policy in WATCHING:
        config = ModelConfig(family="llava", decoder=DECODER, vision=CLIP, image_token=5)
        pixels, images = shape((IMAGES, 3, 16, 16), jnp.float32), IMAGES
    compiled = compile_prefill(config, policy, LENGTH, pixels, images)
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())
    sizes = {dims: math.prod(map(int, dims.split(","))) for dims in shapes}
    assert max(sizes.values()) >= 4 * LENGTH * 16, "the queries at least must show up"
    assert not {dims for dims, size in sizes.items() if size >= LENGTH**2}


@pytest.mark.full
def test_a_layer_more_costs_a_capped_prefill_its_short_list_only():
    """In layers of 16 keys of 64 and a row of 2048 the cache outweighs all else that a layer leaves behind."""

    def bytes_of(policy, layers):
        decoder = dataclasses.replace(DECODER, width=32, layers=layers, heads=16, kv_heads=16, head_dim=64)
        compiled = compile_prefill(ModelConfig(family="llama", decoder=decoder), policy, 2048)
        return compiled.memory_analysis().temp_size_in_bytes

    exact, capped = (
        (bytes_of(policy, 8) - bytes_of(policy, 4)) / 4
        for policy in (policies.AirCache(keep=0.05), policies.AirCache(keep=0.05, cap=2.0))
    )
    entry = 2 * 16 * 64 * 4
    assert exact > 2048 * entry
    # 2 x 0.05 of the vision tokens, and all text; and what the choice itself remembers of a layer.
    assert capped < 1.2 * (0.1 * (2048 - 64) + 64) * entry
