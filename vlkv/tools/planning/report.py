"""A plan as a table and as JSON."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vlkv.analysis.cost import parameters
from vlkv.policies import text_of
from vlkv.tools.planning.arithmetic import gib
from vlkv.tools.planning.jobs import Run, Step
from vlkv.tools.planning.planning import Plan


def as_json(plan: Plan) -> dict[str, Any]:
    """The whole plan; bytes and seconds are those of one chip."""
    chip, job, asked = plan.topology.chip, plan.job, plan.job.question
    c, (stored, active) = job.config.decoder, parameters(job.config)
    return {
        "estimates": True,
        "model": plan.model,
        "topology": {"name": plan.topology.name, "chips": plan.topology.count, "chip": dataclasses.asdict(chip)},
        "mesh": {"data": plan.data, "model": plan.model_axis, "reason": plan.mesh_reason},
        "parameters": {"stored": stored, "active": active},
        "layers": {
            "full": c.full_layers,
            "sliding": len(c.sliding),
            "shared": c.shared_layers,
            "windows": sorted(set(c.sliding)),
            "recurrent": 0 if c.recurrent is None else len(c.recurrent.layers),
        },
        "dtype": job.dtype,
        "batch": job.batch,
        "prompt": {
            "tokens": plan.prompt,
            "padded": int(asked.inputs.tokens.shape[1]),
            "pictures": asked.pictures,
            "vision": asked.vision,
            "text": asked.text,
        },
        "new_tokens": job.new_tokens,
        "quick": plan.quick,
        "fits": plan.fits,
        "runs": [_run(run) for run in plan.runs],
        "notes": list(plan.notes),
        "seconds": round(plan.seconds, 2),
    }


def _run(run: Run) -> dict[str, Any]:
    rate = run.tokens_per_second
    return {
        "policy": text_of(run.policy),
        "scope": run.policy.scope,
        "bytes_per_chip": {
            name: getattr(run, name)
            for name in ("weights", "pool", "tail", "rings", "states", "index", "inputs", "temporaries", "used")
        },
        "fits": run.fits,
        "remedies": list(run.remedies),
        "prefill": _step(run.prefill),
        "decode_step": _step(run.decode),
        "generate": None if run.generate is None else _step(run.generate),
        "tokens_per_second": None if rate is None else round(rate, 2),
    }


def _step(step: Step) -> dict[str, Any]:
    content: dict[str, Any] = {"argument_bytes": step.argument_bytes, "refused": step.refused}
    if step.compiled:
        content["compile_seconds"] = round(step.seconds, 2)
    if step.program is not None:
        content["compiler"] = dataclasses.asdict(step.program)
    if step.estimate is not None:
        seconds = {"seconds": step.estimate.seconds, "bound": step.estimate.bound}
        content["estimate"] = {**dataclasses.asdict(step.estimate), **seconds}
    return content


def as_table(plan: Plan) -> Group:
    """The main numbers as a table, with a column for each policy."""
    job, asked, chip = plan.job, plan.job.question, plan.topology.chip
    c = job.config.decoder
    table = Table(title=f"{plan.model} on {plan.topology.name}, {job.dtype}: estimates", title_justify="left")
    table.add_column("of one chip")
    for run in plan.runs:
        table.add_column(text_of(run.policy, scope=True), justify="right")

    def line(name: str, value: Callable[[Run], str], *, end: bool = False) -> None:
        table.add_row(name, *map(value, plan.runs), end_section=end)

    known = any(step.compiled for run in plan.runs for step in (run.prefill, run.decode))

    line("weights", lambda run: gib(run.weights))
    full = f" of {c.full_layers} full layers" if c.sliding or c.recurrent else ""
    line(f"cache{full}: prompt", lambda run: gib(run.pool))
    line(f"cache{full}: new tokens", lambda run: gib(run.tail))
    if c.sliding:
        windows = " and ".join(map(str, sorted(set(c.sliding))))
        line(f"cache of {len(c.sliding)} layers with a window of {windows}", lambda run: gib(run.rings))
    if c.shared_layers:
        line(f"cache of {c.shared_layers} layers that use that of earlier ones", lambda _: "none")
    if c.recurrent:
        line(f"states of {len(c.recurrent.layers)} recurrent layers", lambda run: gib(run.states))
    line("cache: index", lambda run: gib(run.index))
    line("inputs", lambda run: gib(run.inputs))
    line("temporaries", lambda run: _missing(run) if run.temporaries is None else gib(run.temporaries), end=True)
    line(f"needed of {gib(chip.usable)}", lambda run: gib(run.used) + ("" if known else " + temporaries"))
    line("fits", lambda run: _fits(run, chip.usable), end=True)
    both = {"prefill": [run.prefill for run in plan.runs], "decode step": [run.decode for run in plan.runs]}
    for title, steps in both.items():
        kinds = sorted({c.kind for step in steps if step.program is not None for c in step.program.collectives})
        columns = [_lines(title, step, kinds) for step in steps]
        for cells in zip(*columns, strict=True):
            if not any(text for _, text in cells):
                continue  # nothing was compiled
            table.add_row(cells[0][0], *(text for _, text in cells))
        table.add_section()
    if any(run.generate for run in plan.runs):
        line("generate: compiled in", lambda run: _compiled_in(run.generate), end=True)
    line(
        "tokens a second, all rows",
        lambda run: _missing(run.decode) if run.tokens_per_second is None else f"{run.tokens_per_second:.0f}",
    )
    stored, active = parameters(job.config)
    counted = f"{stored / 1e9:.2f} billion"
    counted += f" stored, {active / 1e9:.2f} billion active for a token" if active != stored else ""
    head = Text(
        f"{_counted(job.batch, 'prompt')} of {plan.prompt} tokens ({_counted(asked.pictures, 'image')}, "
        f"{asked.vision} vision and {asked.text} text tokens; padded to {asked.inputs.tokens.shape[1]}), "
        f"{job.new_tokens} new tokens. Mesh {plan.mesh_reason}. Parameters: {counted}."
    )
    parts: list[Any] = [head, table]
    for run in plan.runs:
        if run.fits is False:
            changes = "; ".join(run.remedies) or "none was found; use a larger slice or a smaller model"
            name = text_of(run.policy, scope=True)
            parts.append(Text(f"{name} does not fit. Changes that would fit: {changes}.", style="bold"))
    return Group(*parts, *(Text(note, style="dim") for note in plan.notes))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _fits(run: Run, usable: int) -> str:
    if run.fits is None:
        return f"with up to {gib(usable - run.used)} more"
    return "yes" if run.fits else "NO"


def _lines(title: str, step: Step, kinds: Sequence[str]) -> list[tuple[str, str]]:
    """The lines of a program: names, and the cells of its column. `kinds` are the collectives of all columns."""
    time, program = step.estimate, step.program
    sent = {} if program is None else {c.kind: f"{c.count} x, {gib(c.bytes)}" for c in program.collectives}
    return [
        (f"{title}: time", _missing(step) if time is None else f"{1000 * time.seconds:.1f} ms"),
        ("  bound by", "" if time is None else time.bound),
        *((f"  {kind}", sent.get(kind, "none")) for kind in kinds),
        ("  kernels", "" if program is None else str(program.kernels)),
        ("  compiled in", _compiled_in(step)),
    ]


def _compiled_in(step: Step | None) -> str:
    return f"{step.seconds:.1f} s" if step is not None and step.compiled else ""


def _missing(part: Run | Step) -> str:
    """Why a number is missing: the compiler measures no program that needs more memory than a chip has."""
    return "does not fit" if part.refused else "unknown"
