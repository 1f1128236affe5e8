"""Checks a new GPU: its limits, every kernel against float64, and the demo model's tokens against the CPU's.

    python -m benchmarks.first_contact [--out FILE.json] [--minutes 9]      repeat until everything is done
    python -m benchmarks.first_contact --dry-run        the same steps, tiny, on a CPU with kernels interpreted

It needs no git, network or torch. Each result is written at once. An item counts as failed from its start until its
result is written, because a kernel that reads invalid memory ends the process: start the command again, and it
continues after this item. `benchmarks.kernels`, `vlkv bench` and `benchmarks.papers.speed` measure the speed of the
kernels, of each method, and at the settings of the papers' tables.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
import numpy as np

import vlkv
from benchmarks import checks, clock
from benchmarks.checks import Case
from pallas_kernels.dispatch import target_platform
from vlkv import policies
from vlkv.mini import CHECKPOINT, pages
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.benching.results import Results

RESULT = Path(__file__).parent / "results" / "first_contact.json"
AHEAD = 12  # kernels that are compiled ahead; not more, because prepared cases hold arrays


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the steps."""

    copy_bytes: int = 2**31
    product: int = 8192
    answers: tuple[str, ...] = ("full", "snapkv(keep=0.2)", "h2o(keep=0.2)", "avl(keep=0.2, core=0.1)")
    new: int = 24
    calls: int | None = None  # of a limit in one program; None: as many as the clock needs


DRY = Sizes(copy_bytes=2**20, product=64, answers=("h2o(keep=0.2)",), new=3, calls=2)
DRY_CASES = (
    Case("decode_attention", 64, 2, "float32", 96, full=True),
    Case("core_attention", 80, 7, "bfloat16", 96, softmax_n=1.0),
    Case("attention_mass", 64, 1, "float32", 48, statistic="square"),
    Case("attention_mass_rows", 64, 8, "bfloat16", 48, full=True),
    Case("prefill_attention", 64, 2, "bfloat16", 96),
)


@dataclasses.dataclass
class Run:
    """Sizes, results so far, and the time at which no further item starts."""

    sizes: Sizes
    dry: bool
    results: Results
    deadline: float

    def missing(self, step: str, items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(name, x) for name, x in items if self.results.find({"step": step, "item": name}) is None]

    def items(self, step: str, items: Iterable[tuple[str, Any]], do: Callable[[Any], dict[str, Any]]) -> None:
        """Writes the result of `do`, or its error, for each item without a result, until the deadline."""
        for name, item in self.missing(step, items):
            if time.time() > self.deadline:
                raise TimeoutError
            cell, begin = {"step": step, "item": name}, time.time()
            self.results.add(cell, {"failed": "its process ended"})
            try:
                result = do(item)
            except Exception as error:  # a failure is a result, and the other items still run
                text = "".join(traceback.format_exception(error))
                result = {"failed": f"{type(error).__name__}: {error}"[:400], "traceback": text[-1500:]}
            self.results.add(cell, {**result, "took": round(time.time() - begin, 2)})
            shown = {key: value for key, value in result.items() if key != "traceback"}
            print(f"{step}: {name}: {shown}"[:300], flush=True)


def versions(run: Run) -> None:
    """Packages, device and driver; `machine` in the file of results has the others."""

    def packages() -> dict[str, Any]:
        installed = {dist.name: dist.version for dist in distributions()}
        names = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13")
        return {name: installed[name] for name in names if name in installed}

    def device() -> dict[str, Any]:
        first = jax.local_devices()[0]
        stats = first.memory_stats() or {}
        about = {"platform": first.platform, "kind": first.device_kind, "memory_bytes": stats.get("bytes_limit")}
        return {**about, "compute_capability": getattr(first, "compute_capability", None)}

    def driver() -> dict[str, Any]:
        asked = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=15)
        return {"asked": asked, "said": done.stdout.strip()}

    parts = [("packages", packages), ("device", device), *([] if run.dry else [("driver", driver)])]
    run.items("versions", parts, lambda do: do())


