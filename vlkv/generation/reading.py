"""What each layer does on a prompt, and how a prompt is reduced between layers; `read_layers` runs it.

Axes: B batch · T tokens of the prompt · t tokens of one layer · N query heads · K key heads · H head dim ·
A position axes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from pallas_kernels import Kernels
from vlkv.cache.rings import Ring, of_prompt, ring_slots
from vlkv.cache.states import State
from vlkv.compression.candidates import Number, attend, observation
from vlkv.compression.observe import Layer, LayerContext, LayerRun, StackedLayers, fields_of
from vlkv.compression.policy import Policy, ReducingStages
from vlkv.compression.sizes import remaining
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import stage_of
from vlkv.compression.tokens import Tokens, shorten
from vlkv.decoder import Decoder, Recurring
from vlkv.decoder.loop import can_loop, kind_of, loop
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.repeating import Repetition, repeat
from vlkv.inputs import Inputs
from vlkv.masks import first, last
from vlkv.sharding.ops import by_row, prefill_attention

Each = Callable[[Number, Layer], Any]  # number of a layer, the layer


class _Carry(NamedTuple):
    """What `Prefill` carries from layer to layer."""

    tokens: Tokens  # of the next layer, with its input
    vision: int  # bound on the number of vision tokens of a row
    layer: Layer | None = None  # the layer with full attention that has just run
    results: Any = ()  # of `each`: raw Layers until the last reduction; `StackedLayers` after a loop
    rings: tuple[Ring, ...] = ()  # of the layers with a sliding window so far
    states: tuple[State, ...] = ()  # of the layers with a recurrence so far


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """What is the same for all layers of a prefill. `Decoder.walk` calls its methods for each layer."""

    params: Model
    inputs: Inputs
    policy: Policy | None
    observers: Sequence[Policy]  # policies for whose `Stages.measures` the attention of the layers measures
    each: Each
    kernels: Kernels
    key: Key[Array, ""] | None
    stages: tuple[int, ...]  # after which layers the prompt is reduced
    limit: Int[Array, " B"] | None  # as in `rope_table`
    number: Int[Array, "B T"]  # of each token among the valid ones

    @property
    def decoder(self) -> Decoder:
        """Of the model."""
        return self.params.decoder

    @property
    def reducer(self) -> ReducingStages:
        """The method that reduces the prompt; there is one if `stages` has an entry."""
        reducer = None if self.policy is None else slots_of(self.policy).reduce
        assert reducer is not None
        return reducer

    @property
    def waits_until(self) -> int:
        """Layers before this one are handed to `each` only after the last reduction; 0: there are none."""
        return self.stages[-1] if self.stages and stage_of(self.reducer, "drops_early_layers") else 0

    def run(self, *, stacked: bool = False) -> _Carry:
        """Runs all layers, from the embedding on. The result has only the last token of each row."""
        inputs = self.inputs
        blocks = stage_of(self.reducer, "class_attention_layers") if self.stages else ()
        tokens = Tokens.of(inputs, *self.params.embed(inputs, blocks))
        repetition = None
        if self.policy is not None and (instruction := slots_of(self.policy).repeats) is not None:
            tokens, repetition = repeat(self.params, tokens, instruction)
        start = _Carry(tokens, inputs.max_vision)
        start = self.reduce(0, start) if 0 in self.stages else start
        can_stack = stacked and max(self.stages, default=0) == 0 and isinstance(tokens.x, jax.core.Tracer)
        if can_stack and can_loop(self.decoder):
            with contextlib.suppress(TypeError):  # jax raises it for an array in `if obs.layer < 2`
                return self.loop(repetition, start)
        # A reduction after the last layer needs its output for all tokens; else only the last one's is used.
        narrow = None if self.decoder.full_layers in self.stages else _last_token
        attend, recur = partial(self.attend, repetition), partial(_recur, repetition)
        positions = (repetition or start.tokens).positions
        carry, x = self.decoder.walk(
            start, start.tokens.x, positions, attend, self.after, self.limit, recur=recur, narrow=narrow
        )
        return _last_token(carry, x, x)[0]  # finds one token if `narrow` has left only it

    def loop(self, repetition: Repetition | None, start: _Carry) -> _Carry:
        """`run` from the first layer on, without a reduction between the layers."""
        is_last = jax.vmap(partial(last, count=1))(start.tokens.valid)

        def attend(i: Int[Array, ""], carry: None, q: Array, k: Array, v: Array) -> tuple[None, Array, Any]:
            after, attended = self.attend(repetition, i, start, q, k, v)
            assert after.layer is not None
            return carry, attended, self.each(i, after.layer)

        positions, added = (repetition or start.tokens).positions, start.tokens.added
        only = jnp.argmax(is_last, axis=1)
        _, x, results = loop(self.decoder, None, start.tokens.x, positions, attend, self.limit, added=added, only=only)
        tokens = jax.vmap(partial(shorten, length=1))(start.tokens, is_last)
        return start._replace(tokens=dataclasses.replace(tokens, x=x), results=StackedLayers(results))

    def attend(
        self, repetition: Repetition | None, i: Number, carry: _Carry, q: Array, k: Array, v: Array
    ) -> tuple[_Carry, Array]:
        """The attention of a layer. It leaves a ring if it has a window, and else a `Layer`, which policies observe."""
        tokens, bounds = carry.tokens, self.inputs.bounds
        kind = kind_of(self.decoder, i)
        # A window counts the tokens of the prompt, also those that a reduction has dropped.
        place = jnp.take_along_axis(self.number, tokens.source, axis=1)
        until = self.decoder.until_in(kind, self.decoder.until(tokens.is_vision)) if bounds.vision else None
        window: dict[str, Any] = {} if kind.window is None else {"window": kind.window}
        if window and self.stages:
            window["place"] = place
        attention: Any = partial(
            prefill_attention, ahead=self.decoder.ahead, implementation=self.kernels.prefill_attention
        )
        qkv, repeated = (q, k, v), None
        if repetition is not None:  # attention runs over both readings, policies observe q, k and v of the first one
            attention, (q, k, v, repeated) = repetition.of(attention, *qkv)
        attention = partial(attention, *qkv, valid=tokens.valid, until=until, **window)
        if kind.shared:
            return carry, attention()
        if kind.window is not None:
            slots = ring_slots(kind.window, bounds.vision + bounds.text)
            place = jnp.where(tokens.valid, place, -1)
            ring = of_prompt(k, v, place, self.number[:, -1] + 1, window=kind.window, slots=slots)
            return carry._replace(rings=(*carry.rings, ring)), attention()
        context = context_of(self.params, self.policy, i, tokens.positions, v, limit=self.limit, repeated=repeated)
        run = LayerRun(
            is_candidate=tokens.valid, source=tokens.source, until=until, kernels=self.kernels, bounds=bounds
        )
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        masks = fields_of(tokens, "is_vision", "valid", "grid")
        layer = Layer(q=q, k=k, v=v, **masks, context=context, run=run)
        attended, layer = attend(attention, layer, kind.number, self.observers, layers=self.decoder.full_layers)
        return carry._replace(layer=layer), attended

    def after(self, i: int, carry: _Carry, x: Array) -> tuple[_Carry, Array, Array | None]:
        """Hands the layer to `each`, and reduces the prompt if a reduction follows the layer."""
        x, kind = self.decoder.add_features(carry.tokens.added, i, x), self.decoder.kinds[i]
        if not kind.is_counted:
            x, rings, states = jax.lax.optimization_barrier((x, carry.rings, carry.states))  # see the next comment
            return carry._replace(tokens=dataclasses.replace(carry.tokens, x=x), rings=rings, states=states), x, None
        number, layer, waits_until = kind.number, carry.layer, self.waits_until
        assert layer is not None
        # The barrier makes XLA run `each` before the next layer, so that the arrays of this layer are freed first.
        x, result = jax.lax.optimization_barrier((x, layer if number < waits_until else self.each(number, layer)))
        carry = carry._replace(tokens=dataclasses.replace(carry.tokens, x=x), results=(*carry.results, result))
        if number + 1 not in self.stages:
            return carry, x, None
        carry = self.reduce(number + 1, carry)
        if waits_until:
            results = [_drop_candidates(layer, carry.tokens, self.inputs.valid.shape[1]) for layer in carry.results]
            if number + 1 == waits_until:
                results = [self.each(number, layer) for number, layer in enumerate(results)]
            carry = carry._replace(results=tuple(results))
        return carry, carry.tokens.x, carry.tokens.positions

    def reduce(self, layers: int, carry: _Carry) -> _Carry:
        """Reduces the prompt after this number of layers with full attention."""
        reducer, bounds, stage = self.reducer, self.inputs.bounds, self.stages.index(layers)
        vision = remaining(reducer, stage=stage, vision=carry.vision, images=bounds.images, placeless=bounds.placeless)
        length = min(carry.tokens.x.shape[1], vision + bounds.text)

        def reduce_row(tokens: Tokens, layer: Layer | None, key: Key[Array, ""] | None) -> tuple[Tokens, Array]:
            obs = None
            if layer is not None:
                obs = observation(reducer, layer, layers - 1, key, layers=self.decoder.full_layers)
            changed, kept = reducer.reduce(tokens, obs, stage=stage)
            of_image = kept & tokens.valid & tokens.is_vision
            # At most `vision` vision tokens remain, so that the text after them fits into `length`.
            kept = (kept & tokens.valid & ~tokens.is_vision) | first(of_image, vision)
            return shorten(changed, kept, length), jnp.sum(of_image)

        batch = len(carry.tokens.valid)
        keys = None if self.key is None else jax.random.split(self.key, batch)
        tokens, counts = by_row(reduce_row, batch)(carry.tokens, carry.layer, keys)
        if not isinstance(counts, jax.core.Tracer) and int(jnp.max(counts)) > vision:
            raise InputError(
                f"{type(reducer).__name__}: reduce has kept {int(jnp.max(counts))} vision tokens at "
                f"stage {stage}, but remaining allows {vision}: correct one of the two"
            )
        return carry._replace(tokens=tokens, vision=vision)


def context_of(
    params: Model, policy: Policy | None, layer: Number, positions: Array, v: Array, **known: Any
) -> LayerContext:
    """The context of a layer for policies (`Stages.uses`). Norms are computed only for a policy that uses them."""
    uses = () if policy is None else slots_of(policy).uses
    norms = None
    if "output_norm" in uses:
        norms_in = [of_layer.out.norms for of_layer in params.decoder.layers]
        norms = norms_in[layer](v) if isinstance(layer, int) else jax.lax.switch(layer, norms_in, v)
    return LayerContext(positions=positions, output_norm=norms, rope=params.decoder.rope, **known)


def _last_token(carry: _Carry, x: Array, attended: Array) -> tuple[_Carry, Array, Array]:
    """For `Decoder.walk`: keeps only the last valid token of each row, a vision token if an image ends the prompt."""
    is_last = jax.vmap(partial(last, count=1))(carry.tokens.valid)
    tokens = jax.vmap(partial(shorten, length=1))(dataclasses.replace(carry.tokens, x=x), is_last)
    return carry._replace(tokens=tokens), tokens.x, attended[jnp.arange(len(x)), jnp.argmax(is_last, axis=1)][:, None]


def _recur(repetition: Repetition | None, i: int, carry: _Carry, run: Recurring) -> tuple[_Carry, Array]:
    """For `Decoder.walk`: a layer with a recurrence. After a reduction, it processes the remaining tokens.

    With a repetition it runs twice: over the prompt for the cached state, and over both for the output.
    """
    valid = carry.tokens.valid
    if repetition is None:
        output, state = run(None, valid)
    else:
        _, state = run(None, jnp.concatenate([valid, jnp.zeros_like(repetition.valid)], axis=1))
        output, _ = run(None, jnp.concatenate([valid, repetition.valid], axis=1))
    return carry._replace(states=(*carry.states, state)), output


def stages_of(reducer: ReducingStages, decoder: Decoder) -> tuple[int, ...]:
    """Numbers of full layers before each reduction. InputError: later layers share keys and values of earlier ones."""
    stages = reducer.reductions(decoder.full_layers)
    before = [i for i, kind in enumerate(decoder.kinds) if kind.is_counted and kind.number < max(stages, default=0)]
    owners = [decoder.kinds.index(kind._replace(shared=False)) for kind in decoder.kinds if kind.shared]
    if before and min(owners, default=before[-1] + 1) <= before[-1]:
        allowed = sum(kind.is_counted for kind in decoder.kinds[: min(owners)])
        raise InputError(
            f"{type(reducer).__name__} reduces the prompt after {max(stages)} of {decoder.full_layers} "
            "full layers, but later layers of this model use keys and values of earlier ones: at most "
            f"{allowed} is possible"
        )
    return stages


def _drop_candidates(layer: Layer, tokens: Tokens, length: int) -> Layer:
    """The layer without the candidates that a later reduction dropped."""
    row = jnp.arange(tokens.valid.shape[0])[:, None]
    remains = jnp.zeros((tokens.valid.shape[0], length), bool).at[row, tokens.source].set(tokens.valid)
    run = dataclasses.replace(layer.run, is_candidate=layer.is_candidate & remains[row, layer.source])
    return dataclasses.replace(layer, run=run)
