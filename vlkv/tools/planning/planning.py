"""`plan` compiles prefill and a decode step for absent chips, and reports memory, time and communication."""

import dataclasses
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from vlkv import sharding
from vlkv.compression.checking import require_fit
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.families import abstract, presets
from vlkv.policies import Full, Policy
from vlkv.tools.planning import arithmetic, chips, programs
from vlkv.tools.planning.arithmetic import Job
from vlkv.tools.planning.chips import Topology
from vlkv.tools.planning.jobs import Run, run
from vlkv.tools.planning.questions import question

DTYPES = ("bfloat16", "float32")
_ESTIMATES = "All numbers are estimates, made without these chips: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `plan`. `runs` contains the full cache, then the policy, if they differ."""

    model: str
    job: Job  # with the policy of the first run
    topology: Topology
    data: int
    model_axis: int
    mesh_reason: str
    prompt: int
    quick: bool
    runs: tuple[Run, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def fits(self) -> bool | None:
        """Whether the job fits with the requested policy; None: see `Run.fits`."""
        return self.runs[-1].fits


def plan(
    model: str | ModelConfig,
    *,
    topology: str,
    prompt: int,
    batch: int = 1,
    new_tokens: int = 64,
    policy: Policy | None = None,
    mesh: str | tuple[int, int] | None = None,
    dtype: str = "bfloat16",
    images: int | None = None,
    compare: bool = True,
    whole: bool = False,
    quick: bool = True,
    report: Callable[[str], None] | None = None,
) -> Plan:
    """Compiles the job for a topology and reports memory, time and communication of every chip. Nothing runs.

    For GPUs nothing is compiled either: numbers are computed from shapes, without temporaries and communication.

    Args:
        model: name of a preset, or a config.
        topology: such as `v5e:4x4`, `v4:2x2x1` or `a100:1`; see `vlkv.tools.planning.CHIPS`.
        prompt: tokens of each prompt, including vision tokens.
        batch: number of prompts, over all chips.
        new_tokens: number of generated tokens.
        policy: None: only the full cache.
        mesh: "data=4,model=4" or (data, model); None: see `choose_mesh`.
        dtype: of weights and cache.
        images: images (or tiles) of each prompt; None: as many as fit beside 64 text tokens.
        compare: plan the full cache too.
        whole: compile `generate` too, to see the compile time of a first call.
        quick: compile with XLA's level O1, which is fast; temporaries and moved bytes are then upper bounds.
        report: called before each program is compiled, with one line about it.

    Raises:
        InputError: the job cannot be planned. Raised before anything is compiled.
    """
    begin, say = time.perf_counter(), report or (lambda text: None)
    name = model if isinstance(model, str) else model.family
    config = presets[model] if isinstance(model, str) else model
    where = chips.parse(topology)
    if where.chip.platform == "cuda" and (whole or not quick):
        raise InputError(f"--topology {topology}: nothing is compiled for GPUs, so leave out --generate and --thorough")
    policy = Full() if policy is None else policy
    require_fit(policy, config.decoder.full_layers, jax.random.key(0))
    policies = [policy] if not compare or policy == Full() else [Full(), policy]
    _check_numbers(config, batch, prompt, new_tokens, images, dtype)
    asked = question(config, batch=batch, prompt=prompt, pictures=images)
    size: dict[str, Any] = {"question": asked, "batch": batch, "new_tokens": new_tokens}
    jobs = [Job(config=config, dtype=dtype, policy=each, **size) for each in policies]
    axes = _mesh(jobs[0], where, mesh)
    devices, notes = _devices(where, axes["data"], axes["model_axis"])
    params = abstract(config, jnp.dtype(dtype), devices)  # type: ignore[arg-type]
    # In parallel, because XLA compiles a program for TPU on little more than one core.
    with programs.effort("O1" if quick else None), ThreadPoolExecutor(len(jobs)) as threads:
        runs = tuple(threads.map(lambda job: run(job, where, devices, params, say, whole=whole), jobs))
    seconds, notes = time.perf_counter() - begin, [*notes, *_notes(runs, quick)]
    job: dict[str, Any] = {"model": name, "job": jobs[0], "topology": where, "prompt": prompt, "quick": quick}
    return Plan(**job, **axes, runs=runs, notes=tuple(notes), seconds=seconds)


def _check_numbers(
    config: ModelConfig, batch: int, prompt: int, new_tokens: int, images: int | None, dtype: str
) -> None:
    numbers = {"batch": batch, "prompt": prompt, "new": new_tokens, "images": 0 if images is None else images}
    for option, value in numbers.items():
        least = 0 if option == "images" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"--{option} {value} must be a whole number of at least {least}")
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype} must be one of {', '.join(DTYPES)}")
    limit = config.decoder.max_positions
    if prompt + new_tokens > limit:
        remedy = f"give at most --prompt {max(limit - new_tokens, 0)}"
        raise InputError(
            f"--prompt {prompt} and --new {new_tokens} exceed the model's limit of {limit} positions: {remedy}"
        )


