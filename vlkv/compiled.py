"""Compiled programs in the user's cache folder, so that a command compiles them once."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import platformdirs


def folder() -> Path:
    """Where they lie: of this user, on this kind of system."""
    return platformdirs.user_cache_path("vlkv") / "compiled"


def keep_programs() -> None:
    """Has jax keep what it compiles, unless the user has told jax where, or that it should not."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