def limits(run: Run) -> None:
    """The device's highest rates of copying, reading, and products of bfloat16 matrices."""

    def measure(what: tuple[Callable[..., Any], int]) -> dict[str, Any]:
        rate, timing = what[0](what[1], run.sizes.calls)
        return {"per_second": rate, "size": what[1], **timing.row()}

    size = run.sizes.copy_bytes
    rates = {"copy": clock.copy_bandwidth, "read": clock.read_bandwidth, "product": clock.product_rate}
    items = [(name, (rate, run.sizes.product if name == "product" else size)) for name, rate in rates.items()]
    run.items("limits", items, measure)


def kernels(run: Run) -> None:
    """Compares every kernel with float64; several threads compile the next kernels ahead."""
    cases = DRY_CASES if run.dry else tuple(checks.cases())
    wanted = [case for _, case in run.missing("kernels", [(case.name, case) for case in cases])]
    with concurrent.futures.ThreadPoolExecutor(max(2, min(8, (os.cpu_count() or 2) - 2))) as pool:
        prepared: dict[str, Any] = {}

        def check(i: int) -> dict[str, Any]:
            for case in wanted[i : i + AHEAD]:
                if case.name not in prepared:
                    prepared[case.name] = pool.submit(checks.prepare, case, target_platform())
            try:
                result = prepared.pop(wanted[i].name).result().run()
            except ValueError as error:
                if "cannot run this" not in str(error):
                    raise
                return {"skipped": str(error)[:400]}  # a head size that this device's kernel does not take
            return {name: value for name, value in result.items() if name != "case"}

        try:
            run.items("kernels", [(case.name, i) for i, case in enumerate(wanted)], check)
        finally:
            pool.shutdown(cancel_futures=True)


def tokens(run: Run) -> None:
    """Compares the demo model's answers on this device and on the host's CPU, in float32 at full precision."""
    params, processor = vlkv.load(CHECKPOINT)
    (asked,) = pages.held_out(1)
    inputs = processor(asked.image, asked.question)
    here, host = jax.local_devices()[0], jax.local_devices(backend="cpu")[0]

    def answer(text: str) -> dict[str, Any]:
        policy = policies.make(text)
        sampling = vlkv.Greedy(max_new_tokens=run.sizes.new)

        def on(device: Any) -> Any:
            with jax.default_matmul_precision("highest"):
                output = vlkv.generate(
                    jax.device_put(params, device), jax.device_put(inputs, device), policy=policy, sampling=sampling
                )
            return np.asarray(output.tokens[0])

        with concurrent.futures.ThreadPoolExecutor(1 if here == host else 2) as pool:
            got, want = pool.map(on, (here, host))
        same = int(np.argmin(got == want)) if not np.array_equal(got, want) else len(want)
        equal = {"passed": bool(same == len(want)), "tokens": len(want), "equal_until": same}
        return {**equal, "answer": processor.decode(got)[:200]}

    run.items("tokens", [(text, text) for text in run.sizes.answers], answer)


STEPS: dict[str, Callable[[Run], None]] = {step.__name__: step for step in (versions, limits, kernels, tokens)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the steps; exits with 0 if everything is done, every check passed and nothing failed."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT, help="file of results, from which a run resumes")
    parser.add_argument("--minutes", type=float, default=9, help="no item starts later")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    cache = Path(tempfile.gettempdir()) / "vlkv_first_contact"
    parser.add_argument("--cache", type=Path, default=cache, help="folder for compiled programs, on a local disk")
    args = parser.parse_args(argv)
    problems: list[str] = []
    return guarded(lambda: problems.extend(run_steps(args))) or int(bool(problems))


def run_steps(args: argparse.Namespace) -> list[str]:
    """Runs the steps and prints a summary; returns what did not pass."""
    deadline = time.time() + 60 * args.minutes
    if args.dry_run:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(args.cache))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = Results(args.out, "python -m benchmarks.first_contact")
    run = Run(DRY if args.dry_run else Sizes(), args.dry_run, results, deadline)
    try:
        for name in args.steps:
            STEPS[name](run)
    except TimeoutError:
        print("no time left: start the command again")
        return ["time"]
    checked = [row for row in results.rows if "passed" in row]
    failed = [row["cell"] for row in results.rows if "failed" in row or not row.get("passed", True)]
    problems = [f"{cell['step']}: {cell['item']}" for cell in failed]
    print(f"{sum(row['passed'] for row in checked)} of {len(checked)} checks passed", *problems, sep="\n")
    return problems


if __name__ == "__main__":
    raise SystemExit(main())