def _mesh(job: Job, where: Topology, mesh: str | tuple[int, int] | None) -> dict[str, Any]:
    """The fields of `Plan` that describe the mesh."""
    if mesh is None:
        return dict(zip(("data", "model_axis", "mesh_reason"), arithmetic.choose_mesh(job, where), strict=True))
    text = mesh if isinstance(mesh, str) else f"data={mesh[0]},model={mesh[1]}"
    data, model = chips.parse_mesh(text, where.count)
    if job.batch % data:
        remedy = f"give a multiple of {data}, or a mesh whose data axis divides the batch"
        raise InputError(f"--batch {job.batch} does not divide over data={data}: {remedy}")
    return {"data": data, "model_axis": model, "mesh_reason": f"data={data}, model={model}: as requested"}


def _devices(where: Topology, data: int, model: int) -> tuple[Mesh | AbstractMesh, list[str]]:
    """The mesh of the chips, and notes; an abstract mesh if no compiler for them is available."""
    if where.chip.platform == "cuda":
        kind = jax.sharding.AbstractDevice(device_kind=where.chip.name, platform="cuda", num_cores=None)
        axes, types = ("data", "model"), (AxisType.Auto,) * 2
        return AbstractMesh((data, model), axes, axis_types=types, abstract_device=kind), [
            f"{_ESTIMATES}for GPUs, from shapes and without a compiler. Temporaries and collectives are missing, so "
            "memory and times are lower bounds."
        ]
    try:
        devices = programs.tpu_devices(where.name)
    except ModuleNotFoundError:
        raise InputError(f"--topology {where.name}: TPU programs need libtpu: pip install libtpu") from None
    except ValueError as error:
        reason = re.sub(r"\s+", " ", str(error))[:160]
        remedy = "sides must be powers of two, as in v5e:4x4 or v4:2x2x1"
        raise InputError(f"--topology {where.name}: no such slice ({reason}); {remedy}") from None
    if len(devices) != where.count:
        raise InputError(f"--topology {where.name}: libtpu returns {len(devices)} devices, not {where.count}")
    return sharding.make_mesh(data=data, model=model, devices=devices), [
        f"{_ESTIMATES}bytes by the compiler, times by arithmetic."
    ]


def _notes(runs: tuple[Run, ...], quick: bool) -> list[str]:
    compiled = [step.program for run in runs for step in (run.prefill, run.decode) if step.program is not None]
    notes = {
        "Times are the larger of operations / peak and bytes / bandwidth, counted by the compiler, plus sent bytes "
        "/ link speed. Launch overhead, waiting and imperfect overlap are not included.": bool(compiled),
        "Compiled at XLA's level O1, which is fast. At the level of running programs, temporaries and moved "
        "bytes are smaller; `--thorough` uses that level.": bool(compiled) and quick,
        "The compiler does not count the work of Pallas kernels: attention over the prompt is counted from "
        "shapes, and a decode step reads the cache once.": any(program.kernels for program in compiled),
        "Attention runs in loops, of which the compiler counts one iteration: these times are too short.": any(
            program.loops and not program.kernels for program in compiled
        ),
    }
    return [note for note, applies in notes.items() if applies]
