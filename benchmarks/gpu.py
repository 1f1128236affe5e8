"""AirCache's Table 3 and the peers on one GPU: random 7B weights, batch 8 and 16, prompts 2k to 32k, 512 new tokens.

    python -m benchmarks.gpu [--minutes 9] [--out benchmarks/results/gpu.json]      as often as it takes
    python -m benchmarks.gpu --dry-run                                              the same code, tiny, on a CPU

A call measures what the file does not hold yet, the smallest setting first, and begins nothing that it does not expect
to end within its minutes; the next call goes on. First, if torch has this GPU and kvpress is installed: transformers
with sdpa and SnapKV against ours at 10 %, batch 8. Then full cache, AirCache at 50 % and 10 %, and 10 % under a cap of
twice the mean budget, alternated. It ends with what was promised and what was found:

- decoding falls at least as much as in the paper, at 50 % and at 10 %;
- prefill takes at most 3 % longer than with the full cache;
- peak memory under the cap is below the full cache's;
- decoding is at least twice as fast as transformers with kvpress.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants some of the GPU too

import jax
import numpy as np
from rich.console import Console

from benchmarks import torch_side
from vlkv import policies
from vlkv.benching import papers, results
from vlkv.benching.measuring import measure
from vlkv.benching.settings import Setting
from vlkv.benching.subjects import Subject, find
from vlkv.errors import InputError
from vlkv.terminal import OneLineParser, guarded

RESULT = Path(__file__).parent / "results" / "gpu.json"
MODEL, CAP, PREFILL, PEERS = "llava-onevision-7b", 2.0, 1.03, 2.0
CONTESTANTS: tuple[policies.Policy, ...] = (
    policies.Full(), policies.AirCache(keep=0.5), policies.AirCache(keep=0.1), policies.AirCache(keep=0.1, cap=CAP),
)  # fmt: skip
PEER_SETTINGS = (Setting(8, 2048, 64, 512), Setting(8, 8192, 64, 512))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures until the minutes are over, then says what holds."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="of this call")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default=None, help="default: bfloat16")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes and weights, figures without meaning")
    return guarded(lambda: run(parser.parse_args(argv)))


def run(args: argparse.Namespace) -> None:
    """The whole of it."""
    if args.minutes <= 0 or args.rounds < 1:
        raise InputError("--minutes must be more than 0 and --rounds at least 1")
    if jax.default_backend() != "gpu" and not args.dry_run:
        raise InputError(f"no GPU: jax runs on {jax.default_backend()}; --dry-run runs the same, tiny, here")
    end = time.perf_counter() + 60 * args.minutes
    subject = find("tiny" if args.dry_run else MODEL, dtype=args.dtype)
    held = results.Results(args.out, "python -m benchmarks.gpu" + (" --dry-run" if args.dry_run else ""))
    paper = list(dict.fromkeys(point.setting for point in papers.named("aircache-table-3").points))
    settings = sorted(paper, key=lambda setting: setting.size)
    peers = list(PEER_SETTINGS)
    if args.dry_run:
        settings, peers = [_tiny(settings[0])], [_tiny(peers[0])]
    console = Console(width=140)
    left = _peers(args, subject, held, peers, end, console)  # first: jax does not give back what it has once taken
    left += _table(args, subject, held, settings, end)
    verdict(console, subject, held, settings, peers)
    console.print("all measured" if not left else f"{left} settings left: call it again", highlight=False)


def _tiny(setting: Setting) -> Setting:
    return Setting(setting.batch // 4, 48, 16, 3)


def _table(
    args: argparse.Namespace, subject: Subject, held: results.Results, settings: list[Setting], end: float
) -> int:
    """Full cache and AirCache; returns how many settings are left."""
    params, longest = None, 60.0
    todo = [s for s in settings if results.missing(held, subject.name, subject.dtype.name, s, CONTESTANTS)]
    for i, setting in enumerate(todo):
        begin = time.perf_counter()
        if begin + longest > end:
            return len(todo) - i
        params = subject.params() if params is None else params
        rows = measure(params, setting, CONTESTANTS, rounds=args.rounds, tick=lambda said: print(said, flush=True))
        for policy, row in zip(CONTESTANTS, rows, strict=True):
            held.add(results.identity(subject.name, subject.dtype.name, setting, policy), row)
        longest = max(longest, 1.5 * (time.perf_counter() - begin))  # the next setting is larger
    return 0


def _cell(subject: Subject, setting: Setting) -> dict[str, Any]:
    return {"peers": subject.name, "dtype": subject.dtype.name, "batch": setting.batch, "prompt": setting.prompt,
            "new": setting.new}  # fmt: skip


def _peers(
    args: argparse.Namespace, subject: Subject, held: results.Results, settings: list[Setting], end: float,
    console: Console,
) -> int:  # fmt: skip
    """The same decoder in transformers, random weights too, SnapKV at 10 % on both sides."""
    why = torch_side.available()
    if why is None and not torch_side.on_gpu() and not args.dry_run:
        why = "torch has no CUDA device"
    if why is not None:
        console.print(f"peers not measured: {why}", highlight=False)
        return 0
    window = 16 if args.dry_run else torch_side.WINDOW
    snap = policies.SnapKV(keep=0.1, window=window)
    ours, theirs = None, None
    todo = [setting for setting in settings if held.find(_cell(subject, setting)) is None]
    for i, setting in enumerate(todo):
        if time.perf_counter() + 120 > end and not args.dry_run:
            return len(todo) - i
        ours = subject.params() if ours is None else ours
        theirs = _same_in_transformers(subject) if theirs is None else theirs
        row = measure(ours, setting, [policies.Full(), snap], rounds=args.rounds)[1]
        tokens = np.random.default_rng(0).integers(0, theirs.model.config.vocab_size, (setting.batch, setting.prompt))
        runs = [theirs.run(tokens, "snapkv", 0.1, setting.new, window=window) for _ in range(args.rounds + 1)][1:]
        prefill = float(np.median([run.prefill_seconds for run in runs]))
        step = float(np.median([run.step_seconds for run in runs]))
        held.add(_cell(subject, setting), {
            "ours": row, "theirs": {"prefill_seconds": prefill, "step_seconds": step, **torch_side.versions()},
        })  # fmt: skip
    return 0


def _same_in_transformers(subject: Subject) -> torch_side.Peer:
    """A decoder of the same sizes, made where it runs: speed does not depend on the weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    c = subject.config.decoder
    sizes = dict(
        vocab_size=c.vocab_size, hidden_size=c.width, intermediate_size=c.mlp_width, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, max_position_embeddings=65536,
        tie_word_embeddings=c.tied,
    )  # fmt: skip
    config = (Qwen2Config if c.qkv_bias else LlamaConfig)(**sizes, attn_implementation="sdpa")
    torch.set_default_dtype(getattr(torch, subject.dtype.name))
    with torch.device("cuda" if torch_side.on_gpu() else "cpu"):
        model = (Qwen2ForCausalLM if c.qkv_bias else LlamaForCausalLM)(config)
    torch.set_default_dtype(torch.float32)
    return torch_side.Peer(model.eval())


