"""What fits: weights and caches on so many cards, and the largest batch for each context.

Of each card, with weights divided as ``model.sharding`` says and caches whole on every one::

    weights + derived + sum over groups of page_bytes * pages(batch, context) <= share * memory

``derived`` are the absorbed up-projections that decoding reads, and a gain for each layer. A
program needs room beside its arguments while it runs, which only the compiler knows: ``compiled``
asks it, for a step of the model's true size, without memory for a single weight.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.checks import checked_size, is_real
from mla_jax.config_v4 import AnyConfig
from mla_jax.errors import ArgumentError, EngineError
from mla_jax.metadata.common import HostBatch
from mla_jax.metadata.packed import pack
from mla_jax.model.family import GPU_CHUNK, CacheGroup, Family, Serving, family_of
from mla_jax.model.sharding import derived_axis, named_leaves, share_axis
from mla_jax.model.step import Step, empty_batch
from mla_jax.model.token_history import TokenHistory
from mla_jax.placement import Placement
from mla_jax.types import Int

__all__ = ["Compiled", "Fit", "Settings", "compiled", "fit", "program"]

CONTEXTS = tuple(1024 * 4**i for i in range(6))
"""Tokens of a request for which the largest batch is printed: 1,024 to 1,048,576."""

_MOST_BYTES = 2**60

_MANY = 2**20
"""So many requests that each further one takes equally many pages."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides how large a served model is."""

    config: AnyConfig
    cards: int = 1
    dtype: str = "bfloat16"  # of weights and activations
    fp8: bool = False  # products of the layers keep block-scaled e4m3 weights
    cache_format: str = "bf16"
    page: int = 64
    prefill_chunk: int = GPU_CHUNK

    def __post_init__(self) -> None:
        for name in ("cards", "page", "prefill_chunk"):
            checked_size(name, getattr(self, name))

    @property
    def family(self) -> Family:
        return family_of(self.config.family)

    def model(self) -> nnx.Module:
        """The module without memory for its weights."""
        return self.family.abstract(self.config, jnp.dtype(self.dtype), fp8=self.fp8)

    def serving(self, *, requests: int = 1, context: int | None = None, **more: Any) -> Serving:
        """An engine's settings of so many requests of so many tokens."""
        return Serving.of(
            self.config,
            page=self.page,
            max_requests=requests,
            prefill_chunk=self.prefill_chunk,
            max_model_len=context,
            dtype=self.dtype,
            cache_format=self.cache_format,
            **more,
        )

    def groups(self) -> tuple[CacheGroup, ...]:
        return self.family.groups(self.config, self.serving())


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Bytes of one card, and what fits beside them."""

    settings: Settings
    room: int  # bytes of one card that may be used
    weights: int  # bytes of one card
    derived: int  # bytes of one card
    groups: dict[str, float]  # of each cache group: bytes of one more token in all of its layers
    once: int  # bytes of caches for no request: a spare page a group, windows of a step's prompts
    fixed: int  # bytes of caches that each request takes whatever its length: windows and rings
    history: int  # bytes of each request's token history, for penalties and biases
    largest: dict[int, int]  # tokens of a request to requests at once

    @property
    def token(self) -> float:
        """Bytes of one more token in all groups."""
        return sum(self.groups.values())

    @property
    def tokens(self) -> int:
        """Tokens of one request that fit; 0 where the weights alone do not."""
        left = self.room - self.weights - self.derived - self.once - self.fixed - self.history
        return max(0, int(left / self.token)) if self.token else 0


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A mixed step as the compiler sees it, beside what was predicted; bytes of one card."""

    batch: int
    context: int
    predicted: int  # weights, derived, caches and token histories
    arguments: int  # of the program
    temporaries: int  # beside its arguments, on the platform it was compiled for
    platform: str

    @property
    def error(self) -> float:
        """Of the prediction, relative to the program's own figure."""
        return self.predicted / self.arguments - 1


def fit(
    settings: Settings, *, memory: float, share: float = 0.75, contexts: Sequence[int] = CONTEXTS
) -> Fit:
    """What fits into ``share`` of ``memory`` bytes on each card.

    ``share`` is what JAX takes for itself: 0.75, unless ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says
    otherwise.

    Raises:
        ArgumentError: memory or share out of range.
        EngineError: the family does not store the model's widths in this format.
    """
    if not (is_real(memory) and 0 < memory <= _MOST_BYTES):
        raise ArgumentError("fit: memory", memory, "bytes above 0, at most 2^60")
    if not (is_real(share) and 0 < share <= 1):
        raise ArgumentError("fit: share", share, "above 0, at most 1")
    room, groups = int(memory * share), settings.groups()
    weights, derived = _weights(settings)
    left = room - weights - derived
    longest = settings.config.max_positions
    many, more = (
        sum(_bytes(g, settings, n, longest) for g in groups if not g.grows)
        for n in (_MANY, _MANY + 1)
    )
    each = more - many
    return Fit(
        settings=settings,
        room=room,
        weights=weights,
        derived=derived,
        groups={group.name: group.token_bytes for group in groups},
        once=many - _MANY * each + sum(g.page_bytes for g in groups if g.grows),
        fixed=each,
        history=TokenHistory.row_bytes(settings.config.vocab),
        largest={
            n: _most(settings, groups, n, left)
            for n in sorted({*contexts, longest})
            if n <= longest
        },
    )


