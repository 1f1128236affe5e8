"""Compiled programs are kept between processes."""

import os
import subprocess
import sys


def test_programs_are_kept_also_if_one_was_compiled_before(tmp_path):
    code = (
        "import jax, vlkv; jax.jit(lambda x: x + 1)(1); vlkv.keep_programs()\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.jit(lambda x: x * 3)(2).block_until_ready()"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert len(list(tmp_path.rglob("*-cache"))) == 1
