"""HiRED's budgets per partition as `generate` applies them, against the formula in float64 numpy.

Axes: I tiles · V patches of one · N heads · D width.
"""

import numpy as np
import pytest

import vlkv
from tests.families import tiny
from tests.models import random_model
from tests.reference import _array as array
from vlkv import policies
from vlkv.families import config_from_hf

# Height and width in pixels, and lines and columns of the tiles that LLaVA-NeXT cuts the picture into.
PICTURES = (((20, 38), (1, 2)), ((42, 20), (2, 1)), ((60, 40), (3, 3)))
START, GRID, KEEP = 3, 3, 0.45


@pytest.fixture(scope="module")
def model():
    raw = tiny.RAW["llava_next"] | dict(vision_config=tiny.TOWER | dict(num_hidden_layers=3))  # two blocks run
    config = config_from_hf({**raw, "model_type": "llava_next"})
    rng = np.random.default_rng(0)
    params = random_model(config)
    pixels, rows = [], []
    for size, (lines, columns) in PICTURES:
        pixels.append(rng.normal(size=(1 + lines * columns, 3, tiny.SIDE, tiny.SIDE)))
        rows.append([*rng.integers(3, 90, START), *[tiny.IMAGE] * len(patches(size, lines, columns)), 5, 6, 7])
    longest = max(map(len, rows))
    batch = {
        "input_ids": np.array([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "pixel_values": pixels, "image_sizes": [size for size, _ in PICTURES],
    }  # fmt: skip
    return params, vlkv.Inputs.from_hf(batch, config), [class_attention(params.vision, one) for one in pixels]


def patches(size, lines, columns):
    """Tile, line and column within it of every vision token of a picture; None: a newline."""
    made = [(0, y, x) for y in range(GRID) for x in range(GRID)]
    height, width = lines * GRID, columns * GRID
    across = size[1] / size[0] > width / height
    shown = int(round(size[0] * width / size[1] if across else size[1] * height / size[0], 7))
    margin = ((height if across else width) - shown) // 2
    for y in range(margin, height - margin) if across else range(height):
        for x in range(width) if across else range(margin, width - margin):
            made.append((1 + y // GRID * columns + x // GRID, y % GRID, x % GRID))
        made.append(None)
    return made


def class_attention(tower, pixels):
    """Head-mean share that the class token gives to each patch in every block that runs: [blocks, I, V]."""

    def norm(x, m):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + m.eps) * array(m.weight) + array(m.bias)

    def heads(x, m):
        return np.einsum("vd,nhd->nvh", x, array(m.weight)) + array(m.bias)[:, None]

    side, made = tiny.PATCH, []
    for image in np.asarray(pixels, np.float64):
        corners = np.ndindex(GRID, GRID)
        cut = [image[:, y * side :, x * side :][:, :side, :side] for y, x in corners]
        x = np.stack([array(tower.class_token), *(np.einsum("cab,dcab->d", p, array(tower.patch)) for p in cut)])
        x = norm(x + array(tower.position.weight), tower.first_norm)
        found = []
        for block in tower.blocks:
            h = norm(x, block.attention_norm)
            q, k, v = (heads(h, m) for m in (block.query, block.key, block.value))
            e = np.exp(np.einsum("nth,nsh->nts", q, k) / np.sqrt(q.shape[-1]))
            a = e / e.sum(-1, keepdims=True)
            found.append(a[:, 0, 1:].mean(0))
            out = np.einsum("nts,nsh->tnh", a, v)
            x = x + np.einsum("tnh,dnh->td", out, array(block.out.weight)) + array(block.out.bias)
            h = norm(x, block.mlp_norm) @ array(block.up.weight).T + array(block.up.bias)
            x = x + (h / (1 + np.exp(-1.702 * h))) @ array(block.down.weight).T + array(block.down.bias)
        made.append(found)
    return np.array(made).swapaxes(0, 1)


def wanted(size, tiles, attention, *, alpha, released):
    """Which vision tokens of a picture stay."""
    first, late = attention[0].reshape(-1, GRID, GRID), attention[-1].reshape(-1, GRID, GRID)
    tokens = patches(size, *tiles)
    own = [[i for i, token in enumerate(tokens) if token and token[0] == tile] for tile in range(1 + np.prod(tiles))]
    total = int(KEEP * sum(map(len, own)))
    whole = min(int(alpha * total), len(own[0]))
    if released:
        best = np.argsort(-first[0].ravel(), kind="stable")[: int(GRID**2 * (1 - alpha))]
        area = [np.isin(band, best).sum() for band in np.array_split(np.arange(GRID**2), np.prod(tiles))]
    else:
        bands = np.array_split(first[0], tiles[0], axis=0)
        area = [cell.sum() for band in bands for cell in np.array_split(band, tiles[1], axis=1)]
    budgets = [whole, *((total - whole) * np.array(area) / sum(area)).astype(int)]
    kept = []
    for budget, places in zip(budgets, own, strict=True):
        kept += sorted(places, key=lambda i: -late[tokens[i]])[:budget]
    return kept


@pytest.mark.full
def test_generate_keeps_the_published_budget_of_every_partition(model):
    (params, inputs, attention), alpha, variant = model, 0.5, "paper"
    output = tiny.answer(params, inputs, policies.HiRED(keep=KEEP, alpha=alpha, variant=variant))
    for row, (size, tiles) in enumerate(PICTURES):
        chosen = {
            (a, v): wanted(size, tiles, attention[row], alpha=a, released=v == "released")
            for a in (0.5, 0.2) for v in ("paper", "released")
        }  # fmt: skip
        vision = len(patches(size, *tiles))
        text = [*range(START), *range(START + vision, START + vision + 3)]
        for head in output.kept[:, row].reshape(-1, output.kept.shape[-1]):
            assert np.flatnonzero(head).tolist() == sorted([*text, *(START + i for i in chosen[alpha, variant])])
        assert len({tuple(sorted(one)) for one in chosen.values()}) >= 3, "alpha and variant change what stays"