def verdict(
    console: Console, subject: Subject, held: results.Results, settings: list[Setting], peers: list[Setting]
) -> None:
    """Each promise, setting by setting."""

    def row(setting: Setting, policy: policies.Policy) -> dict[str, Any]:
        found = held.find(results.identity(subject.name, subject.dtype.name, setting, policy)) or {}
        return {} if "error" in found else found

    printed = {
        (p.setting.batch, p.setting.prompt, p.policy): p.figures for p in papers.named("aircache-table-3").points
    }
    for setting in settings:
        if not row(setting, CONTESTANTS[0]):
            continue
        said = f"{setting.batch} x {setting.prompt}:"
        full = printed.get((setting.batch, setting.prompt, CONTESTANTS[0]))
        for policy in CONTESTANTS[1:3]:
            ratio = row(setting, policy).get("to_full")
            if ratio is None:
                continue
            theirs, keep = printed.get((setting.batch, setting.prompt, policy)), f"{said} keep {policy.keep:.0%}:"
            paper = theirs["decode_seconds"] / full["decode_seconds"] if theirs and full else None
            beside = "" if paper is None else f", {paper:.3f} in the paper"
            falls = paper is None or ratio["decode"] <= paper
            _say(console, falls, f"{keep} decoding takes {ratio['decode']:.3f} of the full cache's{beside}")
            _say(console, ratio["prefill"] < PREFILL, f"{keep} prefill takes {ratio['prefill']:.3f}")
        capped = row(setting, CONTESTANTS[3]).get("to_full")
        if capped is not None and capped["peak"] is not None:
            _say(
                console,
                capped["peak"] < 1,
                f"{said} cap {CAP}: peak memory is {capped['peak']:.3f} of the full cache's",
            )
    for setting in peers:
        found = held.find(_cell(subject, setting))
        if found is not None and "error" not in found["ours"]:
            faster = found["theirs"]["step_seconds"] / found["ours"]["step_seconds"]
            said = f"{setting.batch} x {setting.prompt}: decoding is {faster:.2f} times as fast as"
            _say(console, faster >= PEERS, f"{said} transformers and kvpress")


def _say(console: Console, holds: bool, what: str) -> None:
    console.print(f"{'holds' if holds else 'FALLS SHORT'}: {what}", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
