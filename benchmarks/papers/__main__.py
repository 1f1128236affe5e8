"""Lists every table and figure of the five papers, the commands that repeat its protocol, and what is missing for it.

    python -m benchmarks.papers [--paper NAME] [--check] [--dry-run]
    python -m benchmarks.papers --run "AirCache, Table 1" --model MODEL --data DATA.jsonl --out OUT

Above its commands, a table has the paper's settings with their places, ours, and the differences with their reasons;
`--check` compares all commands with them. MODEL is a checkpoint folder, and DATA.jsonl a data set as for `vlkv eval`;
the repository contains neither. `--run` runs all commands of a table on one model and data set, and prints each with
the rows and columns of the paper. Other questions than those that are evaluated, such as SAMPLES.jsonl for a profile,
are given by `--file SAMPLES.jsonl=PATH`. `--dry-run` parses every command, builds inputs and evaluates each policy's
program with `eval_shape`.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.papers import settings, tables
from benchmarks.papers.tables import DATA, JUDGE, MODEL, OUT, PAPERS, Evaluation, Item, Row, Run, items
from vlkv import loading
from vlkv.cli import main as vlkv
from vlkv.compression.checking import require_layers
from vlkv.compression.stages import stage_of
from vlkv.errors import InputError
from vlkv.files import read_json
from vlkv.generation.generate import generate
from vlkv.policies import Policy
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.benching.programs import endless
from vlkv.tools.benching.settings import find, make_inputs


def policies_of(run: Run) -> list[Policy]:
    """The policies of a run, by the command's own parser: of a script, those of its table.

    A search takes the place of the user's profiles, which need not exist.
    """
    if (timed := settings.timed_table(run)) is not None:
        return [point.policy for point in timed.points]
    words = [re.sub(r"profile='[^']*'", "profile=None", word) for word in run.words]
    return tables.plan(words, lambda: find("mini").config)  # a policy of one's own is tried on its shapes


def dry_run(policy: Policy) -> None:
    """Builds inputs and evaluates `generate` with `eval_shape`, on the demo model with a depth that the policy accepts.

    Raises:
        InputError: the policy accepts none of the depths 4, 8 and 40.
    """
    subject = find("mini")
    for layers in (4, 8, 40):
        try:
            require_layers(policy, layers)
            break
        except InputError:
            if layers == 40:
                raise
    config = dataclasses.replace(subject.config, decoder=dataclasses.replace(subject.config.decoder, layers=layers))
    shapes = dataclasses.replace(subject, config=config).shapes
    inputs = make_inputs(config, 1, 140, 100)
    run = partial(generate, policy=policy, sampling=endless(2), key=jax.random.key(0))
    jax.eval_shape(run, shapes, inputs)


# --- running a table ------------------------------------------------------------------------------------------------


def grid(run: Evaluation, rows: Sequence[dict[str, Any]], plan: Sequence[Policy], config: tables.Config) -> Table:
    """The results of a run with the rows and columns of the paper: the keeps, each with its metrics.

    `plan` has the policies of the rows of `vlkv eval`'s results, and `config` returns the model's config.
    """
    metrics = ["judge"] if run.judged else [*run.metrics]
    keeps: list[float | None] = [*run.keeps] or [None]
    names = [f"{metric}" if keep is None else f"{keep:.3g} {metric}" for keep in keeps for metric in metrics]
    table = Table("method", *names, title=run.on)
    for name in dict.fromkeys(row.name for row in run.rows):
        same = [row for row in run.rows if row.name == name]  # several: one method with other options at each keep
        cells = []
        for keep in keeps:
            policies = [run.policy(row, keep, config) for row in same]
            chosen = next(
                (p for p in policies if keep is None or p.keep in (keep, None) or stage_of(p, "own_keep")), None
            )
            row = rows[plan.index(chosen or policies[0])]
            cells += [f"{row[metric]:.4g}" for metric in metrics]
        table.add_row(name, *cells)
    return table


def run_item(
    item: Item,
    *,
    model: str,
    data: Path,
    out: Path,
    judge: str,
    options: Sequence[str],
    files: Mapping[str, Path] | None = None,
) -> list[Table]:
    """Runs the commands of a table or figure on one model and data set; prints and returns the tables.

    Runs that differ only in their metrics share their answers. A script that times or scores is only named. `options`
    are further ones of `vlkv eval`, and `files` those of other questions by name, such as SAMPLES.jsonl.
    """
    config = loading.load_processor(model).config
    out.mkdir(parents=True, exist_ok=True)
    folders: dict[Run, Path] = {}
    grids = []
    for number, listed in enumerate(item.runs, start=1):
        run, folder = listed, out / str(number)
        if isinstance(listed, Evaluation):
            run = listed.at_depth(config.decoder.layers)  # with the profiles that earlier commands have written
            rows = tuple(Row(name, text.replace("profile='", f"profile='{out}/")) for name, text in run.rows)
            run = dataclasses.replace(run, rows=rows)
            folder = folders.setdefault(dataclasses.replace(run, metrics=(), judged=False, on=""), folder)
        names = {MODEL: model, OUT: str(folder), JUDGE: judge, DATA: str(data)}
        names |= {name: str(path) for name, path in (files or {}).items()}
        words = [names.get(word) or _file(word, out) for word in run.words]
        words += options if isinstance(run, Evaluation) else []
        print(tables.line(words), flush=True)
        if words[0] == "vlkv" and vlkv(words[1:]):
            raise InputError("a command failed, see above")
        if isinstance(run, Evaluation):
            results = read_json(folder / "results.json")
            assert results is not None
            plan = tables.plan(words, lambda: config)
            grids.append(grid(run, results["rows"], plan, lambda: config))
            Console(width=200).print(grids[-1])
    return grids


def _file(word: str, out: Path) -> str:
    """The word, with the folder of the results before the names of profiles."""
    if word.endswith(".jsonl"):
        raise InputError(f"these questions are not those of --data: give --file {word}=PATH")
    return str(out / word) if word.endswith(".json") and "/" not in word else word


# --- the command ----------------------------------------------------------------------------------------------------


def check(chosen: Sequence[Item], stated: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the settings of these tables and figures, and with the names in settings.toml."""
    for item in chosen:
        if item.runs or item.name in stated:
            yield from (f"{item.name}: {fault}" for fault in settings.faults(settings.settings(stated, item)))
    known = {*PAPERS, *(item.name for item in items())}
    yield from (f"{name}: no such table or figure" for name in stated if name not in known)
    yield from settings.unknown(stated, chosen)


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.papers", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--paper", choices=list(PAPERS), help="only this one")
    add("--dry-run", action="store_true", help="parse every command and evaluate its programs' shapes")
    add("--run", metavar="ITEM", help='a table or figure, such as "AirCache, Table 1"')
    add("--model", metavar="DIR", help="with --run: a checkpoint folder, a hub id, or mini")
    add("--check", action="store_true", help="compare the commands with the settings of the papers")
    add("--data", type=Path, metavar="JSONL", help="with --run: the questions")
    other = "with --run: other questions, such as SAMPLES.jsonl=train.jsonl for a profile"
    add("--file", nargs="+", default=[], metavar="NAME=PATH", help=other)
    add("--max-new-tokens", type=int, metavar="N", help="with --run: limit on the length of answers")
    add("--out", type=Path, metavar="FOLDER", help="with --run: folder of the results")
    add("--judge", default=JUDGE, metavar="COMMAND", help="with --run: scores answers, as in vlkv eval")
    add("--batch", type=int, metavar="N", help="with --run: rows prefilled together")
    args = parser.parse_args(argv)
    return guarded(lambda: _main(args))


