"""Cases of generation that no other default test has; each finds a fault of `tests/mutants.json`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import prefill_attention
from vlkv.generation.repeating import Repetition


def test_a_window_over_a_repeated_prompt_does_not_count_padding():
    """Five tokens of which the second row has three, and what is repeated of each, against the rows one by one."""
    valid = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 10, 1, 4)).astype(np.float32) for _ in range(3))
    repetition = Repetition(positions=jnp.zeros((2, 10, 1), int), valid=jnp.asarray(valid), instruction=())
    run = jax.jit(partial(repetition.attend, prefill_attention, until=None, window=4, causal=True))
    got = np.asarray(run(q, k, v, valid=jnp.asarray(valid)))
    for row, exists in enumerate(np.concatenate([valid, valid], axis=1)):
        alone = (jnp.asarray(x[row : row + 1, exists]) for x in (q, k, v))
        want = prefill_attention(*alone, window=4, causal=True, valid=jnp.ones((1, exists.sum()), bool))
        np.testing.assert_allclose(got[row, exists], want[0], atol=1e-5)
