"""GPUs for which XLA compiles on a host without one."""

from __future__ import annotations

from typing import Any

from jax.experimental import topologies

# Properties as the CUDA driver reports them; XLA needs them if there is no driver.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_core} shared_memory_per_block_optin: {shared_block}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 }}
device_description_str: "{kind}"
"""
DEVICES: dict[str, dict[str, Any]] = {
    "A100": {
        "kind": "NVIDIA A100-SXM4-80GB", "major": 8, "cores": 108, "fpus": 64, "clock": 1.41, "shared_core": 167936,
        "shared_block": 166912, "bandwidth": 2_039_000_000_000, "l2": 41943040, "memory": 84987740160,
    },
    "H100": {
        "kind": "NVIDIA H100 80GB HBM3", "major": 9, "cores": 132, "fpus": 128, "clock": 1.98, "shared_core": 233472,
        "shared_block": 232448, "bandwidth": 3_352_000_000_000, "l2": 52428800, "memory": 85520809984,
    },
}  # fmt: skip


def target(name: str) -> Any:
    """A device to compile for, which need not be present."""
    text = _TARGET.format(**DEVICES[name])
    return topologies.get_topology_desc(
        platform="cuda", topology_name=f"NVIDIA {name}", topology="1x1x1", target_config=text
    ).devices[0]
