from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression import matching
from vlkv.compression.option_types import Range, Share
from vlkv.compression.policy import Mask, Observation
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens, patches, sum_by, videos
from vlkv.masks import top


class VidCom2(ReducingPolicy):
    """Keeps the tokens that are least similar to the video and to their frame (Liu et al. 2025).

    The similarity of a token and a centre is the sum over k = -3 to 1 of exp(-d^2 / 2^(k + 1)), where d is the distance
    of the normalised embeddings in the `channels` with the smallest variance. A frame's share of the budget is 1 + u -
    1 / frames, where u is a softmax over the frames of how unlike the centre of the video they are. Each video of a row
    has its own centre, and an image is a video of one frame; all share one budget. Tokens without a place in a frame
    are kept first.

    Attributes:
        channels: fraction of the channels that are compared, rounded down.
        temperature: of the softmax.
    """

    channels: Share = 0.5
    temperature: Annotated[float, Range(0, above=True)] = 0.01

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        patch = patches(tokens)
        frame, video = jnp.maximum(tokens.grid[:, 0], 0), videos(tokens)
        unit = matching.unit(tokens.x * self.quiet(tokens.x, patch))

        def to_centre(number: Int[Array, " T"]) -> Float[Array, " T"]:
            size = sum_by(number, patch.astype(jnp.float32), tokens)
            return similarity(unit, (sum_by(number, unit, tokens) / jnp.maximum(size, 1)[:, None])[number])

        to_video, to_frame = to_centre(video), to_centre(frame)
        size = sum_by(frame, patch.astype(jnp.float32), tokens)
        of_frame = jax.ops.segment_max(jnp.where(patch, video, 0), frame, len(frame))
        share = self.shares(sum_by(frame, to_video, tokens), size, jnp.maximum(of_frame, 0))
        # Numbers proportional to share x size, rounded half up, whose total is exact: Webster's method.
        rank = matching.rank_within(jnp.where(patch, frame, -1), to_video + to_frame)
        order = jnp.where(rank > 0, (rank + 0.5) / (share * size)[frame], 0.0)
        return self.best(-jnp.where(patch, order, -1.0), vision)

    def quiet(self, x: Float[Array, "T D"], patch: Mask) -> Bool[Array, " D"]:
        """The channels with the smallest variance over all patches."""
        width, weight = x.shape[1], patch[:, None] / jnp.maximum(jnp.sum(patch), 1)
        variance = jnp.sum(weight * (x - jnp.sum(weight * x, axis=0)) ** 2, axis=0)
        return top(-variance[None], jnp.ones(width, bool), jnp.array([max(1, int(self.channels * width))]))[0]

    def shares(
        self, similar: Float[Array, " T"], size: Float[Array, " T"], video: Int[Array, " T"]
    ) -> Float[Array, " T"]:
        """Relative share of each frame.

        Args:
            similar: sum over the frame's tokens of their similarity to the centre of its video.
            size: number of its tokens; 0: there is no such frame.
            video: number of its video.
        """
        exists, length = size > 0, len(size)
        unlike = jnp.where(exists, -similar / jnp.maximum(size, 1), -jnp.inf) / self.temperature
        most = jax.ops.segment_max(unlike, video, length)[video]
        weight = jnp.where(exists, jnp.exp(unlike - most), 0)
        total, count = (jax.ops.segment_sum(x, video, length)[video] for x in (weight, exists.astype(int)))
        return 1 + weight / jnp.maximum(total, 1) - 1 / jnp.maximum(count, 1)


def similarity(unit: Float[Array, "T D"], centre: Float[Array, "T D"] | Float[Array, " D"]) -> Float[Array, " T"]:
    """Sum of Gaussian kernels of five widths."""
    square = jnp.sum((unit - centre) ** 2, axis=-1)
    return jnp.sum(jnp.exp(-square[:, None] / 2.0 ** jnp.arange(-2, 3)), axis=1)
