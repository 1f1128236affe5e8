"""Lists every table and figure of the five papers, the command that repeats its protocol, and what is missing for it.

    python -m benchmarks.papers [--paper NAME] [--dry-run] [--json]

MODEL is a checkpoint folder and DATA.jsonl a data set as for `vlkv eval`; the repository contains neither. The command
of CSP's Fig. 6 calibrates its `c`: it prints the mean share of cross attention (Sec. 4.3).
`--dry-run` parses every command, builds inputs and evaluates each policy's program with `eval_shape`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import shlex
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax

COUNTS = {  # tables and figures of each paper
    "AirCache": (13, 9), "PrefixKV": (22, 6), "LightKV": (10, 7), "CSP": (5, 7), "A-VL": (3, 10),
}  # fmt: skip
_EVAL = "vlkv eval DATA.jsonl --model MODEL --policy"  # written EVAL below
_INSPECT = "vlkv inspect DATA.jsonl --model MODEL --what"  # written INSPECT below
_DATA = "the checkpoint, and the data set as JSONL"
_LIST = "nothing to measure: it explains or lists"
_VISION = "--scope vision --out OUT"
_RIVALS = "EVAL full h2o elasticcache prefixkv snapkv aircache"
_FOUR = "--keep 0.5 0.1 0.05 0.01"
_OPENQ = "EVAL full streamingllm h2o elasticcache prefixkv"
_NINE = "--keep 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 --metric perplexity self-rouge-l --out OUT"
_PPL = "--keep 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 --metric perplexity --out OUT"
_MILE = "EVAL full h2o snapkv roco lookm csp --keep 0.1 --metric exact rouge-l --out OUT"
_LIGHT = "lightkv fastv(keep=0.53) tome(keep=0.125) pitome(keep=0.125) tofu(keep=0.125)"
_QUOTED = " ".join(f"'{name}'" if "(" in name else name for name in _LIGHT.split())
_MERGE = f"EVAL full {_QUOTED} --metric exact cider --out OUT"
_ELITE = " ".join(f"'aircache(alpha={a})'" for a in (0.99, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6))
_PARTS = " ".join(
    f"'aircache({option})'"
    for option in ('window="recent",rows=16', 'window="recent"', 'window="text"', 'window="vision"',
                   'allocation="uniform"', 'allocation="pyramid"', 'allocation="strength"', 'allocation="skewness"')
)  # fmt: skip
_AVL = " ".join(
    f"'avl({option})'"
    for option in ("keep=0.4,core=None", "keep=0.4", "keep=0.45,prefill=0.9", "keep=0.45,prefill=0.9,text=0.5")
)
_RATES = " ".join(f"'lightkv(rate={rate})'" for rate in (0.55, 0.4, 0.3, 0.2))


class Item(NamedTuple):
    """A table or a figure."""

    paper: str
    what: str
    title: str
    command: str  # empty if no command repeats it
    missing: str


# By number: title, command, and what is missing to repeat the paper's result.
_TABLES: dict[str, list[tuple[str, str, str]]] = {
    "AirCache": [
        ("VQA, three models", f"{_RIVALS} {_FOUR} --metric anls {_VISION}", _DATA),
        ("multiple choice, judgment, video", f"{_RIVALS} --keep 0.5 0.1 0.01 --metric exact {_VISION}",
         f"{_DATA}; a judge for MMBench-Video"),
        ("latency and throughput", "python -m benchmarks.published aircache-table-3", "an A100 80 GB"),
        ("token pruning", "python -m benchmarks.published aircache-table-4", f"an A100 80 GB; for the scores {_DATA}"),
        ("components", f"EVAL aircache {_PARTS} --keep 0.01 {_VISION}", _DATA),
        ("unified compression (starred)", "EVAL h2o aircache "
         "'h2o(scope=\"all\")' 'aircache(scope=\"all\")' --keep 0.5 0.1 0.05 0.01 --out OUT",
         f"{_DATA}; seconds: python -m benchmarks.published aircache-table-6"),
        ("numbers of tokens", "", f"{_LIST}; needs the data sets"),
        ("VQA, sizes of InternVL2", f"{_RIVALS} {_FOUR} --metric anls {_VISION}", _DATA),
        ("latency on InternVL2 and Qwen2-VL", "python -m benchmarks.published aircache-table-9", "an A100 80 GB"),
        ("MMBench-Video in detail", f"{_RIVALS} --keep 0.5 0.1 0.01 {_VISION}", f"{_DATA}; a judge"),
        ("merging", "EVAL " + " ".join(
            f"'aircache(merging={share})'" for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)) + f" --keep 0.1 0.01 {_VISION}",
         _DATA),
        ("relevance threshold", f"EVAL {_ELITE} --keep 0.1 0.01 {_VISION}", _DATA),
        ("divergence of budgets", "INSPECT divergence --policy aircache --keep 0.1", _DATA),
    ],
    "PrefixKV": [
        ("LLaVA-Description", f"{_OPENQ} pyramidkv {_NINE}", _DATA),
        ("MM-Vet", f"{_OPENQ} pyramidkv {_NINE}", _DATA),
        ("inference time", "python -m benchmarks.published prefixkv-table-3", "an A100"),
        ("prefix configuration", f"EVAL elasticcache pyramidkv prefixkv {_PPL}", _DATA),
        ("number of samples", f"EVAL prefixkv {_PPL}", f"{_DATA}; vlkv profile first"),
        ("offline estimation", f"EVAL prefixkv {_PPL}", f"{_DATA}; vlkv profile first"),
        ("deviations", "INSPECT budgets --policy prefixkv --keep 0.5", _DATA),
        ("robustness to domain", f"EVAL prefixkv {_PPL}", f"{_DATA}; a profile each"),
        ("instruction complexity", f"EVAL prefixkv {_PPL}", f"{_DATA}; a profile each"),
        ("robustness to delta", "", f"{_DATA}; vlkv.profiles.search is the function"),
        ("robustness to steps", "", f"{_DATA}; vlkv.profiles.search is the function"),
        ("merging", "EVAL prefixkv 'prefixkv(merging=\"position\")' "
         f"'prefixkv(merging=\"cosine\")' {_PPL}", _DATA),
        ("Qwen-VL", f"{_OPENQ} {_PPL}", _DATA),
        ("LongBench and needles", "EVAL full 'streamingllm(budget=128)' 'h2o(budget=128)' 'pyramidkv(budget=128)' "
         "'prefixkv(budget=128)' --metric needle f1 rouge-l --out OUT",
         f"{_DATA}: python -m benchmarks.longbench makes and scores it"),
        ("with quantisation", "EVAL 'kivi(window=128)' 'kivi(bits=4,window=128)' prefixkv --keep 0.5 --out OUT",
         _DATA),
        ("several rounds, long text", f"{_OPENQ} --keep 0.5 --metric perplexity --out OUT", f"{_DATA}, not released"),
        ("high resolution", f"{_OPENQ} --keep 0.5 --metric perplexity --out OUT", _DATA),
        *[(f"an answer as an example, {n}", f"{_OPENQ} --keep 0.2 --out OUT", "the checkpoint and the picture")
          for n in range(18, 23)],
    ],
    "LightKV": [
        ("LLaVA at 55 %", _MERGE,
         f"{_DATA}; FLOPs, bytes and the layers of 13B: python -m benchmarks.published lightkv-table-1"),
        ("InternVL2-8B", _MERGE, f"{_DATA}; FLOPs and bytes: python -m benchmarks.published lightkv-table-2"),
        ("EVE-7B", "EVAL full 'fastv(keep=0.53)' lightkv --out OUT", _DATA),
        ("time to the first token", "python -m benchmarks.published lightkv-table-4", "an A100"),
        ("window sizes", "EVAL " + " ".join(
            f"'lightkv(layers=({after},),windows=({w},))'" for after in (3, 14) for w in (1, 2, 4)) + " --out OUT",
         _DATA),
        ("operations and bytes", "python -m benchmarks.published lightkv-table-6", "nothing: it is counted"),
        ("Qwen2.5-VL at 55 %", _MERGE, _DATA),
        ("Qwen2.5-VL at four rates", f"EVAL full {_RATES} --out OUT", _DATA),
        ("windows on 13B", "EVAL full lightkv 'lightkv(windows=(6,4,2))' --out OUT", _DATA),
        ("latency", "python -m benchmarks.published lightkv-table-10", "an A100"),
    ],
    "CSP": [
        ("MileBench", _MILE, f"{_DATA}: python -m benchmarks.milebench reads it"),
        ("latency and memory", "python -m benchmarks.published csp-table-2", "an RTX 4090, and samples of ALFRED"),
        ("InternVL and MobileVLM", _MILE, _DATA),
        ("ratios by task", "EVAL " + " ".join(
            f"'csp(c={c})'" for c in (0.0, 0.1, 0.5, 0.9, 1.0)) + " --keep 0.1 --out OUT", _DATA),
        ("the data sets", "", _LIST),
    ],
    "A-VL": [
        ("parameters", "", _LIST),
        ("six data sets", "EVAL full 'fastv(keep=0.5)' 'h2o(keep=0.5,recent=0.75)' "
         "'avl(keep=0.5)' --metric anls vqa relaxed ocrbench cider --out OUT", _DATA),
        ("settings", f"EVAL full {_AVL} --metric anls ocrbench cider --out OUT",
         f"{_DATA}; memory: python -m benchmarks.published a-vl-table-3"),
    ],
}  # fmt: skip
_FIGURES: dict[str, list[tuple[str, str, str]]] = {
    "AirCache": [
        ("consistency of observers", "INSPECT observers --policy aircache --keep 0.1", _DATA), ("overview", "", _LIST),
        ("strength and skewness", "INSPECT strength --policy aircache --keep 0.1", _DATA),
        ("one token, ChatQA and TextVQA", "INSPECT ranking --policy aircache --keep 0.1", _DATA),
        ("one token, InfoVQA and DocVQA", "INSPECT ranking --policy aircache --keep 0.1", _DATA),
        *[(f"an answer as an example, {n}", "EVAL full h2o elasticcache aircache "
           f"--keep 0.01 {_VISION}", "the checkpoint and the picture") for n in range(6, 10)],
    ],
    "PrefixKV": [
        ("comparison", "", _LIST), ("Lorenz curves", "INSPECT lorenz --policy prefixkv --keep 0.5", _DATA),
        ("overview", "", _LIST),
        ("budgets of 100 samples", "INSPECT budgets --policy prefixkv --keep 0.5 --samples 100", _DATA),
        ("error of features", "INSPECT error --policy prefixkv --keep 0.5", _DATA),
        ("budgets on Qwen-VL", "INSPECT budgets --policy prefixkv --keep 0.5", _DATA),
    ],
    "LightKV": [
        ("memory in prefill", "INSPECT cost --policy lightkv", "an A100 for measured memory"),
        ("overview", "", _LIST), ("windows", "", _LIST),
        ("rates on Qwen2.5-VL", f"EVAL full {_RATES} --out OUT", _DATA),
        ("position of the method", "", _LIST),
        ("layers", "EVAL " + " ".join(
            f"'lightkv(layers=({after},),windows=(4,))'" for after in (3, 5)) + " --out OUT", _DATA),
        ("survival", "INSPECT merged --policy lightkv --samples 1", _DATA),
    ],
    "CSP": [
        ("self and cross attention", "INSPECT divergence --policy csp --keep 0.2", _DATA),
        ("overview", "", _LIST),
        ("ratios", "EVAL " + " ".join(
            f"'csp(c={c})'" for c in (0.0, 0.1, 0.5, 0.9, 1.0)) + " --keep 0.1 --out OUT", _DATA),
        ("n-softmax and regions", "EVAL csp 'csp(score_n=0,decode_n=0)' "
         "'csp(regions=False)' 'csp(regions=False,score_n=0,decode_n=0)' --keep 0.1 --out OUT", _DATA),
        ("budgets", "EVAL full h2o snapkv csp --keep 0.1 0.2 0.3 0.6 --out OUT", _DATA),
        ("densities", "INSPECT densities --policy csp --keep 0.2", _DATA),
        ("divergence by data set", "INSPECT divergence --policy csp --keep 0.2", _DATA),
    ],
    "A-VL": [
        ("attention by type of token", "INSPECT attention", _DATA), ("the sequence", "", _LIST),
        ("vision attention on the picture", "INSPECT patches --samples 1", _DATA),
        ("concordance of layers", "INSPECT concordance", _DATA),
        ("concordance of steps", "INSPECT concordance", _DATA),
        ("the design", "", _LIST), ("the operator", "", _LIST),
        ("time of the operator", "python -m benchmarks.core_attention", "an A40"),
        ("S, C and K", "INSPECT sweep --policy avl --keep 0.4", _DATA),
        ("P and T", "INSPECT sweep --policy avl --keep 0.4", _DATA),
    ],
}  # fmt: skip


def items() -> Iterator[Item]:
    """All tables and figures, paper by paper."""
    for paper in COUNTS:
        for kind, lists in (("Table", _TABLES), ("Figure", _FIGURES)):
            for number, (title, command, missing) in enumerate(lists[paper], start=1):
                yield Item(
                    paper,
                    f"{kind} {number}",
                    title,
                    command.replace("EVAL", _EVAL).replace("INSPECT", _INSPECT),
                    missing.replace("EVAL", _EVAL),
                )


def policies_of(command: str) -> list[Any]:
    """The policies that a command runs, after its own parser has checked the options."""
    from vlkv import policies
    from vlkv.cli import build_parser
    from vlkv.tools.commands.options import policies_from, policy_from

    program, *words = shlex.split(command)
    if program == "python":
        module = importlib.import_module(words[1])
        args = module.parser().parse_args(words[2:])
        return [point.policy for point in module.TABLES[args.table].points] if hasattr(args, "table") else []
    args = build_parser(words[0]).parse_args(words)
    if words[0] == "inspect":
        return [policies.Full() if args.policy is None else policy_from(args, lambda: None)]  # type: ignore[arg-type, return-value]
    return list(policies_from(args, lambda: None))  # type: ignore[arg-type, return-value]


def dry_run(policy: Any) -> None:
    """Builds inputs and evaluates `generate` with `eval_shape`, on the demo model with a depth that the policy accepts.

    Raises:
        InputError: the policy accepts none of the depths 4, 8 and 40.
    """
    from vlkv.errors import InputError
    from vlkv.generation.generate import generate
    from vlkv.tools.benching.programs import endless
    from vlkv.tools.benching.shapes import make_inputs
    from vlkv.tools.benching.subjects import find

    subject = find("mini")
    for layers in (4, 8, 40):
        try:
            policy.check_model(layers)
            break
        except InputError:
            if layers == 40:
                raise
    config = dataclasses.replace(subject.config, decoder=dataclasses.replace(subject.config.decoder, layers=layers))
    shapes = dataclasses.replace(subject, config=config).shapes
    inputs = make_inputs(config, 1, 140, 100)
    run = partial(generate, policy=policy, sampling=endless(2), key=jax.random.key(0))
    jax.eval_shape(run, shapes, inputs)


def main() -> None:
    """Prints the list, and with --dry-run checks its commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", choices=list(COUNTS), help="only this one")
    parser.add_argument("--dry-run", action="store_true", help="parse every command and evaluate its programs' shapes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    chosen = [item for item in items() if args.paper in (None, item.paper)]
    if args.json:
        print(json.dumps([item._asdict() for item in chosen], indent=1))
        return
    done: set[Any] = set()
    for item in chosen:
        print(f"{item.paper}, {item.what}: {item.title}")
        print(f"    {item.command or 'no command'}\n    missing: {item.missing}", flush=True)
        if args.dry_run and item.command:
            for policy in policies_of(item.command):
                if policy not in done:
                    done.add(policy)
                    dry_run(policy)


if __name__ == "__main__":
    main()
