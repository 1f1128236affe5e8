"""The first half of prefill: runs all layers over a prompt, which some policies reduce between layers.

Axes: B batch · T tokens of the prompt · t tokens of one layer · N query heads · K key heads · H head dim ·
A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from pallas_kernels import Kernels
from vlkv.cache.rings import Ring, Rings, of_prompt, ring_slots
from vlkv.cache.states import State
from vlkv.compression.checking import require_fit, require_policy
from vlkv.compression.policy import Policy, ReducingStages
from vlkv.compression.sizes import remaining
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import stage_of
from vlkv.compression.tokens import Tokens, shorten
from vlkv.config import LayerKind
from vlkv.decoder import Decoder, Recurring
from vlkv.decoder.rope import position_limit
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.layer_prompt import LayerPrompt, attend_and_measure, context_of, observation
from vlkv.generation.repeating import Repetition, repeat
from vlkv.generation.sampling import Greedy, begin_history
from vlkv.inputs import Inputs
from vlkv.keys import single_key
from vlkv.masks import first, last
from vlkv.sharding.ops import by_row, prefill_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt after all layers, from which `fill_cache` makes a cache."""

    # Of the layers with full attention: LayerPrompt, or the result of `each` in `read_layers`.
    layers: tuple[Any, ...]
    is_vision: Bool[Array, "B T"]
    valid: Bool[Array, "B T"]
    next_position: Int[Array, "B A"]
    logits: Float[Array, "B vocab"]  # of the first new token
    max_vision: int = dataclasses.field(metadata={"static": True})
    max_text: int = dataclasses.field(metadata={"static": True})
    max_instruction: int = dataclasses.field(metadata={"static": True})
    max_images: int = dataclasses.field(metadata={"static": True})
    reducer: ReducingStages | None = dataclasses.field(metadata={"static": True})  # the policy that reduced the prompt
    max_placeless: int = dataclasses.field(default=0, metadata={"static": True})
    kernels: Kernels = dataclasses.field(default=Kernels(), metadata={"static": True})  # implementations of the ops
    position_limit: Int[Array, " B"] | None = None  # as in PackedCache
    rings: Rings | None = None  # likewise, without capacity for new tokens
    states: tuple[State, ...] = ()  # likewise
    history: Int[Array, "B T"] | None = None  # likewise, without capacity for new tokens


def read_prompt(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    policy: Policy | None = None,
    *,
    observers: Sequence[Policy] = (),
    sampling: Greedy | None = None,
    new_tokens: int | Int[Array, ""] = 64,
    key: PRNGKeyArray | None = None,
    kernels: Kernels | None = None,
) -> Prompt:
    """Runs all layers over a prompt. The result contains the queries, keys and values of all layers.

    Under one jit with `fill_cache`, XLA does not keep what the policy does not use.

    Args:
        params: the model.
        inputs: from the processor, or (outside jit) from the family's transformers processor.
        policy: necessary only if it reduces or repeats the prompt, or uses norms (`needs_own_prompt`).
        observers: policies that will be given to `fill_cache`. What they measure (`Stages.measures`) is then measured
            by the attention of the layers, if a backend can do that, and not again for each of them.
        sampling: its rules may read the ids of the prompt, which the result then has; None: `Greedy()`.
        new_tokens: largest capacity for new tokens of the caches that will be made of the prompt. It matters only for
            models with long-RoPE (see `vlkv.decoder.rope.position_limit`).
        key: for policies that reduce the prompt at random.
        kernels: implementations of the ops, also for functions that use the result; None: those of the platform.

    Raises:
        InputError: the policy does not fit the model, needs a key or a vision tower, or, outside jit, keeps more tokens
            than its `remaining` allows.
    """
    inputs, key = Inputs.of(inputs, params.config), single_key(key)
    if policy is not None:
        require_fit(policy, params.decoder.full_layers, key)
    if not isinstance(observers, Sequence) or isinstance(observers, str):
        raise InputError(f"observers={observers!r} must be a sequence of policies, such as (policy,)")
    for observer in observers:
        require_policy(observer)
    return read_layers(
        params, inputs, policy, lambda _, layer: layer, observers=observers, sampling=sampling, new_tokens=new_tokens,
        key=key, kernels=kernels,
    )  # fmt: skip


