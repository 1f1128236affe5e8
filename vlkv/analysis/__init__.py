"""The measurements in the papers' figures, as functions that return arrays. `vlkv inspect` draws them."""

from vlkv.analysis.attention_maps import TYPES, concordance, shares_by_type, token_types
from vlkv.analysis.choosing import choose
from vlkv.analysis.cost import cache_bytes, decode_flops, logits_flops, prefill_flops, tower_flops
from vlkv.analysis.fidelity import agreement, answer_of, feature_error, kl_to_full, log_probability
from vlkv.analysis.merged_tokens import merged_into
from vlkv.analysis.observers import consistency, observer_attention
from vlkv.analysis.oracle import oracle_cache
from vlkv.analysis.spread import density, gini, jensen_shannon, layer_budgets, lorenz, retained, value_histograms
from vlkv.analysis.survival import evidence_recall, held, held_by_head, on_grid, reached
from vlkv.analysis.trace import Trace, follow

__all__ = [
    "TYPES", "Trace", "agreement", "answer_of", "cache_bytes", "choose", "concordance", "consistency",
    "decode_flops", "density", "evidence_recall", "feature_error", "follow", "gini", "held", "held_by_head",
    "jensen_shannon", "kl_to_full", "layer_budgets", "log_probability", "logits_flops", "lorenz", "merged_into",
    "observer_attention", "on_grid", "oracle_cache", "prefill_flops", "reached", "retained",
    "shares_by_type", "token_types", "tower_flops", "value_histograms",
]  # fmt: skip
