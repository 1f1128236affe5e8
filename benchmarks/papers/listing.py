"""`python -m benchmarks.papers`: lists the commands, checks them, or runs those of one table."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.papers import aircache, avl, commands, csp, lightkv, prefixkv, settings
from benchmarks.papers.commands import DATA, JUDGE, MODEL, OUT, Evaluation, Item, Run, Script
from benchmarks.papers.points import SpeedTable
from vlkv import loading
from vlkv.cli import main as vlkv
from vlkv.compression.checking import require_layers
from vlkv.compression.stages import stage_of
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.files import read_json
from vlkv.generation.generate import generate
from vlkv.policies import Policy
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.benching.programs import endless
from vlkv.tools.benching.shapes import make_inputs
from vlkv.tools.benching.subjects import find

PAPERS = {"AirCache": aircache, "PrefixKV": prefixkv, "LightKV": lightkv, "CSP": csp, "A-VL": avl}


class Listed(NamedTuple):
    """A table or a figure of a paper."""

    paper: str
    what: str
    item: Item

    @property
    def title(self) -> str:
        """The paper and the number."""
        return f"{self.paper}, {self.what}"

    def settings(self, stated: Mapping[str, Any]) -> list[settings.Setting]:
        """The settings in the paper, beside those of the commands."""
        return settings.settings(stated, self.title, self.item, _speed_tables())


def _speed_tables() -> Mapping[str, SpeedTable]:
    tables: Mapping[str, SpeedTable] = importlib.import_module("benchmarks.papers.speed").TABLES
    return tables


def items() -> Iterator[Listed]:
    """All tables and figures, paper by paper."""
    for paper, module in PAPERS.items():
        texts = getattr(module, "TEXTS", [])  # numbers that are only in the text
        for kind, listed in (("Table", module.TABLES), ("Figure", module.FIGURES), ("Text", texts)):
            for number, item in enumerate(listed, start=1):
                yield Listed(paper, f"{kind} {number}", item)


def policies_of(run: Run) -> list[Policy]:
    """The policies of a run, by the command's own parser: of a script, those of its table.

    A search takes the place of the user's profiles, which need not exist.
    """
    if isinstance(run, Script) and "benchmarks.papers.speed" in run.words:
        return [point.policy for point in _speed_tables()[run.words[-1]].points]
    return commands.plan([re.sub(r"profile='[^']*'", "profile=None", word) for word in run.words], _no_config)


def _no_config() -> ModelConfig:
    raise AssertionError("only a profile needs the model's config")


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


def grid(run: Evaluation, rows: Sequence[dict[str, Any]], plan: Sequence[Policy], config: commands.Config) -> Table:
    """The results of a run with the rows and columns of the paper: the keeps, each with its metrics.

    Args:
        run: the run.
        rows: of the results of `vlkv eval`.
        plan: the policies of these rows.
        config: returns the model's config.
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
    item: Item, *, model: str, data: Path, out: Path, judge: str, options: Sequence[str],
    files: Mapping[str, Path] | None = None,
) -> list[Table]:  # fmt: skip
    """Runs the commands of a table or figure on one model and data set; prints and returns the tables.

    Runs that differ only in their metrics share their answers. A script that times or scores is only named.

    Args:
        item: from `items`.
        model: a name or folder as for `vlkv eval`.
        data: questions, for all data sets.
        out: folder of the results.
        judge: the command that scores answers.
        options: further options of `vlkv eval`.
        files: the files of other questions, such as SAMPLES.jsonl, by name.

    Raises:
        InputError: a command fails, or a file of questions has not been given.
    """
    config = loading.load_processor(model).config
    out.mkdir(parents=True, exist_ok=True)
    folders: dict[Run, Path] = {}
    tables = []
    for number, run in enumerate(item.runs, start=1):
        own, folder = run, out / str(number)
        if isinstance(run, Evaluation):
            own = run.at_depth(config.decoder.layers)
            own = dataclasses.replace(own, rows=tuple(
                commands.Row(name, text.replace("profile='", f"profile='{out}/")) for name, text in own.rows
            ))  # fmt: skip
            folder = folders.setdefault(dataclasses.replace(own, metrics=(), judged=False, on=""), folder)
        given = {MODEL: model, OUT: str(folder), JUDGE: judge, DATA: str(data)}
        given |= {name: str(path) for name, path in (files or {}).items()}
        words = [given.get(word) or _file(word, out) for word in own.words]
        words += options if isinstance(own, Evaluation) else []
        print(commands.line(words), flush=True)
        if words[0] == "vlkv" and vlkv(words[1:]):
            raise InputError("a command failed, see above")
        if isinstance(own, Evaluation):
            results = read_json(folder / "results.json")
            assert results is not None
            plan = commands.plan(words, lambda: config)
            tables.append(grid(own, results["rows"], plan, lambda: config))
            Console(width=200).print(tables[-1])
    return tables