def read_layers(
    params: Model,
    inputs: Inputs,
    policy: Policy | None,
    each: Callable[[int, LayerPrompt], Any],
    *,
    observers: Sequence[Policy] = (),
    sampling: Greedy | None = None,
    new_tokens: int | Int[Array, ""] = 64,
    key: Key[Array, ""] | None = None,
    kernels: Kernels | None = None,
) -> Prompt:
    """`read_prompt` that keeps only the result of `each` for every layer, computed before the next layer runs.

    Layers with a sliding window have a ring instead of such a result, layers with a recurrence have a state, and layers
    that use keys and values of earlier ones have nothing; `each` and the reducer do not count them.

    If the policy's reducer has `drops_early_layers`, `each` is called for the layers before the last reduction only
    after this reduction, and gets only the tokens that are left.
    """
    inputs = jax.tree.map(jnp.asarray, inputs)
    layers, (batch, length) = params.decoder.full_layers, inputs.valid.shape
    kernels, reducer = kernels or Kernels(), None if policy is None else slots_of(policy).reduce
    stages = () if reducer is None or inputs.max_vision == 0 else _stages(reducer, params.decoder)
    # `each` waits for the last reduction in the layers before this one.
    waits_until = max(stages, default=0) if reducer is not None and stage_of(reducer, "drops_early_layers") else 0
    keys = None if key is None else jax.random.split(key, batch)
    kinds, number = params.decoder.kinds, jnp.cumsum(inputs.valid, axis=1) - 1  # of each token among the valid ones
    # In M-RoPE the position after an image is the greatest one on all axes plus one.
    greatest = jnp.max(jnp.where(inputs.valid[..., None], inputs.positions, -1), axis=(1, 2))
    limit = position_limit(greatest + 1 + new_tokens, params.decoder.rope)

    def attend(i: int, now: _Carry, q: Array, k: Array, v: Array) -> tuple[_Carry, Array]:
        tokens, (window, _, shared, _) = now.tokens, kinds[i]
        # A window counts the tokens of the prompt, also those that a reduction has dropped.
        place = jnp.take_along_axis(number, tokens.source, axis=1)
        attention, until, (q, k, v, repeated) = _attention(
            params, inputs, tokens, kinds[i], place if stages else None, kernels, repetition, q, k, v
        )
        if window is not None or shared:
            ring = () if window is None or shared else (of_prompt(
                k, v, jnp.where(tokens.valid, place, -1), number[:, -1] + 1, window=window,
                slots=ring_slots(window, inputs.max_vision + inputs.max_text),
            ),)  # fmt: skip
            return now._replace(rings=(*now.rings, *ring)), attention()
        layer = LayerPrompt(
            q=q, k=k, v=v, is_vision=tokens.is_vision, valid=tokens.valid, is_candidate=tokens.valid,
            source=tokens.source, grid=tokens.grid, until=until,
            context=context_of(params, policy, i, tokens.positions, v, limit=limit, repeated=repeated),
        )  # fmt: skip
        attended, layer = attend_and_measure(
            attention, layer, observers if policy is None else (policy, *observers), len(now.results), layers, inputs,
            kernels,
        )  # fmt: skip
        return now._replace(layer=layer), attended

    def after(layer: int, now: _Carry, x: Array) -> tuple[_Carry, Array, Array | None]:
        x, i = params.decoder.add_features(now.tokens.added, layer, x), kinds[layer].number
        if not kinds[layer].is_counted:
            x, rings, states = jax.lax.optimization_barrier((x, now.rings, now.states))  # as below
            return now._replace(tokens=dataclasses.replace(now.tokens, x=x), rings=rings, states=states), x, None
        assert now.layer is not None
        # With this barrier, the next layer starts after `each`, so that the layer's arrays are freed first.
        x, result = jax.lax.optimization_barrier((x, now.layer if i < waits_until else each(i, now.layer)))
        now = now._replace(tokens=dataclasses.replace(now.tokens, x=x), results=(*now.results, result))
        if i + 1 not in stages:
            return now, x, None
        now = reduce(i + 1, now)
        if waits_until:
            results = [_drop_candidates(layer, now.tokens, length) for layer in now.results]
            if i + 1 == waits_until:
                results = [each(number, layer) for number, layer in enumerate(results)]
            now = now._replace(results=tuple(results))
        return now, now.tokens.x, now.tokens.positions

    def reduce(layer: int, now: _Carry) -> _Carry:
        """Reduces the prompt after this number of layers with full attention."""
        assert reducer is not None
        stage, text = stages.index(layer), inputs.max_text
        vision = remaining(
            reducer, stage=stage, vision=now.vision, images=inputs.max_images, placeless=inputs.max_placeless
        )
        one = partial(
            _reduce, reducer, stage=stage, layer=layer - 1, layers=layers, max_instruction=inputs.max_instruction,
            vision=vision, length=min(now.tokens.x.shape[1], vision + text), kernels=kernels,
        )  # fmt: skip
        tokens, left = by_row(one, batch)(now.tokens, now.layer, keys)
        if not isinstance(left, jax.core.Tracer) and int(jnp.max(left)) > vision:
            raise InputError(f"{type(reducer).__name__}: reduce has kept {int(jnp.max(left))} vision tokens at "
                             f"stage {stage}, but remaining allows {vision}: correct one of the two")  # fmt: skip
        return now._replace(tokens=tokens, vision=vision)

    tokens, repetition = _begin(params, inputs, reducer if stages else None, policy)
    start = _Carry(tokens, inputs.max_vision)
    start = reduce(0, start) if 0 in stages else start
    positions, recur = (repetition or start.tokens).positions, partial(_recur, repetition)
    # A reduction after the last layer needs its output for all tokens; else only the last one's is used.
    walk = partial(params.decoder.walk, narrow=None if layers in stages else _last_token)
    end, x = walk(start, start.tokens.x, positions, attend, after, limit, recur=recur)
    tokens, row, rings = _last_token(end, x, x)[0].tokens, jnp.arange(batch), end.rings
    # The next position counts all tokens of the prompt, minus the positions lost if a reduction renumbered them.
    given, now = inputs.positions[row, tokens.source[:, 0]], tokens.positions[:, 0]
    positions_lost = jnp.max(given, axis=-1) - jnp.max(now, axis=-1)
    return Prompt(
        layers=end.results, is_vision=inputs.is_vision, valid=inputs.valid,
        next_position=jnp.broadcast_to((greatest + 1 - positions_lost)[:, None], now.shape),
        position_limit=limit, logits=params.decoder.logits(tokens.x[:, 0]),
        max_vision=inputs.max_vision, max_text=inputs.max_text, max_instruction=inputs.max_instruction,
        max_images=inputs.max_images, max_placeless=inputs.max_placeless, reducer=reducer, kernels=kernels,
        rings=Rings(layers=rings, first_new=number[:, -1] + 1, new_tokens=0) if rings else None, states=end.states,
        history=begin_history(params.config, inputs, sampling),
    )  # fmt: skip


