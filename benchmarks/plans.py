"""Plans published models for TPU slices, with the full cache and a compressed one: `python -m benchmarks.plans`.

Every plan is a `vlkv plan` in its own process, and its row is written at once, so that an interrupted run can be
resumed. A row says how long the plan took, including compilation, and how much the compiler's bytes of arguments differ
from those computed from shapes and tile padding.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from vlkv.files import write_json
from vlkv.tools.benching import machine

_RESULT = Path(__file__).parent / "results" / "plans.json"
_POLICY = ["--policy", "aircache", "--keep", "0.1"]
_NEW = 512
_PROMPTS = {  # tokens; LLaVA-1.5 has 4096 positions
    "llava-1.5-7b": 3072, "llava-1.5-13b": 3072, "llava-onevision-7b": 8192, "qwen2-vl-7b": 8192, "internvl2-8b": 8192,
    "internvl2-26b": 8192,
}  # fmt: skip
_BATCH = {"v5e:1x1": 1, "v5e:4x4": 16, "v5e:16x16": 256}
_SECONDS = {"internvl2-26b": 300}  # limit on the time of a plan, on two cores
_DEFAULT_SECONDS = 120
_ONE_CHIP = ("llava-1.5-7b", "v5e:1x1")


def cases() -> list[tuple[str, str]]:
    """Model and topology: two slices for every model, and one chip for a model that fits into it."""
    return [_ONE_CHIP, *((model, topology) for topology in ("v5e:4x4", "v5e:16x16") for model in _PROMPTS)]


def run(model: str, topology: str, thorough: bool) -> dict[str, Any]:
    """Runs one plan and returns its row."""
    command = [
        "plan", model, "--topology", topology, "--batch", str(_BATCH[topology]), "--prompt", str(_PROMPTS[model]),
        "--new", str(_NEW), *_POLICY, *(["--thorough"] if thorough else []), "--json",
    ]  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "vlkv.cli", *command], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    row: dict[str, Any] = {
        "model": model, "topology": topology, "thorough": thorough, "command": "vlkv " + " ".join(command),
        "seconds": round(seconds, 1), "allowed_seconds": _SECONDS.get(model, _DEFAULT_SECONDS),
    }  # fmt: skip
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-1][:500] if done.stderr.strip() else "no message"}
    plan = json.loads(done.stdout)
    off = [
        abs(step["compiler"]["arguments"] / step["argument_bytes"] - 1)
        for one in plan["runs"] for step in (one["prefill"], one["decode_step"]) if "compiler" in step
    ]  # fmt: skip
    return row | {"argument_bytes_off": max(off, default=None), "plan": plan}


def main() -> None:
    """Runs the missing plans, prints a line per plan, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=_PROMPTS, nargs="+", default=list(_PROMPTS))
    parser.add_argument("--topology", choices=_BATCH, nargs="+", default=list(_BATCH))
    parser.add_argument("--thorough", action="store_true", help="compile with all optimisations")
    parser.add_argument("--again", action="store_true", help="run plans even if the file has them")
    parser.add_argument("--output", type=Path, default=_RESULT)
    args = parser.parse_args()
    rows = json.loads(args.output.read_text())["results"] if args.output.is_file() else []
    about = machine.describe() | {"libtpu": importlib.metadata.version("libtpu")}
    for model, topology in cases():
        case = model, topology, args.thorough
        found = [row for row in rows if (row["model"], row["topology"], row["thorough"]) == case]
        if model not in args.model or topology not in args.topology:
            continue
        if not found or "error" in found[0] or args.again:
            row = run(model, topology, args.thorough) | {"commit": about["commit"]}
            rows = [other for other in rows if other not in found] + [row]
            write_json(args.output, {"machine": about, "results": rows})
            found = [row]
        _show(found[0])


def _show(row: dict[str, Any]) -> None:
    head = f"{row['model']:<20} {row['topology']:<10} {row['seconds']:>6} s"
    if "error" in row:
        print(f"{head}  FAILED {row['error']}", flush=True)
        return
    runs = []
    for one in row["plan"]["runs"]:
        rate = one["tokens_per_second"]
        fits = "fits" if one["fits"] else "does not fit"
        compiled = one["prefill"]["compile_seconds"] + one["decode_step"]["compile_seconds"]
        used = one["bytes_per_chip"]["used"] / 2**30
        runs.append(
            f"{one['policy']} {used:.2f} GiB {fits}, {rate and round(rate)} tokens/s, compiled in {compiled:.0f} s"
        )
    print(f"{head}  arguments off by {100 * row['argument_bytes_off']:.2f} %  " + "; ".join(runs), flush=True)


if __name__ == "__main__":
    main()
