"""Compiles every GPU kernel for an A100 and an H100 on a host without a GPU: `python -m benchmarks.compile_gpu`.

    python -m benchmarks.compile_gpu [kernels | prefill] [--device A100 H100]

Needs Linux and `pip install '.[gpu]'` with jax 0.11 or later (Python 3.12). The plugin compiles to machine code, so the
reported shared memory, registers and stack are those of the program that a GPU would load. Nothing runs.

`kernels` compiles every form of every Triton kernel: with and without mass and a mask, sums, squares and counts.
`prefill` compiles the prefill of a 7B model at batch 8 and 8192 tokens, with few layers, and counts the calls of
cuDNN's fused attention.

Axes: B batch · T query rows · S keys · N query heads · K key heads · P pool slots · C listed slots · M bound on a
segment · H head dim.
"""

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import vlkv
from pallas_kernels.attention_mass.reference import MassArguments, MassRowsArguments
from pallas_kernels.attention_mass.triton import attention_mass_rows_triton, attention_mass_triton
from pallas_kernels.decode_attention.reference import DecodeArguments, Listed
from pallas_kernels.decode_attention.triton import decode_attention_triton
from vlkv import policies
from vlkv.families import abstract
from vlkv.files import write_json
from vlkv.tools.benching import machine
from vlkv.tools.benching.settings import make_inputs

_TARGETS = tomllib.loads(Path(__file__).with_name("gpu_targets.toml").read_text())
_DEVICES: dict[str, str] = _TARGETS["devices"]
_MODELS: dict[str, list[Any]] = _TARGETS["models"]  # N, K, H, dtype
_RESULT = Path(__file__).parent / "results" / "compile_gpu.json"

_BATCH, _SLOTS, _LISTED = 16, 8192, 2048
_PROMPTS, _GATHERED = 2, 64  # prompts scored at once, by vmap; rows of an observation window

Case = tuple[str, Callable[..., Any], tuple[tuple[tuple[int, ...], Any], ...]]  # name, function, shapes and dtypes


def target(name: str) -> Any:
    """A device to compile for, which need not be present."""
    described = topologies.get_topology_desc(
        platform="cuda", topology_name=f"NVIDIA {name}", topology="1x1x1", target_config=_DEVICES[name]
    )
    return described.devices[0]


def cases(heads: int, kv_heads: int, head_dim: int, dtype: Any) -> Iterator[Case]:
    q = (_BATCH, heads, head_dim), dtype
    pool = (_BATCH, kv_heads, _SLOTS, head_dim), dtype
    per_head = (_BATCH, kv_heads), jnp.int32
    valid = (_BATCH, kv_heads, _SLOTS), jnp.bool_
    listed = ((_BATCH, _LISTED), jnp.int32), ((_BATCH,), jnp.int32), per_head
    segment = q, pool, pool, per_head, per_head
    single = tuple(((1, *shape[1:]), kind) for shape, kind in segment)

    def decode(q, k, v, start, length, valid=None):
        return decode_attention_triton(DecodeArguments(q, k, v, start, length, valid, _SLOTS, valid is not None))

    def core(q, k, v, start, length, offsets, count, text, valid=None):
        segment = q, k, v, start, length, valid, _SLOTS, valid is not None
        return decode_attention_triton(DecodeArguments(*segment, Listed(offsets, count, text)))

    yield f"decode_attention, B={_BATCH}", decode, segment
    yield "decode_attention, B=1", decode, single
    yield f"decode_attention, B={_BATCH}, mask and mass", decode, (*segment, valid)
    yield f"core_attention, B={_BATCH}", core, (*segment, *listed)
    yield f"core_attention, B={_BATCH}, mask and mass", core, (*segment, *listed, valid)

    keys = ((kv_heads, _SLOTS, head_dim), dtype), ((2, _SLOTS), jnp.float32), ((_SLOTS,), jnp.bool_)
    for rows, in_order in ((_SLOTS, True), (_GATHERED, False)):
        queries = (heads, rows, head_dim), dtype
        places = (rows,), jnp.int32
        weight = (2, rows), jnp.float32
        common: Any = partial(dict, causal=True, in_order=in_order, softmax_n=0.0)
        shared = (0, 0, 0, 0, None)  # all prompts share the places

        def along_rows(q, k, weight, mask, place, common=common):
            arguments = common(q=q, k=k, key_weight=weight, key_mask=mask, row_place=place)
            return attention_mass_rows_triton(MassRowsArguments(**arguments))

        batched = [((_PROMPTS, *shape), kind) for shape, kind in (queries, *keys, weight)]
        q, k, key_weight, key_mask, row_weight = batched
        name = f"B={_PROMPTS}, {rows} rows"
        yield f"attention_mass_rows, {name}", jax.vmap(along_rows, shared), (q, k, key_weight, key_mask, places)
        for statistic in ("sum", "square", "entropy", "count"):
            of_kind = partial(common, statistic=statistic, threshold=0.01)

            def received(q, k, weight, mask, place, of_kind=of_kind):
                arguments = of_kind(q=q, k=k, row_weight=weight, key_mask=mask, row_place=place)
                return attention_mass_triton(MassArguments(**arguments))

            shapes = q, k, row_weight, key_mask, places
            yield f"attention_mass, {name}, {statistic}", jax.vmap(received, shared), shapes