def _last_token(now: _Carry, x: Array, attended: Array) -> tuple[_Carry, Array, Array]:
    """For `Decoder.walk`: the last token that is left. It may be a vision token, if the prompt ends with an image."""
    is_last = jax.vmap(partial(last, count=1))(now.tokens.valid)
    tokens = jax.vmap(partial(shorten, length=1))(dataclasses.replace(now.tokens, x=x), is_last)
    return now._replace(tokens=tokens), tokens.x, attended[jnp.arange(len(x)), jnp.argmax(is_last, axis=1)][:, None]


def _recur(repetition: Repetition | None, i: int, now: _Carry, run: Recurring) -> tuple[_Carry, Array]:
    """A layer with a recurrence, for `Decoder.walk`: after a reduction, it processes the tokens that are left.

    A repetition goes on from the state after the prompt, which alone is cached; so the layer runs twice.
    """
    valid = now.tokens.valid
    if repetition is None:
        read, state = run(None, valid)
    else:
        _, state = run(None, jnp.concatenate([valid, jnp.zeros_like(repetition.valid)], axis=1))
        read, _ = run(None, jnp.concatenate([valid, repetition.valid], axis=1))
    return now._replace(states=(*now.states, state)), read


def _attention(
    params: Model,
    inputs: Inputs,
    tokens: Tokens,
    kind: LayerKind,
    place: Int[Array, "B t"] | None,
    kernels: Kernels,
    repetition: Repetition | None,
    *qkv: Array,
) -> tuple[Callable[..., Any], Int[Array, "B t"] | None, tuple[Any, ...]]:
    """The attention of a layer; the last token that each token of the prompt attends to; and the prompt's q, k, v.

    These are followed by what policies may use of a repetition, or None. `place` is the number of each token in the
    prompt; None: the prompt is not reduced.
    """
    until = params.decoder.until_in(kind, params.decoder.until(tokens.is_vision)) if inputs.max_vision else None
    near = {} if kind.window is None else {"place": place, "window": kind.window}
    attention: Any = partial(prefill_attention, ahead=params.decoder.ahead, implementation=kernels.prefill_attention)
    attention, own = (attention, (*qkv, None)) if repetition is None else repetition.of(attention, *qkv)
    return partial(attention, *qkv, valid=tokens.valid, until=until, **near), until, own


