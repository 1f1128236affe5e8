"""A conversation of many turns with pictures, in constant memory, against float64 numpy that deletes entries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import vlkv
import vlkv.generation.chat
from tests import models
from tests.generation.test_reselection import BUDGET, WINDOW, simulated, snapkv, stored, uniform
from vlkv import policies
from vlkv.generation import jitted

EVERY, ANSWER = 32, 3


class Recorded(vlkv.Chat):
    """Notes what the cache is fed, the logits after it, and where selections are due."""

    def __init__(self, *args, **options):
        self.parts, self.logits, self.start = [], [], None  # parts: (vectors [T, D], whether the turn ends)
        super().__init__(*args, **options)

    def _begin(self, inputs):
        logits = super()._begin(inputs)
        self.first, self.start = inputs, jax.tree.map(jnp.copy, self.cache)
        return logits

    def _extend(self, fed):
        logits = super()._extend(fed)
        x, valid, size = models.embed(self.params, fed)[0], fed.valid[0], min(fed.valid.shape[1], EVERY)
        cuts = range(0, len(valid), size)
        self.parts += [(np.asarray(x[i : i + size])[valid[i : i + size]], False) for i in cuts]
        self.logits.append((sum(len(part) for part, _ in self.parts), np.asarray(logits[0])))
        return logits

    def _decode(self, fed, logits):
        table = self.params.decoder.embedding
        for token in super()._decode(fed, logits):
            self.parts.append((table.scale * np.asarray(table.weight[...])[[token]], False))
            yield token
        self.parts.append((np.empty((0, table.weight.shape[1])), True))


def selections(parts):
    """After how many tokens entries are selected: before a part that does not fit into the tail, and after a turn."""
    times, used, done = [0], 0, 0
    for part, ends in parts:
        if ends or used + len(part) > EVERY:
            times.append(done)
            used = 0
        used, done = used + len(part), done + len(part)
    return times


@pytest.mark.parametrize("turns", [10, pytest.param(100, marks=pytest.mark.full)])
def test_a_conversation_with_pictures_is_that_of_a_simulation_in_constant_memory(miniature, root, turns):
    """Three of ten turns show a picture. The system prompt stays."""
    params, processor = vlkv.load(miniature(2, 4))
    with Image.open(root / "benchmarks" / "data" / "ledger" / "page000.png") as image:
        page = image.convert("RGB")
    pictures = [page.rotate(90 * i) for i in range(4)]
    policy = policies.compose(policies.SnapKV(budget=BUDGET, window=WINDOW), every=EVERY)
    sampling = vlkv.Greedy(max_new_tokens=ANSWER, stop=())
    chat = Recorded(params, processor, page, policy=policy, sampling=sampling, keep_system=True, after_turns=True)
    sizes, programs = set(), []
    for number in range(turns):
        shown = pictures[number % 4] if number % 10 in (3, 6, 8) else None
        chat.ask("row one?" if number % 2 else "row two?", image=shown)
        sizes.add(chat.cache.bytes)
        programs.append(sum(f._cache_size() for f in (vlkv.generation.chat._extend, jitted.recompress, jitted.prefill)))
    assert len(sizes) == 1 and programs[6:] == programs[6:7] * (turns - 6), "nothing grows, and nothing is compiled"

    kept = np.zeros((2, 2, chat.first.valid.shape[1]), bool)
    for layer, head in np.ndindex(2, 2):
        kept[layer, head, list(stored(chat.start, layer, 0, head))] = True
    select = uniform(partial(snapkv, first=chat._system_tokens()))
    vectors = np.concatenate([part for part, _ in chat.parts])
    expected = simulated(params, chat.first, 0, kept, vectors, select, selections(chat.parts))
    assert len(chat.logits) == turns - 1
    for fed, logits in chat.logits:
        np.testing.assert_allclose(logits, expected[fed - 1], rtol=1e-4, atol=1e-4)
