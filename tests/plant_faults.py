"""Plants the faults of `tests/mutants.json` one by one in a copy of a checkout; the default suite must find them.

    python -m tests.plant_faults [NAME ...] [--checkout FOLDER] [--results FILE] [--whole]

For each fault, the test files that share most words with the faulty code run first; with `--whole`, the rest of the
default suite follows if they pass. A fault is found if a test fails that passes without the fault, or by a "timeout"
if no test ends for `--patience` seconds. Results are written after each fault; a second run continues them, with
`--whole` also for the faults that the nearest tests missed. `python -m tests.mutants` draws more faults.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Imported once, because each run of pytest is a fork. None of them may start threads or JAX's backend.
SHARED = ("pytest", "hypothesis", "jax", "flax.nnx", "scipy.stats", "orbax.checkpoint", "beartype", "transformers")
SELF = "test_plant_faults.py"  # it fails for every fault


class Fault(NamedTuple):
    """A text that occurs once in a file, and its replacement."""

    name: str
    kind: str
    file: str
    old: str
    new: str

    def fits(self, checkout: Path) -> bool:
        """Whether a checkout has the text once."""
        path = checkout / self.file
        return path.exists() and path.read_text().count(self.old) == 1

    def planted(self, text: str) -> str:
        """The text of a file with the fault; raises ValueError unless the replaced text occurs exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}, not once")
        return text.replace(self.old, self.new)


def table() -> list[Fault]:
    """All faults: those made by hand first, then those that `tests.mutants` drew and a person chose."""
    return [Fault(**fault) for fault in json.loads((ROOT / "tests" / "mutants.json").read_text())]


class Copy:
    """A copy of a checkout in which faults are planted; it shares the checkout's cache of compiled programs."""

    def __init__(self, checkout: Path, folder: Path, patience: float):
        self.folder, self.output, self.patience = folder, folder / "output", patience
        self.sound: set[str] = set()  # tests that pass without a fault
        self.broken: set[str] = set()
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        found = subprocess.run(listed, cwd=checkout, check=True, capture_output=True, text=True).stdout
        for name in filter(None, found.split("\0")):
            if (checkout / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, folder / name)
        (checkout / ".jax_cache").mkdir(exist_ok=True)
        (folder / ".jax_cache").symlink_to(checkout / ".jax_cache")
        paths = sorted((folder / "tests").rglob("test_*.py"))
        self.texts = {str(path.relative_to(folder)): path.read_text().lower() for path in paths if path.name != SELF}

    def pytest(self, tests: list[str]) -> tuple[int | None, str | None]:
        """Runs tests in a fork until one fails; returns the exit code, or None after a timeout, and what failed."""
        receive, send = os.pipe()
        if (child := os.fork()) == 0:
            options = ["-q", "-x", "-p", "no:cacheprovider", *(f"--deselect={test}" for test in self.broken)]
            _child(self.folder, self.output, [*options, *tests], send)
        os.close(send)
        left, failed = b"", None
        with os.fdopen(receive, "rb", buffering=0) as reports:
            while select.select([reports], [], [], self.patience)[0]:
                if not (part := reports.read(65536)):
                    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), failed
                *lines, left = (left + part).split(b"\n")
                failed = failed or next((line[1:].decode() for line in lines if line.startswith(b"F")), None)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None, "timeout"

    def found_by(self, fault: Fault, tests: list[str]) -> str | None:
        """The first of these tests that fails because of the fault."""
        path = self.folder / fault.file
        whole = path.read_text()
        while True:
            _write(path, fault.planted(whole))
            try:
                code, failed = self.pytest(tests)
            finally:
                _write(path, whole)
            if code is None:
                return failed
            if code not in (0, 1, 5):  # it could not run a test, which finds no fault
                lines = [line for line in self.output.read_text().splitlines() if line.strip()]
                print(f"{fault.name}: pytest ends with status {code}: {(lines or [''])[-1]}", flush=True)
            if code != 1 or failed is None:
                return None
            if failed not in self.sound and self.pytest([failed])[0] != 0:
                print(f"fails without a fault, left out: {failed}", flush=True)
                self.broken.add(failed)
                continue
            self.sound.add(failed)
            return failed

    def nearest(self, fault: Fault) -> list[str]:
        """All test files, first those that share rare words with the fault: its module and folder, its functions."""
        names = re.findall(r"^(?:def|class) ([a-zA-Z]\w+)", (self.folder / fault.file).read_text(), re.MULTILINE)
        weight = Counter[str]()
        for word in {*Path(fault.file).with_suffix("").parts[1:], *map(str.lower, names)} - {"__init__"}:
            users = [name for name, text in self.texts.items() if word in name + text]
            for name in users:
                weight[name] += (1 + 2 * (word in name)) / len(users)
        return sorted(self.texts, key=lambda name: -weight[name])