def _stages(reducer: ReducingStages, decoder: Decoder) -> tuple[int, ...]:
    """After which layers the prompt is reduced. InputError: later layers use keys and values of a layer before that."""
    stages = reducer.reductions(decoder.full_layers)
    run = [i for i, kind in enumerate(decoder.kinds) if kind.is_counted and kind.number < max(stages, default=0)]
    owners = [decoder.kinds.index(kind._replace(shared=False)) for kind in decoder.kinds if kind.shared]
    if run and min(owners, default=run[-1] + 1) <= run[-1]:
        most = sum(kind.is_counted for kind in decoder.kinds[: min(owners)])
        raise InputError(f"{type(reducer).__name__} reduces the prompt after {max(stages)} of {decoder.full_layers} "
                         "full layers, but later layers of this model use keys and values of earlier ones: at most "
                         f"{most} is possible")  # fmt: skip
    return stages


class _Carry(NamedTuple):
    """What `read_layers` carries from layer to layer."""

    tokens: Tokens  # of the next layer, with its input
    vision: int  # bound on the number of vision tokens of a row
    layer: LayerPrompt | None = None  # the layer with full attention that has just run
    results: tuple[Any, ...] = ()  # of `each`; raw LayerPrompts until the last reduction
    rings: tuple[Ring, ...] = ()  # of the layers with a sliding window so far
    states: tuple[State, ...] = ()  # of the layers with a recurrence so far


def _begin(
    params: Model, inputs: Inputs, reducer: ReducingStages | None, policy: Policy | None
) -> tuple[Tokens, Repetition | None]:
    embedded = params.embed(inputs, () if reducer is None else stage_of(reducer, "class_attention_layers"))
    tokens = Tokens(
        x=embedded.x, positions=inputs.positions, is_vision=inputs.is_vision, valid=inputs.valid,
        source=jnp.broadcast_to(jnp.arange(inputs.valid.shape[1]), inputs.valid.shape),
        size=jnp.ones(inputs.valid.shape), grid=inputs.grid, tiles=inputs.tiles, frame=inputs.frame,
        tower=embedded.attention, added=embedded.added,
    )  # fmt: skip
    if policy is None or (instruction := slots_of(policy).repeats) is None:
        return tokens, None
    return repeat(params, tokens, instruction)


def _reduce(
    policy: ReducingStages,
    tokens: Tokens,
    just_run: LayerPrompt | None,
    key: Key[Array, ""] | None,
    *,
    stage: int,
    layer: int,
    layers: int,
    max_instruction: int,
    vision: int,
    length: int,
    kernels: Kernels,
) -> tuple[Tokens, Int[Array, ""]]:
    """One stage on one row, which then has `length` tokens; also returns the number of vision tokens that were kept.

    If they are more than `vision`, the last ones are dropped, because the text at the end must fit into the row.
    """
    obs = None
    if just_run is not None:
        obs = observation(
            policy, just_run, key, layer=layer, layers=layers, max_instruction=max_instruction, kernels=kernels
        )
    changed, kept = policy.reduce(tokens, obs, stage=stage)
    of_image = kept & tokens.valid & tokens.is_vision
    kept = (kept & tokens.valid & ~tokens.is_vision) | first(of_image, vision)
    return shorten(changed, kept, length), jnp.sum(of_image)


def _drop_candidates(layer: LayerPrompt, tokens: Tokens, length: int) -> LayerPrompt:
    """The layer without the candidates that a later reduction dropped."""
    row = jnp.arange(tokens.valid.shape[0])[:, None]
    left = jnp.zeros((tokens.valid.shape[0], length), bool).at[row, tokens.source].set(tokens.valid)
    return dataclasses.replace(layer, is_candidate=layer.is_candidate & left[row, layer.source])


def forward(params: Model, inputs: Inputs | Mapping[str, Any]) -> Float[Array, "B T vocab"]:
    """Logits at every token of the prompts, without a cache. `inputs` are those of `generate`."""
    arrays: Inputs = jax.tree.map(jnp.asarray, Inputs.of(inputs, params.config))
    embedded = params.embed(arrays)
    until = params.decoder.until(arrays.is_vision)
    return params.decoder.logits(params.decoder(embedded.x, arrays.positions, arrays.valid, embedded.added, until))
