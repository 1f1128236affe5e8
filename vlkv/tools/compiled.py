"""Stores compiled programs in the user's cache folder, so that commands compile each program only once."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import platformdirs


def folder() -> Path:
    """The folder of compiled programs in the cache folder of this user and operating system."""
    return platformdirs.user_cache_path("vlkv") / "compiled"


def keep_programs() -> None:
    """Makes jax store compiled programs in `folder`, unless the user has configured jax's compilation cache."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
