"""Compiled programs are freed before the process has no memory maps left."""

from __future__ import annotations

import jax
import pytest

import vlkv
from tests.models import SMALL, tiny_llava, unequal_batch
from vlkv.decoder import memory_maps


@pytest.fixture(autouse=True)
def not_yet_warned():
    memory_maps._warn_once.cache_clear()


def test_an_error_if_programs_cannot_be_freed(monkeypatch):
    monkeypatch.setattr(memory_maps, "count", lambda: 60_000)
    monkeypatch.setattr(memory_maps, "most", lambda: 65_530)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    message = r"holds 60000 of 65530 memory maps.*fewer methods"
    with pytest.warns(RuntimeWarning, match="freed"), pytest.raises(vlkv.InputError, match=message) as caught:
        jax.eval_shape(vlkv.forward, tiny_llava(config=SMALL), unequal_batch(SMALL))
    assert len(str(caught.value)) <= 200
