"""Problems of the indexer: its scores, and the positions that it chooses."""

from typing import Any

from mla_jax.cache import RecordCache
from mla_jax.errors import ArgumentError
from mla_jax.pallas.arguments import check_cache, check_fields, checked_count
from mla_jax.pallas.problems.parts import (
    any_cache_features,
    bind,
    check_layer,
    row_values,
    sizes_of,
)
from mla_jax.pallas.registry import Problem

__all__ = ["check_selection", "logits", "select_decode", "select_prefill"]


def check_selection(q, weights, cache, meta, k) -> int:
    """``k``, if these can be arguments of ``select_topk``; its parts compare axes."""
    op = "select_topk"
    check_cache(f"{op}: cache", cache, records=True)
    check_fields(f"{op}: meta", meta, "an IndexerMetadata", "decode", "prefill", "slots")
    if isinstance(cache, RecordCache) and cache.format.name != "index_key":
        allowed = "index_key, or a LatentCache without rotary channels"
        raise ArgumentError(f"{op}: format of the cache", cache.format.name, allowed)
    bind(
        op,
        {},
        q=(q, "float", "tokens heads dim"),
        weights=(weights, "float", "tokens heads"),
        **{"meta.slots": (meta.slots, "int", "tokens")},
    )
    if meta.decode is None and meta.prefill is None:
        given = "neither decodes nor chunks of prefills"
        allowed = "rows that select: a step whose requests all attend densely has none"
        raise ArgumentError(f"{op}: meta", given, allowed, "Its tokens see all of their keys.")
    return _best(op, k)


def select_decode(q, weights, cache, page_table, lens, *, k, layer=None) -> Problem:
    op = "select_topk_decode"
    check_layer(op, cache, layer, records=True)
    dim = sum(row_values(op, cache).values())
    size = bind(
        op,
        {"dim": dim},
        q=(q, "codes", "rows queries heads dim"),
        weights=(weights, "float", "rows queries heads"),
        page_table=(page_table, "int", "rows width"),
        lens=(lens, "int", "rows queries"),
    )
    return Problem.of(
        op,
        dtype=str(q.dtype),
        **any_cache_features(cache),
        **sizes_of(size, "heads", "dim", "queries", "rows", "width"),
        k=_best(op, k),
    )


def select_prefill(q, weights, keys, starts, ends, *, k, scales=None) -> Problem:
    op = "select_topk_prefill"
    size = bind(
        op,
        {},
        q=(q, "codes", "queries heads dim"),
        weights=(weights, "float", "queries heads"),
        keys=(keys, "float" if scales is None else "codes", "keys dim"),
        starts=(starts, "int", "queries"),
        ends=(ends, "int", "queries"),
        **({} if scales is None else {"scales": (scales, "float", "keys")}),
    )
    facts = sizes_of(size, "heads", "dim", "queries", "keys")
    kinds = {"dtype": str(q.dtype), "keys_dtype": str(keys.dtype)}
    return Problem.of(op, **kinds, **facts, k=_best(op, k))


def _best(op: str, k: Any) -> int:
    return checked_count(f"{op}: k", k, low=1)


def logits(q, weights, keys) -> Problem:
    op = "indexer_logits"
    size = bind(
        op,
        {},
        q=(q, "float", "tokens heads dim"),
        weights=(weights, "float", "tokens heads"),
        keys=(keys, "float", "keys dim"),
    )
    return Problem.of(op, dtype=str(q.dtype), **size)