def _most(settings: Settings, groups: Sequence[CacheGroup], context: int, left: int) -> int:
    """The largest batch whose caches fit, by bisection: more requests never take less."""
    low, high = 0, 1
    while _carried(settings, groups, high, context) <= left and high < _MOST_BYTES:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = _carried(settings, groups, middle, context) <= left
        low, high = (middle, high) if fits else (low, middle)
    return low


def _carried(settings: Settings, groups: Sequence[CacheGroup], batch: int, context: int) -> int:
    """Bytes of caches and token histories."""
    caches = sum(_bytes(group, settings, batch, context) for group in groups)
    return caches + batch * TokenHistory.row_bytes(settings.config.vocab)


def _bytes(group: CacheGroup, settings: Settings, batch: int, context: int) -> int:
    """Of the pages that this many full requests take, and the page that is never given."""
    return group.page_bytes * _pages(group, settings, batch, context)


def _pages(group: CacheGroup, settings: Settings, batch: int, context: int) -> int:
    each = math.ceil(context / group.tokens) * group.tokens
    chunk = settings.prefill_chunk
    return 1 + group.pages_for(batch * each, requests=batch, chunk=chunk)


def _weights(settings: Settings) -> tuple[int, int]:
    """Bytes of one card: the module's leaves, and what is derived from them."""
    model: Any = settings.model()
    cards = settings.cards
    leaves = named_leaves(nnx.state(model)).items()
    held = (_share(x, share_axis(path, x.shape, x.dtype, cards), cards) for path, x in leaves)
    derived = jax.tree.leaves(nnx.eval_shape(lambda m: m.derive(), model))
    return sum(held), sum(_share(x, derived_axis(x.shape, cards), cards) for x in derived)


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def _share(leaf: Any, axis: int | None, cards: int) -> int:
    """Bytes of one card of a leaf that is divided along ``axis``, or whole."""
    return _nbytes(leaf) if axis is None else _nbytes(leaf) // cards


def compiled(settings: Settings, *, batch: int, context: int) -> Compiled:
    """Compile a step of ``batch`` requests of up to ``context`` tokens for this machine.

    All requests decode but the last, which prefills: such a program reads every weight, those of
    the prefill and the absorbed ones.

    Raises:
        EngineError: this machine has fewer devices than cards.
    """
    checked_size("batch", batch)
    found = jax.local_devices()
    if settings.cards > len(found):
        allowed = f"at most {len(found)}, those of this machine"
        raise EngineError("cards of a program to compile", settings.cards, allowed)
    placement = Placement.of(found[: settings.cards])
    lens = np.ones(batch, np.int32)
    lens[-1] = min(settings.prefill_chunk, context)
    memory = program(settings, placement, lens, context=context).memory_analysis()
    serving = settings.serving(requests=batch, context=context, placement=placement)
    groups = settings.family.groups(settings.config, serving)
    return Compiled(
        batch=batch,
        context=context,
        predicted=sum(_weights(settings)) + _carried(settings, groups, batch, context),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        platform=placement.device.platform,
    )


def program(
    settings: Settings,
    placement: Placement,
    new_tokens: Int[np.ndarray, "requests"],
    *,
    context: int,
    fp8_activations: bool | None = None,
) -> Any:
    """A step of requests of up to ``context`` tokens, compiled; no weight or cache has memory."""
    serving = settings.serving(
        requests=len(new_tokens),
        context=context,
        placement=placement,
        fp8_activations=fp8_activations,
    )
    groups = settings.family.groups(settings.config, serving)
    builder = settings.family.builder(settings.config, serving)
    decision = builder.decide(HostBatch.of(new_tokens, np.full_like(new_tokens, context)))
    step = Step(
        settings.model(),
        builder,
        placement=placement,
        fp8_activations=serving.fp8_activations,
        vocab=settings.config.vocab,
        history_rows=len(new_tokens),
    )
    caches = dict(_abstract_caches(settings, groups, placement, len(new_tokens), context))
    layout = pack(empty_batch(decision, [group.name for group in groups])).layout
    return step.compile(layout, caches)


def _abstract_caches(
    settings: Settings,
    groups: Sequence[CacheGroup],
    placement: Placement,
    batch: int,
    context: int,
) -> Iterator[tuple[str, Any]]:
    """Names and stacks of caches of the sizes that ``_carried`` counts, without memory."""
    for group in groups:
        pages = _pages(group, settings, batch, context)
        shapes = jax.eval_shape(lambda g=group, n=pages: g.alloc(n, placement))
        yield (
            group.name,
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.everywhere),
                shapes,
            ),
        )
