"""Plants faults one by one in a copy of the project and runs the tests that should detect them.

    python -m tests.plant_faults [NAME ...] [--all]

This checks the tests: the faults are mistakes that a programmer could make, and the default suite must fail for each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    """A text that occurs once in a file, its replacement, and a test that should detect the fault."""

    name: str
    file: str
    old: str
    new: str
    test: str


FAULTS = (
    Fault(
        "mask off by one",
        "pallas_kernels/prefill_attention/xla.py",
        "(keys.number <= queries.until[:, None])",
        "(keys.number <= queries.until[:, None] + 1)",
        "tests/kernels/test_prefill_attention.py::test_padding_on_both_sides",
    ),
    Fault(
        "wrong RoPE base",
        "vlkv/decoder/rope.py",
        "frequency = rope.theta ** -",
        "frequency = (2 * rope.theta) ** -",
        "tests/generation/test_decode.py::test_score_is_the_log_probability_of_the_reference",
    ),
    Fault(
        "score over padding",
        "vlkv/compression/observe.py",
        'return measured(obs, f"column {statistic}", Measure(obs.valid, statistic))',
        'return measured(obs, f"column {statistic}", Measure(jnp.ones_like(obs.valid), statistic))',
        "tests/policies/test_every_method.py::test_every_method",
    ),
    Fault(
        "budget one too high",
        "vlkv/compression/budgets.py",
        "return np.minimum(sums, np.maximum(layers, asked)).astype(np.int32)",
        "return np.minimum(sums, np.maximum(layers, asked + 1)).astype(np.int32)",
        "tests/compression/test_budgets.py",
    ),
    Fault(
        "kernel skips its last block",
        "pallas_kernels/ragged.py",
        "turns = -(-ends[-1] // together)",
        "turns = ends[-1] // together",
        "tests/kernels/test_decode_attention.py::test_golden_outputs_with_n_in_the_denominator",
    ),
    Fault(
        "converter swaps two tensors",
        "vlkv/families/text/weights.py",
        '"layers.*.key": "layers.*.self_attn.k_proj", "layers.*.value": "layers.*.self_attn.v_proj",',
        '"layers.*.key": "layers.*.self_attn.v_proj", "layers.*.value": "layers.*.self_attn.k_proj",',
        "tests/parity/test_forward.py::test_llava_batch_of_unequal_rows",
    ),
    Fault(
        "query heads read each other's key heads",
        "pallas_kernels/prefill_attention/xla.py",
        "q.reshape(batch, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)",
        "q.reshape(batch, length, -1, kv_heads, head_dim).transpose(0, 3, 2, 1, 4)",
        "tests/kernels/test_prefill_attention.py::test_padding_on_both_sides",
    ),
    Fault(
        "positions of new tokens off by one",
        "vlkv/generation/decode.py",
        "embedded.x, cache.next_position[:, None], added",
        "embedded.x, cache.next_position[:, None] + 1, added",
        "tests/generation/test_decode.py::test_score_is_the_log_probability_of_the_reference",
    ),
    Fault(
        "stop token does not end a row",
        "vlkv/generation/decode.py",
        "ended | is_last(token)",
        "ended",
        "tests/parity/test_generate.py::test_rows_end_at_their_stop_token_and_the_loop_ends_with_the_last",
    ),
    Fault(
        "tokens of the answer do not observe",
        "vlkv/generation/begin.py",
        "valid=join(layer.valid, valid)",
        "valid=join(layer.valid, 0)",
        "tests/generation/test_begin.py::test_tokens_and_kept_entries_are_those_of_float64",
    ),
    Fault(
        "scale of the neighbouring group",
        "pallas_kernels/quantized.py",
        "begin = jnp.minimum(first // pool.group, ",
        "begin = jnp.minimum(first // pool.group + 1, ",
        "tests/kernels/test_quantized.py::test_attention_is_attention_over_the_dequantised_pool",
    ),
    Fault(
        "vision embeddings one late",
        "vlkv/families/family.py",
        "vision[jnp.maximum(vision_index, 0)]",
        "vision[jnp.maximum(vision_index - 1, 0)]",
        "tests/parity/test_forward.py::test_llava_batch_of_unequal_rows",
    ),
    Fault(
        "eviction protects the oldest",
        "vlkv/cache/decode_state.py",
        "state.rank < (count - recent)[:, None]",
        "state.rank >= recent[:, None]",
        "tests/cache/test_decode_state.py::test_h2o_evicts_one_entry_a_step",
    ),
    Fault(
        "a pool is resized after its rings",
        "vlkv/cache/resizing.py",
        "if new_tokens <= cache.new_tokens or not",
        "if cache.rings is not None or new_tokens <= cache.new_tokens or not",
        "tests/compression/test_properties.py::test_a_cache_that_is_resized_has_the_slots_of_one_that_was_made_larger",
    ),
    Fault(
        "a share equals a count",
        "vlkv/compression/option_types.py",
        "return type(value), value",
        "return value",
        "tests/compression/test_properties.py::test_a_count_is_no_share",
    ),
    Fault(
        "a mean over heads of equal slots",
        "vlkv/cache/decode_state.py",
        "aligned = jnp.all(token == token[0])",
        "aligned = jnp.array(True)",
        "tests/compression/test_properties.py::test_tova_evicts_by_the_mean_of_each_token",
    ),
    Fault(
        "token merging follows one head",
        "vlkv/policies/tome.py",
        "jnp.sum(kept & members, axis=1)",
        "jnp.full(len(k), jnp.sum(kept[0] & members))",
        "tests/compression/test_properties.py::test_every_dropped_token_is_in_exactly_one_kept_entry",
    ),
    Fault(
        "merging counts the dropped tokens of one head",
        "vlkv/policies/lookm.py",
        "exists = slot < jnp.sum(gone, axis=1)[:, None]",
        "exists = slot < jnp.sum(gone[:1], axis=1)[:, None]",
        "tests/compression/test_properties.py::test_released_pairs_with_unequal_heads",
    ),
    Fault(
        "padding takes places of the grid",
        "vlkv/compression/smooth.py",
        "jnp.where(among, grid.T, _FAR)",
        "grid.T",
        "tests/compression/test_properties.py::test_the_grid_may_have_holes_and_padding_with_places",
    ),
    Fault(
        "tokens that are kept in any case are averaged",
        "vlkv/compression/compose.py",
        "among &= ~self.scored.protect(obs)",
        "among &= obs.valid",
        "tests/compression/test_properties.py::test_tokens_that_do_not_compete_do_not_matter",
    ),
    Fault(
        "deviations are not smoothed",
        "vlkv/policies/roco.py",
        'ranked_by=("scores", "deviation"),',
        'ranked_by=("scores",),',
        "tests/compression/test_properties.py::test_all_that_is_ranked_by_is_smoothed",
    ),
    Fault(
        "negative scores times norms",
        "vlkv/policies/criticalkv.py",
        "scores = not_negative(scores, candidates)",
        "scores = jnp.where(candidates, scores, 0.0)",
        "tests/compression/test_properties.py::test_a_better_score_with_a_larger_norm_is_never_dropped_for_a_worse_one",
    ),
    Fault(
        "the core counts tokens that were removed",
        "vlkv/policies/avl.py",
        "state.counted",
        "state.vision",
        "tests/compression/test_properties.py::test_the_core_is_a_share_of_what_keep_counts",
    ),
    Fault(
        "the recent share is that of the mean budget",
        "vlkv/compression/selection.py",
        "jnp.full_like(budget, total // layers) if equal else budget",
        "jnp.full_like(budget, total // layers)",
        "tests/compression/test_properties.py::test_the_recent_share_is_that_of_each_budget",
    ),
    Fault(
        "a budget stays at a short prompt",
        "vlkv/compression/policy.py",
        "jnp.where(whole, jnp.maximum(state.budget, self.budget), state.budget)",
        "state.budget",
        "tests/compression/test_properties.py::test_a_budget_is_filled_after_a_short_prompt",
    ),
    Fault(
        "parts of a composition stay as they are",
        "vlkv/compression/compose.py",
        "if getattr(part, option) != value}",
        "if getattr(part, option) is ...}",
        "tests/compression/test_properties.py::test_a_composition_follows_what_is_replaced",
    ),
    Fault(
        "budgets without effect are accepted",
        "vlkv/compression/composable.py",
        'if allocated is not None and not _changes(allocated, "allocate")',
        'if allocated is not None and allocated is before and not _changes(allocated, "allocate")',
        "tests/compression/test_properties.py::test_a_part_without_effect_or_with_a_wrong_one_is_refused",
    ),
)


def planted(fault: Fault, text: str) -> str:
    """The text of a file with the fault; raises ValueError unless the replaced text occurs exactly once."""
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}, not once")
    return text.replace(fault.old, fault.new)


def copy_project(folder: Path) -> None:
    """Copies all files that git does not ignore; the cache of compiled programs is shared."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (ROOT / ".jax_cache").mkdir(exist_ok=True)
    (folder / ".jax_cache").symlink_to(ROOT / ".jax_cache")


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Runs pytest until the first failure; returns its exit code and the line of the failure, or the last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode, (failed or lines[-1:] or [""])[0]


def main() -> int:
    """Prints one line per fault; returns 1 if a fault was missed, or if the tests fail without a fault."""
    parser = argparse.ArgumentParser(description="Plants faults one by one and runs the tests that should detect them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="any part of a fault's name (default: all faults)")
    parser.add_argument("--all", action="store_true", help="run the whole default suite, not one test per fault")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.names or any(name in fault.name for name in args.names)]
    if not chosen:
        parser.error(f"no such fault; choose one of {', '.join(fault.name for fault in FAULTS)}")
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        code, line = run_tests(folder, [] if args.all else sorted({fault.test for fault in chosen}))
        if code:
            print(f"the tests fail without any fault: {line}")
            return 1
        for fault in chosen:
            path = folder / fault.file
            whole = path.read_text()
            path.write_text(planted(fault, whole))
            code, line = run_tests(folder, [] if args.all else [fault.test])
            path.write_text(whole)
            found = code == 1  # other codes mean that pytest could not run the test
            missed += not found
            print(f"{fault.name}: {'found by' if found else 'MISSED:'} {line.removeprefix('FAILED ')}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
