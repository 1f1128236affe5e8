"""Chooses the implementation of an op. None always works; a name runs or raises an error that says why not.

Implementations called after a kernel language belong to one platform; elsewhere they run in the Pallas interpreter if
":interpret" is added to the name.
"""

import contextvars
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

_PLATFORM = {"mosaic_tpu": "tpu", "triton": "gpu", "cudnn": "gpu"}
_INTERPRET = ":interpret"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Implementation of each op, by name; None chooses one for the platform. It has no leaves: static under jit."""

    decode_attention: str | None = None
    core_attention: str | None = None
    attention_mass: str | None = None
    attention_mass_rows: str | None = None
    prefill_attention: str | None = None
    write_slots: str | None = None
    swap_slots: str | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The implementation in `pallas_kernels/<folder>/<name>.py`, imported at first use, as Pallas takes 0.25 s to load.

    The file defines `<op>_<name>(args)`, where `args` is the dataclass of arguments in the op's `reference.py`. If it
    belongs to a platform, the function has an option `interpret`. Then the file may define `unsupported(args)`, which
    returns why the kernel cannot run with these arguments, or None; and `missing()`, which returns what this host lacks
    to run it without the interpreter, or None.
    """

    op: str
    name: str
    folder: str = ""  # that of the op, unless ops share one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        return getattr(self._module(), f"{self.op}_{self.name}")(*args, **kwargs)

    def unsupported(self, *args: Any, interpret: bool = False, **kwargs: Any) -> str | None:
        """Returns why the kernel cannot run on this host or with these arguments, or None if it can."""
        missing = getattr(self._module(), "missing", None)
        check = getattr(self._module(), "unsupported", None)
        reason = None if missing is None or interpret else missing()
        return reason if reason is not None or check is None else check(*args, **kwargs)

    def _module(self) -> Any:
        return importlib.import_module(f"pallas_kernels.{self.folder or self.op}.{self.name}")


# The folder with the files of each op, and its kernels in order of preference.
_OPS = {
    "decode_attention": ("decode_attention", "mosaic_tpu", "triton"),
    "attention_mass": ("attention_mass", "mosaic_tpu", "triton"),
    "attention_mass_rows": ("attention_mass", "mosaic_tpu", "triton"),
    "prefill_attention": ("prefill_attention", "mosaic_tpu", "cudnn"),
    "write_slots": ("slots", "mosaic_tpu"),
    "swap_slots": ("slots", "mosaic_tpu"),
}
IMPLEMENTATIONS = {
    op: {name: Kernel(op, name, folder) for name in ("xla", "reference", *kernels)}
    for op, (folder, *kernels) in _OPS.items()
}
IMPLEMENTATIONS["core_attention"] = IMPLEMENTATIONS["decode_attention"]  # with other arguments


def platforms() -> tuple[str, ...]:
    """The platforms ("cpu", "gpu", "tpu") that the traced program may be compiled for, the most likely first.

    The current mesh decides, even if its devices do not exist on this host (`jax.set_mesh` of a topology, or an
    abstract mesh with an abstract device). Without a mesh, a host with an accelerator may run the program
    there or on its CPU, because the devices of the arguments are not known during tracing.
    """
    if (branch := _branch.get()) is not None:
        return (branch,)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return (_plain(device.platform),)
    default = _plain(jax.default_backend())
    return (default,) if default == "cpu" or not _has_cpu() else (default, "cpu")


def target_platform() -> str:
    """The platform that is compiled for. It is certain only within an implementation of an op."""
    return platforms()[0]


def available(implementations: Mapping[str, Callable[..., Any]]) -> tuple[str, ...]:
    """Names that can run here: plain implementations, kernels of this platform, and all kernels with ":interpret"."""
    here = platforms()
    plain = [name for name in implementations if _PLATFORM.get(name) is None or _PLATFORM[name] in here]
    return *plain, *(name + _INTERPRET for name in implementations if name in _PLATFORM)