def _main(args: argparse.Namespace) -> None:
    chosen = [item for item in items() if args.paper in (None, item.paper)]
    if args.run is not None:
        _run(args, chosen)
    elif args.check:
        wrong = list(check(chosen, settings.read()))
        if wrong:
            print(*wrong, sep="\n")
            raise InputError(f"{len(wrong)} settings are not as benchmarks/papers/settings.toml says; see above")
        print(f"the commands of {len(chosen)} tables and figures have the settings of settings.toml")
    else:
        _list(chosen, dry=args.dry_run)


def _run(args: argparse.Namespace, chosen: Sequence[Item]) -> None:
    named = [item for item in chosen if item.name.lower() == args.run.lower()]
    if not named:
        raise InputError(f"--run {args.run}: no such table or figure; name it as in 'AirCache, Table 1'")
    if None in (args.model, args.data, args.out):
        raise InputError("--run needs --model, --data and --out")
    files = dict(text.partition("=")[::2] for text in args.file)
    if not all(files.values()):
        raise InputError("--file needs NAME=PATH, as in SAMPLES.jsonl=train.jsonl")
    given = {"--batch": args.batch, "--max-new-tokens": args.max_new_tokens}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    paths = {name: Path(path) for name, path in files.items()}
    run_item(named[0], model=args.model, data=args.data, out=args.out, judge=args.judge, options=options, files=paths)


def _list(chosen: Sequence[Item], *, dry: bool) -> None:
    """Prints settings and commands; with `dry`, also evaluates the programs' shapes."""
    stated, done = settings.read(), set[Policy]()
    for item in chosen:
        print(f"{item.name}: {item.title}")
        if item.runs:
            lines = settings.settings(stated, item)
            print(*(f"    {setting}" for setting in lines), sep="\n")
            print("    difference: " + ("see above" if any(setting.differs for setting in lines) else "none"))
        before: list[str] = []
        for run in item.runs:
            shown = tables.line(run.words)
            if isinstance(run, Evaluation) and before == dataclasses.replace(run, metrics=()).words:
                shown = f"the same with --metric {' '.join(run.metrics)}"
            before = dataclasses.replace(run, metrics=()).words if isinstance(run, Evaluation) else []
            print(*([f"  {run.on}"] if run.on else []), f"    {shown}", sep="\n", flush=True)
            if (timed := settings.timed_table(run)) is not None and "--timed" not in run.words:
                print(*(f"      {note}" for note in timed.notes), sep="\n")
            for policy in policies_of(run) if dry else ():
                if policy not in done:
                    done.add(policy)
                    dry_run(policy)
        print(f"    {'' if item.runs else 'no command; '}missing: {item.missing}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
