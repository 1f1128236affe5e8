"""Picks the implementation of an op: None always works, a named one runs or says why not.

A plain implementation is a function. One written in Pallas is a `Kernel`: it belongs to one platform, and elsewhere
runs in Pallas' interpreter when its name ends in ":interpret".
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

_PLATFORM = {"mosaic_tpu": "tpu", "triton": "gpu", "mosaic_gpu": "gpu"}
_INTERPRET = ":interpret"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The Pallas kernel in `pallas_kernels/<op>/<name>.py`, imported when first used: Pallas takes a quarter second.

    The file defines `<op>_<name>(*args, interpret=False, **kwargs)` and may define `unsupported(*args, **kwargs)`,
    which says in a string why the kernel cannot take these arguments, or None.
    """

    op: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the kernel."""
        return getattr(self._module(), f"{self.op}_{self.name}")(*args, **kwargs)

    def unsupported(self, *args: Any, **kwargs: Any) -> str | None:
        """Why the kernel cannot take these arguments; None: it can."""
        check = getattr(self._module(), "unsupported", None)
        return None if check is None else check(*args, **kwargs)

    def _module(self) -> Any:
        return importlib.import_module(f"pallas_kernels.{self.op}.{self.name}")


def target_platform() -> str:
    """ "cpu", "gpu" or "tpu": what is being compiled for.

    The device of the mesh in scope, which need not be there (`jax.set_mesh` of a topology, or an abstract mesh with an
    abstract device); else jax's default device, else its default backend. The shardings of arguments are not known
    while a function is traced, so to compile for hardware that is not there a mesh must be set.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or getattr(jax.config, "jax_default_device", None)
    platform = device if isinstance(device, str) else getattr(device, "platform", None) or jax.default_backend()
    return "gpu" if platform in ("cuda", "rocm") else platform


def available(implementations: Mapping[str, Callable[..., Any]]) -> tuple[str, ...]:
    """The names that can run here: plain ones, kernels of the target platform, and every kernel interpreted."""
    platform = target_platform()
    plain = [name for name in implementations if _PLATFORM.get(name) in (None, platform)]
    return *plain, *(name + _INTERPRET for name in implementations if name in _PLATFORM)


def choose(
    op: str, implementations: Mapping[str, Callable[..., Any]], name: str | None, default: str
) -> Callable[..., Any]:
    """The implementation called `name`; of None, the first kernel of the target platform that takes the arguments.

    On a mesh of several devices None is the default, unless within `shard_map`: set the mesh (`jax.set_mesh`).

    Args:
        op: for messages.
        implementations: by name; kernels in order of preference.
        name: None, a name, or a kernel's name followed by ":interpret".
        default: what None falls back on; runs on every platform.

    Raises:
        ValueError: no such implementation here (names those there are); or, when called, one that was asked for by
            name cannot take its arguments (says why).
    """
    if name is None:
        return _first(implementations, default)
    names = available(implementations)
    if name not in names:
        known = f"needs a {_PLATFORM[name]}, not {target_platform()}" if name in implementations else "does not exist"
        raise ValueError(f"{op}: implementation {name!r} {known} (available: {', '.join(names)})")
    run = implementations[name.removesuffix(_INTERPRET)]
    return _named(op, run, name, names) if isinstance(run, Kernel) else run


def _split() -> bool:
    """Whether the compiler splits arrays over a mesh here, which it cannot do to a Pallas kernel; not in shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True) if mesh.axis_names else ()
    return any(size > 1 and kind != jax.sharding.AxisType.Manual for size, kind in kinds)


def _first(implementations: Mapping[str, Callable[..., Any]], default: str) -> Callable[..., Any]:
    platform = None if _split() else target_platform()
    kernels = [implementations[name] for name in implementations if _PLATFORM.get(name, "") == platform]

    def run(*args: Any, **kwargs: Any) -> Any:
        for kernel in kernels:
            if not isinstance(kernel, Kernel) or kernel.unsupported(*args, **kwargs) is None:
                return kernel(*args, **kwargs)
        return implementations[default](*args, **kwargs)

    return run


def _named(op: str, kernel: Kernel, name: str, names: tuple[str, ...]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        reason = kernel.unsupported(*args, **kwargs)
        if reason is not None:
            raise ValueError(f"{op}: implementation {name!r} cannot run this: {reason} (available: {', '.join(names)})")
        return kernel(*args, **kwargs, interpret=name.endswith(_INTERPRET))

    return run
