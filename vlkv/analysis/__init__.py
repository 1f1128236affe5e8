"""The measurements in the papers' figures, as functions that return arrays. `vlkv inspect` draws them."""

from vlkv.analysis.cost import cache_bytes, decode_flops, logits_flops, prefill_flops, tower_flops
from vlkv.analysis.fidelity import Trace, agreement, answer_of, feature_error, follow, kl_to_full, log_probability
from vlkv.analysis.spread import (
    TYPES,
    concordance,
    consistency,
    density,
    gini,
    jensen_shannon,
    layer_budgets,
    lorenz,
    observer_attention,
    retained,
    shares_by_type,
    token_types,
    value_histograms,
)
from vlkv.analysis.survival import (
    choose,
    evidence_recall,
    held,
    held_by_head,
    merged_into,
    on_grid,
    oracle_cache,
    reached,
)

__all__ = [
    "TYPES", "Trace", "agreement", "answer_of", "cache_bytes", "choose", "concordance", "consistency",
    "decode_flops", "density", "evidence_recall", "feature_error", "follow", "gini", "held", "held_by_head",
    "jensen_shannon", "kl_to_full", "layer_budgets", "log_probability", "logits_flops", "lorenz", "merged_into",
    "observer_attention", "on_grid", "oracle_cache", "prefill_flops", "reached", "retained",
    "shares_by_type", "token_types", "tower_flops", "value_histograms",
]  # fmt: skip