def _child(folder: Path, output: Path, arguments: list[str], send: int) -> None:
    """Runs pytest in a checkout and writes one line for every test that ends: P or F, and its id."""
    os.setsid()
    os.chdir(folder)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[0] = os.environ["PYTHONPATH"] = str(folder)
    code = 3
    try:
        import pytest

        class Reports:
            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed or report.when == "teardown":
                    os.write(send, f"{'F' if report.failed else 'P'}{report.nodeid}\n".encode())

        code = int(pytest.main(arguments, plugins=[Reports()]))
    except BaseException as error:
        print(repr(error), flush=True)
    os._exit(code)


def _write(path: Path, text: str) -> None:
    """Writes a module with a time of its own, because Python compares it, in seconds, with that of compiled code."""
    later = path.stat().st_mtime + 2
    path.write_text(text)
    os.utime(path, (later, later))


def measure(copy: Copy, fault: Fault, before: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    """Which test found a fault, or None. `before` is the result of the nearest tests if they have run, else empty."""
    begin, files = time.perf_counter(), copy.nearest(fault)
    stages = [files[:4], files[4:16], files[16:]][2 if before else 0 : 3 if whole else 2]
    found = next((found for tests in stages if (found := copy.found_by(fault, tests))), None)
    seconds = round(time.perf_counter() - begin + before.get("seconds", 0))
    return {"found": found, "ran": "whole suite" if whole else "nearest files", "seconds": seconds}


def shares(results: dict[str, dict[str, Any]]) -> list[str]:
    """One line per kind of fault: how many were found."""
    kinds: dict[str, list[bool]] = {}
    for fault in table():
        if fault.name in results:
            kinds.setdefault(fault.kind, []).append(results[fault.name]["found"] is not None)
    kinds["all"] = [found for kind in kinds.values() for found in kind]
    return [f"{kind}: {sum(found)} of {len(found)} found" for kind, found in kinds.items()]


def main() -> int:
    """Prints one line per fault and per kind; returns 1 if a fault was missed."""
    parser = argparse.ArgumentParser(description="Plants faults one by one; the default suite must find them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="any part of a fault's name (default: all faults)")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose code and tests are used (default: this one)")
    parser.add_argument("--results", type=Path, help="JSON file of results, which is continued")
    parser.add_argument("--whole", action="store_true", help="run the rest of the suite if the nearest tests pass")
    parser.add_argument("--patience", type=float, default=300, help="seconds without the end of a test (default: 300)")
    args = parser.parse_args()
    named = [fault for fault in table() if not args.names or any(name in fault.name for name in args.names)]
    chosen = [fault for fault in named if fault.fits(args.checkout)]  # another checkout may not have all of this code
    if not chosen:
        parser.error(f"no such fault; choose one of {', '.join(fault.name for fault in table())}")
    exists = args.results is not None and args.results.exists()
    results: dict[str, dict[str, Any]] = json.loads(args.results.read_text()) if exists else {}
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.dont_write_bytecode = False
    for name in SHARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(args.checkout.resolve(), Path(folder), args.patience)
        for fault in chosen:
            before = results.get(fault.name, {})
            if before and (before["found"] or not args.whole or before["ran"] == "whole suite"):
                continue
            results[fault.name] = found = measure(copy, fault, before, whole=args.whole)
            print(f"{fault.name}: {found['found'] or 'MISSED'} ({found['seconds']} s)", flush=True)
            if args.results is not None:
                args.results.write_text(json.dumps(results, indent=1) + "\n")
    asked = {fault.name: results[fault.name] for fault in chosen}
    print("\n".join(shares(asked)))
    return int(any(found["found"] is None for found in asked.values()))


if __name__ == "__main__":
    sys.exit(main())
