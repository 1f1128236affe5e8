"""The command: runs cases and writes the report."""

import argparse
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

OUTCOMES = ("equal", "refused", "unusable", "accepted", "differs")
# Differences from transformers that are meant, with their reasons: (part of "family: case", reason).
ACCEPTED: tuple[tuple[str, str], ...] = ()


def reason(case: str) -> str | None:
    """Why the case may differ; None: it may not."""
    return next((why for part, why in ACCEPTED if part in case), None)


def fuzz(families: list[str] | None = None, sample: int | None = None, seed: int = 0) -> dict[str, Any]:
    """The report of the families with these names of configs and image processors: counts of outcomes, and differences.

    Of each config, `sample` cases are drawn by chance; None: all. Those of images are fast.
    """
    from benchmarks.fuzz import configs, images
    from tests.families import tiny

    report: dict[str, Any] = {"config": {}, "images": {}, "accepted": [], "differs": []}
    jobs = [("config", family, configs.Base, (family,)) for family in configs.FAMILIES]
    processors = ((family, base) for family, bases in tiny.PROCESSORS.items() for base in bases)
    jobs += [("images", family, images.Base, (family, *base)) for family, base in processors]
    for part, family, kind, arguments in jobs:
        if families and family not in families:
            continue
        begin, base = time.monotonic(), kind(*arguments)
        cases = all_cases = list(base.cases())
        if sample is not None and part == "config":
            cases = random.Random(seed).sample(cases, min(sample, len(cases)))
        counts = Counter[str]()
        for label, raw in cases:
            outcome, detail = base.outcome(raw)
            name = f"{family} {part}: {label}"
            why = reason(name) if outcome == "differs" else None
            outcome = outcome if why is None else "accepted"
            counts[outcome] += 1
            if outcome in ("accepted", "differs"):
                report[outcome].append({"case": name, "detail": detail, **({"reason": why} if why else {})})
        counts["of"] = len(all_cases)
        report[part].setdefault(family, Counter()).update(counts)
        print(f"{part} {family}: {dict(counts)} in {time.monotonic() - begin:.0f} s", flush=True)
    names = (*OUTCOMES, "of")  # the last one: how many cases there are
    for part in ("config", "images"):
        report[part] = {family: {name: counts[name] for name in names} for family, counts in report[part].items()}
    return _counted(report)


def _counted(report: dict[str, Any]) -> dict[str, Any]:
    rows = [*report["config"].values(), *report["images"].values()]
    return {"tried": {name: sum(row[name] for row in rows) for name in OUTCOMES}, **report}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--families", nargs="+", help="of configs and image processors (default: all)")
    parser.add_argument("--sample", type=int, help="cases of each config, drawn by chance (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--out", type=Path, required=True, help="the report; families that it has already are kept")
    args = parser.parse_args()
    from benchmarks.fuzz.configs import FAMILIES
    from tests.families.tiny import PROCESSORS

    for family in args.families or dict.fromkeys((*FAMILIES, *PROCESSORS)):  # written after each
        report = fuzz([family], args.sample, args.seed)
        for case in report["differs"]:
            print("differs:", case["case"], case["detail"], flush=True)
        if args.out.is_file():
            report = joined(json.loads(args.out.read_text()), report)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The report `old`, in which the families of `new` are replaced."""
    report: dict[str, Any] = {part: {**old[part], **new[part]} for part in ("config", "images")}
    replaced = tuple(f"{family} {part}: " for part in ("config", "images") for family in new[part])
    for kind in ("accepted", "differs"):
        report[kind] = [case for case in old[kind] if not case["case"].startswith(replaced)] + new[kind]
    return _counted(report)


if __name__ == "__main__":
    main()
