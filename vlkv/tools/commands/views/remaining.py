"""Measurements of the tokens that are left: which ones, and what they cost."""

from __future__ import annotations

import jax
import numpy as np
from PIL import Image

from vlkv import analysis
from vlkv.analysis.cost import full_attention
from vlkv.analysis.drawing import fitted, outlined
from vlkv.analysis.text_drawing import kept_text
from vlkv.policies import text_of
from vlkv.tools.commands.plots import Curves, Maps, Panel
from vlkv.tools.commands.views.case import Case, View


def survival(case: Case) -> View:
    """Vision tokens that each layer computes, and those that it caches."""
    vision, prompt = case.vision, case.read(case.policy)
    reached = np.asarray(analysis.reached(prompt))[0]
    held = np.asarray(analysis.held(case.fill(prompt, case.policy), vision.size))[0]
    counts = {"computed": reached[:, vision].sum(axis=1), "cached": held[:, vision].sum(axis=1)}
    grid = np.asarray(case.inputs.grid)[0]
    layer = np.arange(len(held))
    return View(
        {
            **counts,
            "computed_by_image": analysis.on_grid(reached, grid),
            "cached_by_image": analysis.on_grid(held, grid),
        },
        {"layer": layer, **counts},
        [
            Curves("vision tokens", "layer", "tokens", layer, counts),
            *case.maps("cached (share of heads)", held),
        ],
    )


def text(case: Case) -> View:
    """The share of the layers and heads that keep each token of the prompt's text."""
    assert case.processor is not None
    cache = case.fill(case.read(case.policy), case.policy)
    drawn = kept_text(case.processor, case.inputs, [(text_of(case.policy), case.policy, cache)])
    inputs, share = case.inputs, np.asarray(analysis.held(cache, case.inputs.tokens.shape[1]))[0]
    columns = {"layer": np.arange(len(share))}
    for name, some in (("text", inputs.valid & ~inputs.is_vision), ("vision", inputs.valid & inputs.is_vision)):
        if some.any():
            columns[f"share of the {some.sum()} {name} tokens kept"] = share[:, np.asarray(some)[0]].mean(axis=1)
    (kept,) = drawn.kept.values()
    return View({"pieces": list(drawn.pieces), "kept": kept, "layers_and_heads": drawn.heads}, columns, drawn)


def merged(case: Case) -> View:
    """Vision tokens left after each stage of merging, and which patches were merged together."""
    vision = case.vision
    owner = analysis.merged_into(case.params, case.inputs, case.policy)
    grid = np.asarray(case.inputs.grid)[0]
    by_image = analysis.on_grid(owner, grid)
    left = np.array([len(np.unique(one[vision])) for one in owner])
    stage = np.arange(1, len(owner) + 1)
    panels: list[Panel] = [Curves("vision tokens left", "stage", "tokens", stage, {"": left})]
    for i, numbers in enumerate(by_image):
        if len(case.images) == len(by_image):
            base = fitted(case.images[i], numbers.shape[1:], "crop")
        else:
            base = Image.new("RGB", numbers.shape[:0:-1], "white")
        drawn = {f"stage {s}: {n} tokens": np.asarray(outlined(base, x.astype(int)))
                 for s, n, x in zip(stage, left, numbers, strict=True)}  # fmt: skip
        panels.append(Maps(f"merged tokens, image {i}" if len(by_image) > 1 else "merged tokens", drawn))
    return View({"left": left, "owner_by_image": by_image}, {"stage": stage, "tokens": left}, panels)


def cost(case: Case) -> View:
    """FLOPs and cache bytes of each layer with full attention, their ratio to the full cache's, and memory by kind."""
    decoder, prompt = full_attention(case.params.config.decoder), case.read(case.policy)
    cache = case.fill(prompt, case.policy)
    tokens = np.asarray(analysis.reached(prompt))[0].sum(axis=1)
    entries = np.asarray(cache.counts)[:, 0].mean(axis=1)
    itemsize = case.params.decoder.embedding.weight[...].dtype.itemsize
    whole = np.full_like(tokens, int(case.inputs.valid.sum()))
    prefill = analysis.prefill_flops(decoder, tokens)
    decode = analysis.decode_flops(decoder, np.ceil(entries).astype(int) + 1)
    size = analysis.cache_bytes(decoder, entries, itemsize)
    is_vision = np.asarray(case.inputs.is_vision)[0]
    vision = np.asarray(analysis.held(cache, is_vision.size))[0][:, is_vision].sum(axis=1)
    of_vision = analysis.cache_bytes(decoder, vision, itemsize)
    layer = np.arange(len(tokens))
    full = analysis.prefill_flops(decoder, whole), analysis.cache_bytes(decoder, whole, itemsize)
    ratios = {
        "prefill FLOPs": prefill / full[0],
        "decode FLOPs": decode / analysis.decode_flops(decoder, whole + 1),
        "cache bytes": size / full[1],
    }
    return View(
        {
            "tokens": tokens, "prefill_flops": prefill, "decode_flops": decode, "cache_bytes": size,
            "total": {"prefill_flops": prefill.sum(), "decode_flops": decode.sum(), "cache_bytes": size.sum()},
            "memory": {  # LightKV, Fig. 1
                "weights": sum(leaf.nbytes for leaf in jax.tree.leaves(case.params)),
                "vision": of_vision.sum(), "text": size.sum() - of_vision.sum(),
            },
            "allocated_bytes": cache.bytes,  # includes capacity for new tokens, and quantisation by the policy
            "of_full": {
                "prefill_flops": prefill.sum() / full[0].sum(),
                "cache_bytes": size.sum() / full[1].sum(),
            },
        },
        {"layer": layer, "tokens": tokens, "prefill GFLOPs": prefill / 1e9, "decode MFLOPs": decode / 1e6,
         "cache KiB": size / 1024, "of them vision": of_vision / 1024},
        [Curves("cost, as a share of the full cache's", "layer", "share", layer, ratios)],
    )  # fmt: skip