def choose(
    op: str, implementations: Mapping[str, Callable[..., Any]], name: str | None, default: str
) -> Callable[..., Any]:
    """Returns the implementation called `name`, as a function.

    For None, the function runs the first kernel of the target platform that accepts its arguments, else `default`. On a
    mesh of several devices it runs `default` except within `shard_map`, so set the mesh with `jax.set_mesh`.

    Args:
        op: name of the op, for error messages.
        implementations: implementations by name; kernels in order of preference.
        name: None, a name, or the name of a kernel followed by ":interpret".
        default: name of an implementation that runs on every platform.

    Raises:
        ValueError: no such implementation here (the message lists those available). The returned function raises it if
            the named kernel does not accept its arguments (the message says why).
    """
    if name is None:
        return _per_platform(lambda platform: _first(implementations, default, platform))
    names = available(implementations)
    if name not in names:
        here = " or ".join(platforms())
        known = f"needs a {_PLATFORM[name]}, not {here}" if name in implementations else "does not exist"
        raise ValueError(f"{op}: implementation {name!r} {known} (available: {', '.join(names)})")
    kernel = name.removesuffix(_INTERPRET)
    run = implementations[kernel]
    return _named(op, run, name, names) if kernel in _PLATFORM else _per_platform(lambda _: run)


def run(op: str, args: Any, name: str | None) -> Any:
    """Runs the implementation of an op of `IMPLEMENTATIONS` that `choose` returns for this name."""
    return choose(op, IMPLEMENTATIONS[op], name, "xla")(args)


def require_shapes(op: str, **arrays: tuple[Any, str, tuple[int, ...]]) -> None:
    """Raises ValueError unless each array is None or has the shape that is given with the names of its axes."""
    for name, (x, axes, shape) in arrays.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{op}: {name} {x.shape} must be [{axes}] = {shape}")


# The platform of the branch that is being traced.
_branch: contextvars.ContextVar[str | None] = contextvars.ContextVar("branch", default=None)


def _plain(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


@functools.cache
def _has_cpu() -> bool:
    try:
        return bool(jax.local_devices(backend="cpu"))
    except RuntimeError:  # JAX_PLATFORMS excludes it
        return False


def _per_platform(choice: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    """A function that runs `choice(platform)` for the platform that the program is compiled for.

    If that is not known yet, all choices are traced, and jax keeps the right one when it lowers the program.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if hasattr(x, "shape")]
        arrays = [jnp.asarray(leaves[i]) for i in places]

        def on(platform: str) -> Callable[..., Any]:
            def branch(*arrays: Any) -> Any:
                traced = dict(zip(places, arrays, strict=True))
                args, kwargs = jax.tree.unflatten(tree, [traced.get(i, x) for i, x in enumerate(leaves)])
                token = _branch.set(platform)
                try:
                    return choice(platform)(*args, **kwargs)
                finally:
                    _branch.reset(token)

            return branch

        here = platforms()
        if len(here) > 1:
            here = _of_arrays(arrays) or here
        if len(here) == 1:
            return on(here[0])(*arrays)
        return jax.lax.platform_dependent(*arrays, cpu=on("cpu"), default=on(here[0]))

    return run


def _of_arrays(arrays: list[Any]) -> tuple[str, ...]:
    """The platform of concrete arrays (outside of jit), as a tuple; () during tracing."""
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return ()
    placed = (x for x in arrays if isinstance(x, jax.Array) and x.committed)
    return tuple({_plain(device.platform) for x in placed for device in x.devices()})[:1]


def _split() -> bool:
    """Whether the compiler partitions arrays over a mesh here, not in shard_map; it cannot partition Pallas kernels."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True) if mesh.axis_names else ()
    return any(size > 1 and kind != jax.sharding.AxisType.Manual for size, kind in kinds)


def _first(implementations: Mapping[str, Callable[..., Any]], default: str, platform: str) -> Callable[..., Any]:
    kernels = [] if _split() else [run for name, run in implementations.items() if _PLATFORM.get(name) == platform]

    def run(*args: Any, **kwargs: Any) -> Any:
        for kernel in kernels:
            if not isinstance(kernel, Kernel) or kernel.unsupported(*args, **kwargs) is None:
                return kernel(*args, **kwargs)
        return implementations[default](*args, **kwargs)

    return run


def _named(op: str, kernel: Any, name: str, names: tuple[str, ...]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        interpret = name.endswith(_INTERPRET)
        reason = kernel.unsupported(*args, interpret=interpret, **kwargs)
        if reason is not None:
            raise ValueError(f"{op}: implementation {name!r} cannot run this: {reason} (available: {', '.join(names)})")
        return kernel(*args, **kwargs, interpret=interpret)

    return run
