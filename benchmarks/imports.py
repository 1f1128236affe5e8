"""Measures the seconds that `import vlkv`, and all its public names, add to the imports of jax and flax.

    python -m benchmarks.imports

Medians over new processes that run alternately. Measures processor time, because other load changes it less than wall
time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

CODE = {
    "jax and flax": "import jax, flax.nnx",
    "and vlkv": "import jax, flax.nnx, vlkv",
    "and all public names": "import jax, flax.nnx, vlkv; [getattr(vlkv, name) for name in vlkv.__all__]",
}


def main() -> None:
    """Prints one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="processes of each kind (default: 7)")
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in CODE}
    for _ in range(rounds):
        for name, code in CODE.items():
            timed = f"{code}; import time; print(time.process_time())"
            run = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True)
            seconds[name].append(float(run.stdout))
    base = statistics.median(seconds["jax and flax"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:22} {median:.2f} s, {median - base:+.2f}")


if __name__ == "__main__":
    main()