def compile_case(function: Callable[..., Any], shapes: tuple[tuple[tuple[int, ...], Any], ...], device: Any) -> Any:
    """The kernels of a function: name, programs, shared memory, registers and stack (spilt registers) of each."""
    on = SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=on) for shape, dtype in shapes]
    with _compiling_for(device):
        lowered = jax.jit(function).lower(*args)
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"})
        launches: dict[str, dict[str, Any]] = {}
        for file in Path(folder).glob("*thunk_sequence*.txt"):
            launches.update(_launches(file.read_text()))
        used = {}
        for file in Path(folder).glob("*.ptx"):
            text = file.read_text()
            name, architecture = (re.search(rf"\.{word} (\w+)", text) for word in ("entry", "target"))
            if name and architecture and name[1] in launches:
                used[name[1]] = {"architecture": architecture[1], **resources(file, architecture[1])}
    return [{"kernel": name, **launch, **used.get(name, {})} for name, launch in launches.items()]


def _compiling_for(device: Any) -> Any:
    kind = jax.sharding.AbstractDevice(device_kind=device.device_kind, platform="cuda", num_cores=None)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=kind))


def _launches(thunks: str) -> Iterator[tuple[str, dict[str, Any]]]:
    pattern = r"(\w+) grid: \[([\d, ]+)\] threads: \[(\d+).*shared_memory: (\d+) bytes"
    for name, grid, threads, shared in re.findall(pattern, thunks):
        if name.startswith(("decode_attention", "core_attention", "attention_mass")):
            programs = [int(n) for n in grid.split(",")]
            yield name, {"grid": programs, "threads": int(threads), "shared_memory_bytes": int(shared)}


