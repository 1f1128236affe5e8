"""StreamingLLM while decoding: a rolling window after the sinks (Xiao et al. 2024, Sec. 3.2)."""

import numpy as np

from tests.cache.test_decode_state import one_layer, places
from vlkv import policies


def test_the_oldest_entry_after_the_sinks_leaves():
    rng = np.random.default_rng(0)
    length, new = 20, 9
    arrays = {
        name: rng.normal(size=(n, length, 8)).astype(np.float32) for name, n in zip("qkv", (4, 2, 2), strict=True)
    }
    cache, step = one_layer(
        policies.StreamingLLM(budget=10, evict=True), arrays | {"is_vision": np.arange(length) < 9}, new_tokens=new
    )
    for i in range(new):
        q, k, v = (rng.normal(size=(n, 8)).astype(np.float32) for n in (4, 2, 2))
        cache, _, _ = step(cache, q, k, v)
        wanted = [0, 1, 2, 3, *range(length + i - 5, length + i + 1)]
        for held in places(cache, cache.decode_states.stored[0, 0], length + new):
            assert np.flatnonzero(held).tolist() == wanted
    for off in (policies.StreamingLLM(keep=0.5), policies.StreamingLLM(keep=0.5, evict=True, scope="vision")):
        assert policies.slots_of(off).step is None
