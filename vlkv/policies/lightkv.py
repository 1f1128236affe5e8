from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Annotated, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets, matching
from vlkv.compression.option_types import Positive, Range, Share, Variant
from vlkv.compression.policy import Mask, Observation, check_types
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.sharding.ops import attention_mass, attention_mass_rows

_LAYERS = (15, 23, 31)  # of 40: Table 6

_Removed = Annotated[float, Range(0, 0.5, above=True)]


class LightKV(ReducingPolicy):
    """Bipartite matching in windows of the image's grid, at several layers of prefill (Sec. 3.2).

    After each of `layers`, the image is cut into W x W windows. In a window, each token at an even index (A) is matched
    with the token at an odd index (B) with the most similar hidden state (Eq. 5). Of the n tokens, the min(int(rho n),
    n // 2) closest of A are merged into their B, as an average weighted by xi (Eq. 8). xi of a vision token is its
    attention to the text of the prompt, over all heads and without the causal mask (Eq. 7). Tokens without a grid
    position are not merged. The paper's number of merges, floor(rho v / 2), contradicts Eq. 9, which we follow.

    The published code ("released") takes the softmax of xi over queries instead of keys, renumbers the positions of the
    remaining tokens, and does not merge images of fewer than 8 W^2 tokens.

    Attributes:
        layers: Lambda, how many layers run before each stage (Eq. 9); None: 15, 23 and 31 of 40, scaled to the model.
        windows: W, windows per side, of each stage. The paper uses (6, 4, 2) for LLaVA-NeXT (App. E.2).
        rate: instead of `layers`, the share of vision entries that all layers together process and cache (Eq. 9), as in
            Table 8: 15, 23 and 31 of 40 are scaled until Eq. 9 gives the rate.
        grid: how later stages arrange the remaining tokens: "survivors": in raster order on the smallest square, as in
            the published code; "original": at their patches on the grid of the image.
        edges: tokens of B into which a token of A is merged: "nearest", as in ToMe and the published code, or "all"
            that are close enough (Eq. 6, `matching.fold_pairs`). Both remove as many tokens.
        rho: fraction of a window's tokens that a stage removes, at most 0.5; one for all stages or one per stage. None:
            0.5, or the fraction that follows from `keep` (the fraction left after all stages).
        variant: "paper" or "released".
    """

    layers: tuple[Positive, ...] | None = None
    windows: tuple[Positive, ...] = (4, 2, 1)
    rho: _Removed | tuple[_Removed, ...] | None = None
    rate: Share | None = None
    grid: Literal["survivors", "original"] = "survivors"
    edges: Literal["nearest", "all"] = "nearest"
    variant: Variant = "paper"
    keeps_placeless = True
    needs = property(lambda self: () if self.variant == "paper" else ("whole prompt",))

    def __post_init__(self) -> None:
        check_types(self)
        check_layers(self, self.layers, len(self.windows))
        if self.rate is not None:
            self.check("rate", self.layers is None, f"chooses the layers: leave out layers={self.layers!r}")
            self.check("rate", len(self.windows) == 3, "is for three stages")
        fits = not isinstance(self.rho, tuple) or len(self.rho) == len(self.windows)
        self.check("rho", fits, "must have one number for each stage, or one for all")
        if self.keep is None and self.budget is None:
            object.__setattr__(self, "keep", math.prod(1 - rho for rho in self.ratios))
        super().__post_init__()
        if self.rho is None:
            check_share(self, len(self.windows), "layers= and windows=")
        survives = math.prod(1 - rho for rho in self.ratios)
        if self.rate is not None:
            self.check("rate", survives < self.rate <= 1, f"must lie between {survives:.4g}, the share left, and 1")
        agrees = math.isclose(survives, self.last_keep, rel_tol=1e-9)
        self.check("keep", agrees, f"contradicts rho={self.rho!r}, which keeps {survives:.4g}: give one of the two")

    @property
    def ratios(self) -> tuple[float, ...]:
        """rho of each stage."""
        if isinstance(self.rho, tuple):
            return self.rho
        if self.rho is not None:
            return (self.rho,) * len(self.windows)
        if self.keep is None:
            return (0.5,) * len(self.windows)
        return (round(1 - share_per_stage(self.keep, len(self.windows)), 12),) * len(self.windows)

    def reductions(self, layers: int) -> tuple[int, ...]:
        if self.layers is not None:
            return self.layers
        if self.rate is None:
            return scaled(layers)
        kept_share = math.prod(1 - rho for rho in self.ratios)
        return scaled(layers, (self.rate - kept_share) / (processed(_LAYERS, 40, self.ratios) - kept_share))

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        assert obs is not None
        target, merged = self.pairs(tokens, stage)
        kept = tokens.valid & ~merged
        positions = tokens.positions
        if self.variant == "released":
            positions = jnp.broadcast_to(jnp.maximum(jnp.cumsum(kept) - 1, 0)[:, None], positions.shape)
        if self.edges == "nearest":
            x = matching.fold(tokens.x, self.guidance(obs), target, merged)
        else:
            window, place, _ = self.windowed(tokens, stage)
            x = matching.fold_pairs(
                tokens.x, self.guidance(obs), target, merged, (window >= 0) & (place % 2 == 1), window
            )
        size = matching.sizes(tokens.size, target, merged)
        return dataclasses.replace(tokens, x=x, positions=positions, size=size), kept

    def pairs(self, tokens: Tokens, stage: int) -> tuple[Int[Array, " T"], Mask]:
        """The most similar token in B of each token in A, and which tokens are merged into theirs."""
        window, place, count = self.windowed(tokens, stage)
        inside = window >= 0
        target, cosine = matching.closest(tokens.x, inside & (place % 2 == 1), window)
        removed = jnp.minimum(budgets.share(self.ratios[stage], count, count.shape[0]), count // 2)
        return target, matching.merge_order(cosine, inside & (place % 2 == 0), window) < removed

    def windowed(self, tokens: Tokens, stage: int) -> tuple[Int[Array, " T"], Int[Array, " T"], Int[Array, " T"]]:
        """The window of each token (-1: none), its index in the window in raster order, and the window's size."""
        image, line, column = tokens.grid.T
        inside = tokens.valid & tokens.is_vision & (line >= 0)
        image = jnp.where(inside, image, -1)
        count = matching.sum_within(image, inside)
        if stage == 0 or self.grid == "original":
            lines, columns = (matching.largest_within(image, x) + 1 for x in (line, column))
        else:
            # Side of the smallest square that holds n, in integers, because a float root may be inexact.
            squares = np.array([math.isqrt(max(n - 1, 0)) + 1 for n in range(line.shape[0] + 1)], np.int32)
            lines = columns = jnp.asarray(squares)[count]
            line, column = jnp.divmod(matching.rank_within(image, jnp.arange(line.shape[0])), columns)
        sides = self.windows[stage]
        window = (image * sides + part(line, lines, sides)) * sides + part(column, columns, sides)
        if self.variant == "released":
            inside = inside & (count >= 8 * sides**2)
        window = jnp.where(inside, window, -1)
        place = matching.rank_within(window, jnp.arange(window.shape[0]))
        return window, place, matching.sum_within(window, inside)

    def guidance(self, obs: Observation) -> Float[Array, " T"]:
        """xi (Eq. 7): attention of each token to all text, over all heads, without the causal mask."""
        text = (obs.valid & ~obs.is_vision)[None].astype(jnp.float32)
        if self.variant == "paper":
            run = obs.kernels.attention_mass_rows
            mass = attention_mass_rows(
                obs.q, obs.k, key_weight=text, key_mask=obs.valid, causal=False, implementation=run
            )
        else:  # softmax over queries: queries and keys are swapped
            k = jnp.repeat(obs.k, obs.q.shape[0] // obs.k.shape[0], axis=0)
            run = obs.kernels.attention_mass
            mass = attention_mass(k, obs.q, row_weight=text, key_mask=obs.valid, causal=False, implementation=run)
        return jnp.sum(mass[0], axis=0)

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """`left_by_windows` for the worst distribution of tokens over images and windows."""
        sides = self.windows[stage]
        rho = self.ratios[stage]
        if self.variant == "paper":
            return left_by_windows(vision, rho, images * (sides**2 + 1))
        # An image that is not merged has at most 8 W^2 - 1 tokens on its grid, and one other token.
        most = 8 * sides**2

        def left(unmerged: int) -> int:
            rest = max(vision - unmerged * most, 0) if unmerged < images else 0
            return min(vision, unmerged * most) + left_by_windows(rest, rho, (images - unmerged) * (sides**2 + 1))

        return max(map(left, range(images + 1)))


def left_by_windows(tokens: int, rho: float, windows: int) -> int:
    """Bound on the tokens that are left if each of at most `windows` windows removes int(rho n) of its n tokens.

    A token without a grid position counts as a window. With rho = p / q, a window removes int(rho n) >= (p n - (q - 1))
    / q tokens; the sum over all windows is the bound.
    """
    exact = Fraction(rho)
    windows = min(windows, tokens)
    removed = -((windows * (exact.denominator - 1) - exact.numerator * tokens) // exact.denominator)
    return tokens - max(0, removed)


def part(index: Int[Array, " T"], side: Int[Array, " T"], parts: Int[Array, " T"] | int) -> Int[Array, " T"]:
    """The part of an index in 0..side-1, where sizes of parts differ by at most one and the first ones are larger."""
    size, larger = side // parts, side % parts
    border = larger * (size + 1)
    return jnp.where(index < border, index // (size + 1), larger + (index - border) // jnp.maximum(size, 1))


def scaled(depth: int, factor: float = 1.0) -> tuple[int, ...]:
    """15, 23 and 31 of 40 layers, times `factor`, for a decoder of `depth` layers; always three different layers."""
    first, second, third = (math.floor(factor * after * depth / 40 + 0.5) for after in _LAYERS)
    third = min(third, depth - 1)
    second = min(second, third - 1)
    first = max(1, min(first, second - 1))
    if factor == 1:
        return first, second, third
    second = min(max(second, first + 1), depth - 2)
    return first, second, min(max(third, second + 1), depth - 1)


def processed(layers: tuple[int, ...], depth: int, ratios: tuple[float, ...]) -> float:
    """The share of vision entries that all layers together process and cache (Eq. 9)."""
    share, total = 1.0, 0.0
    for begin, end, rho in zip((0, *layers), (*layers, depth), (*ratios, 0.0), strict=True):
        total += share * (end - begin)
        share *= 1 - rho
    return total / depth


def share_per_stage(keep: float, stages: int) -> float:
    """The fraction that each of several equal stages keeps, so that `keep` is left after the last."""
    return round(keep ** (1 / stages), 12)  # 0.343 in three stages gives 0.7, without a rounding error


def check_share(policy: ReducingPolicy, stages: int, remedy: str) -> None:
    """Raises InputError if `stages` stages cannot reach `keep`, because each removes at most half."""
    share = share_per_stage(policy.last_keep, stages)
    policy.check("keep", share >= 0.5, f"needs {stages} stages that keep {share:.2f} each, but a stage keeps at least "
                 f"0.50: give more stages ({remedy})")  # fmt: skip


def check_layers(policy: ReducingPolicy, layers: tuple[int, ...] | None, stages: int | None = None) -> None:
    """Raises InputError unless `layers` are increasing numbers of at least 1, one per stage."""
    if layers is None:
        policy.check("layers", stages in (None, 3), f"means three stages, not {stages}: give layers=")
        return
    policy.check("layers", len(layers) > 0 and sorted(set(layers)) == list(layers), "must be increasing numbers")
    policy.check("layers", stages in (None, len(layers)), f"must have the length of windows, {stages}")