def resources(file: Path, architecture: str) -> dict[str, int | str]:
    """Registers of a thread and its bytes of stack (spilt registers), as the assembler reports them."""
    assembler = _assembler()
    if assembler is None:
        return {"registers": "no ptxas"}
    command = [assembler, "-v", f"--gpu-name={architecture}", str(file), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    (stack,) = re.findall(r"(\d+) bytes stack frame", done.stderr)
    return {"registers": int(registers), "stack_bytes": int(stack)}


def _assembler() -> str | None:
    """Path of NVIDIA's ptxas, from the packages that jax's plugin installs or from a CUDA toolkit."""
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations or () if packages else ():
        for path in Path(folder).glob("*/bin/ptxas"):
            return str(path)
    return shutil.which("ptxas")


def kernel_rows(devices: list[str], wanted: list[str]) -> list[dict[str, Any]]:
    rows = []
    for device_name in devices:
        device = target(device_name)
        for model in wanted:
            for what, function, shapes in cases(*_MODELS[model]):
                begin = time.perf_counter()
                row: dict[str, Any] = {"device": device_name, "model": model, "case": what}
                try:
                    row |= {"compiled": True, "kernels": compile_case(function, shapes, device)}
                except Exception as error:
                    row |= {"compiled": False, "error": f"{type(error).__name__}: {error}"[:500]}
                row["seconds"] = round(time.perf_counter() - begin, 1)
                rows.append(row)
                _show(row)
    return rows


def main() -> None:
    """Compiles, prints a line per program, writes the result; fails if a program cannot be compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kernels", "prefill"), nargs="*", default=["kernels", "prefill"])
    parser.add_argument("--device", choices=_DEVICES, nargs="+", default=list(_DEVICES))
    parser.add_argument("--model", choices=_MODELS, nargs="+", default=list(_MODELS), help="for the kernels")
    parser.add_argument("--output", type=Path, default=_RESULT)
    args = parser.parse_args()
    versions = _versions()
    content: dict[str, Any] = {"results": [], "prefill": []}
    if args.output.is_file():  # keeps the part that is not compiled now, and its versions
        content |= json.loads(args.output.read_text())
    if "kernels" in args.what:
        content |= {"versions": versions, "results": kernel_rows(args.device, args.model)}
    if "prefill" in args.what:
        content["prefill"] = prefill_rows(args.device)
    write_json(args.output, {"versions": versions, **content})
    failed = sum(not row["compiled"] for name in args.what for row in content["results" if name == "kernels" else name])
    print(f"{failed} failed; written to {args.output}")
    if failed:
        raise SystemExit(1)


# --- prefill --------------------------------------------------------------------------------------------------------

_PREFILLED = "llava-onevision-7b"
_SMOOTHED = "compose(aircache(window='text'), smooth=smooth((8, 8), one_sided=True, pooling='max'), store=kivi(bits=4))"
_PREFILL = {"batch": 8, "prompt": 8192, "text": 64, "new": 16}


def compile_prefill(device_name: str, layers: int, policy: str) -> dict[str, Any]:
    """Prefill of the first `layers` layers of a 7B model: seconds, calls of fused attention, scoring kernels, bytes."""
    full = vlkv.presets[_PREFILLED]
    config = dataclasses.replace(full, decoder=dataclasses.replace(full.decoder, layers=layers))
    prompt = _PREFILL["batch"], _PREFILL["prompt"], _PREFILL["prompt"] - _PREFILL["text"]
    leaves, tree = jax.tree.flatten((abstract(config, jnp.bfloat16), make_inputs(config, *prompt)))
    chosen = policies.make(policy, **({} if policy == "full" else {"keep": 0.1}))

    def run(*leaves):
        params, inputs = jax.tree.unflatten(tree, leaves)
        cache, logits = vlkv.prefill(params, inputs, chosen, new_tokens=_PREFILL["new"])
        return *jax.tree.leaves(cache), logits

    device = target(device_name)
    on = SingleDeviceSharding(device)
    begin = time.perf_counter()
    with _compiling_for(device):
        lowered = jax.jit(run).lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on) for x in leaves))
    middle, cpu = time.perf_counter(), _cpu_seconds()
    compiled = lowered.compile()
    end = time.perf_counter()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None  # not every backend reports them
    seconds = {"trace": middle - begin, "compile": end - middle, "compile_cpu": _cpu_seconds() - cpu}
    about = {"model": _PREFILLED, **_PREFILL, "layers": layers, "policy": policy, "device": device_name}
    return {
        **about,
        **{f"{name}_seconds": round(value, 2) for name, value in seconds.items()},
        "fused_attention_calls": len(re.findall(r'custom_call_target="__cudnn\$fmhaSoftmax"', text)),
        "scoring_kernels": sorted(re.findall(r'name = "(attention_mass\w*)"', lowered.as_text())),
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def _cpu_seconds() -> float:
    """Processor time of this process and of the assemblers that it started; other load hardly changes it."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def prefill_rows(devices: list[str]) -> list[dict[str, Any]]:
    """Two layers of the full cache, of H2O, which scores all rows, and of smoothed scores; four of the full cache.

    Each is compiled in its own process, so that no process reuses programs of another.
    """
    jobs = [(device, *job) for device in devices for job in ((2, "full"), (2, "h2o"), (2, _SMOOTHED), (4, "full"))]
    rows = []
    for device, layers, policy in jobs:
        row: dict[str, Any] = {"case": "prefill", "commit": machine.commit(), "jax": jax.__version__}
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                row |= {"compiled": True, **pool.submit(compile_prefill, device, layers, policy).result()}
        except Exception as error:
            row |= {"compiled": False, "device": device, "layers": layers, "policy": policy, "error": str(error)[-500:]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _versions() -> dict[str, str]:
    """Versions of the packages that compile; exits if they are missing."""
    installed = {dist.name: dist.version for dist in distributions()}
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")
    versions = {"python": platform.python_version(), **{name: installed[name] for name in names if name in installed}}
    if not any(name.endswith("plugin") for name in versions) or jax.__version_info__ < (0, 11):
        raise SystemExit(f'compile_gpu: needs jax 0.11 and its CUDA plugin, found {versions}; pip install ".[gpu]"')
    return versions


def _show(row: dict[str, Any]) -> None:
    print(f"{row['device']}  {row['model']:<22} {row['case']:<42} {row['seconds']} s", flush=True)
    for kernel in row.get("kernels", []):
        print("     ", ", ".join(f"{name} {value}" for name, value in kernel.items()))
    if not row["compiled"]:
        print(f"      FAILED {row['error']}")


if __name__ == "__main__":
    main()