def _file(word: str, out: Path) -> str:
    """The word, with the folder of the results before the names of profiles."""
    if word.endswith(".jsonl"):
        raise InputError(f"these questions are not those of --data: give --file {word}=PATH")
    return str(out / word) if word.endswith(".json") and "/" not in word else word


def check(chosen: Sequence[Listed], stated: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the settings of these tables and figures, and with the names in settings.toml."""
    for listed in chosen:
        if listed.item.runs or listed.title in stated:
            yield from (f"{listed.title}: {fault}" for fault in settings.faults(listed.settings(stated)))
    known = {*PAPERS, *(listed.title for listed in items())}
    yield from (f"{name}: no such table or figure" for name in stated if name not in known)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = OneLineParser(prog="python -m benchmarks.papers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--paper", choices=list(PAPERS), help="only this one")
    parser.add_argument("--dry-run", action="store_true", help="parse every command and evaluate its programs' shapes")
    parser.add_argument("--run", metavar="ITEM", help='a table or figure, such as "AirCache, Table 1"')
    parser.add_argument("--model", metavar="DIR", help="with --run: a checkpoint folder, a hub id, or mini")
    parser.add_argument("--check", action="store_true", help="compare the commands with the settings of the papers")
    parser.add_argument("--data", type=Path, metavar="JSONL", help="with --run: the questions")
    parser.add_argument(
        "--file", nargs="+", default=[], metavar="NAME=PATH",
        help="with --run: other questions, such as SAMPLES.jsonl=train.jsonl for a profile",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="with --run: limit on the length of answers")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="with --run: folder of the results")
    parser.add_argument("--judge", default=JUDGE, metavar="COMMAND", help="with --run: scores answers, as in vlkv eval")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="with --run: rows prefilled together")
    args = parser.parse_args(argv)
    return guarded(lambda: _main(args))


def _main(args: argparse.Namespace) -> None:
    chosen = [listed for listed in items() if args.paper in (None, listed.paper)]
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


def _run(args: argparse.Namespace, chosen: Sequence[Listed]) -> None:
    named = [listed for listed in chosen if listed.title.lower() == args.run.lower()]
    if not named:
        raise InputError(f"--run {args.run}: no such table or figure; name it as in 'AirCache, Table 1'")
    if None in (args.model, args.data, args.out):
        raise InputError("--run needs --model, --data and --out")
    files = dict(text.partition("=")[::2] for text in args.file)
    if not all(files.values()):
        raise InputError("--file needs NAME=PATH, as in SAMPLES.jsonl=train.jsonl")
    limit = [] if args.max_new_tokens is None else ["--max-new-tokens", str(args.max_new_tokens)]
    run_item(
        named[0].item, model=args.model, data=args.data, out=args.out, judge=args.judge,
        options=["--batch", str(args.batch), *limit], files={name: Path(path) for name, path in files.items()},
    )  # fmt: skip


def _list(chosen: Sequence[Listed], *, dry: bool) -> None:
    """Prints settings and commands; with `dry`, also evaluates the programs' shapes."""
    stated, done = settings.read(), set[Policy]()
    for listed in chosen:
        item = listed.item
        print(f"{listed.title}: {item.title}")
        if item.runs:
            found = listed.settings(stated)
            print(*(f"    {setting}" for setting in found), sep="\n")
            print("    difference: " + ("see above" if any(one.differs for one in found) else "none"))
        before: list[str] = []
        for run in item.runs:
            shown = commands.line(run.words)
            if isinstance(run, Evaluation) and before == dataclasses.replace(run, metrics=()).words:
                shown = f"the same with --metric {' '.join(run.metrics)}"
            before = dataclasses.replace(run, metrics=()).words if isinstance(run, Evaluation) else []
            print(*([f"  {run.on}"] if run.on else []), f"    {shown}", sep="\n", flush=True)
            for policy in policies_of(run) if dry else ():
                if policy not in done:
                    done.add(policy)
                    dry_run(policy)
        print(f"    {'' if item.runs else 'no command; '}missing: {item.missing}", flush=True)
