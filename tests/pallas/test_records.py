"""Byte records in pages: written and read by reference, every record, several pages, in stacks."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.cache import ELEMENT_FORMATS, RECORD_FORMATS, LatentCache, RecordCache
from mla_jax.errors import ArgumentError
from mla_jax.pallas.cache_io.records import (
    gather_codes,
    gather_records,
    gather_rows,
    write_records,
)

RECORDS = RECORD_FORMATS | {"bf16": ELEMENT_FORMATS["bf16"].record(16, 4)}
POISON = 0xFF  # a NaN as e4m3, as bfloat16, as float32 and as an exponent byte

record_of = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
write, gather = jax.jit(write_records), jax.jit(gather_records, static_argnames="dtype")


def poisoned(record, *, page, layers=None, num_pages=3):
    cache = RecordCache.alloc(num_pages=num_pages, page=page, format=record, layers=layers)
    return replace(cache, pages=jnp.full_like(cache.pages, POISON))


def draw(rng, record, tokens):
    return tuple(
        jnp.asarray(rng.normal(size=(tokens, f.count)), jnp.bfloat16) for f in record.values
    )


def numbers(rng, record, tokens, dtype, *, rounded=False, finite=False):
    """Values of many magnitudes, ties, zeros; an infinity and a NaN unless ``finite``.

    ``rounded``: what is cast to bfloat16 is already one.
    """
    found = []
    for f in record.values:
        x = rng.normal(size=(tokens, f.count)) * 2.0 ** rng.integers(-30, 12, (tokens, 1))
        x[0] = 0
        x[1, ::7] *= 2.0**-12  # codes below the normal ones
        if not finite:
            x[2, 1], x[3, 2] = np.inf, np.nan
        x[4] = np.repeat([448, 17, 19, 1.0625], f.count // 4)  # ties, with a scale of 1 or 2
        x = jnp.asarray(x.astype(np.float32))
        cast = "bfloat16" in (f.dtype, record.rounds)
        found.append((x.astype(jnp.bfloat16) if rounded and cast else x).astype(dtype))
    return tuple(found)


def same_bytes(got, want):
    """Equal in dtype, shape and every byte."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = (np.asarray(x).reshape(-1).view(np.uint8) for x in (a, b))
        np.testing.assert_array_equal(a, b)


def by_hand(pages, record, values, slots, *, page):
    """The pages of one layer, byte by byte from the offsets of the fields."""
    stored = record.stored(record.encode(*values))
    raw = {name: np.asarray(x).view(np.uint8) for name, x in stored.items()}
    for i, slot in enumerate(slots):
        for f in record.fields if 0 <= slot < len(pages) * page else ():
            at = record.offset(f.name, slot % page, page=page)
            pages[slot // page, at : at + f.end - f.offset] = raw[f.name][i]
    return pages


@record_of
@pytest.mark.parametrize("page", [1, 2, 64])
@pytest.mark.parametrize("layer", [None, 0, 2])
def test_write_then_gather(record, page, layer, rng):
    """What is written is what encode says, where offset says; the rest keeps every bit."""
    cache = poisoned(record, page=page, layers=None if layer is None else 3)
    slots = np.concatenate([rng.permutation(3 * page)[: 2 * page + 1], [-1, 3 * page, -3 * page]])
    slots = rng.permutation(slots).astype(np.int32)
    values = draw(rng, record, len(slots) + 2)  # two rows too many
    at = {} if layer is None else {"layer": jnp.int32(layer)}
    wrote = write(cache, values, jnp.asarray(slots), **at)
    want = np.array(cache.pages)
    part = want if layer is None else want[layer]
    by_hand(part, record, tuple(v[: len(slots)] for v in values), slots, page=page)
    np.testing.assert_array_equal(np.asarray(wrote.pages), want)

    read = gather(wrote, jnp.asarray(slots), dtype=jnp.float32, **at)
    exact = record.decode(record.encode(*(v[: len(slots)] for v in values)))
    exact = np.array(jnp.concatenate(exact, axis=-1))
    exact[(slots < 0) | (slots >= 3 * page)] = 0
    np.testing.assert_array_equal(np.asarray(read), exact)


@record_of
def test_rows_that_nobody_wrote_are_not_read(record):
    """The pages are all NaN; of them nothing but what a slot names comes out."""
    cache = poisoned(record, page=4)
    read = np.asarray(gather(cache, jnp.asarray([[-1, 12], [5, -(2**31)]])), np.float32)
    assert np.isnan(read[1, 0]).all()
    read[1, 0] = 0
    assert not read.any() and read.shape == (2, 2, record.row)


@pytest.mark.parametrize("layer", [None, 1, 2])
def test_index_keys_as_they_are(layer, rng):
    """Codes and scales are the stored ones, and their product what is gathered; else zeros."""
    record, slots = RECORD_FORMATS["index_key"], jnp.asarray([[5, -1], [0, 12]])
    cache = poisoned(record, page=4, layers=None if layer is None else 2)
    at = {} if layer is None else {"layer": jnp.int32(1)}
    values = draw(rng, record, 2)
    cache = write(cache, values, slots[:, 0], **at)
    at = {} if layer is None else {"layer": jnp.int32(layer)}
    codes, scales = jax.jit(gather_codes)(cache, slots, **at)
    assert (codes.dtype, codes.shape, scales.shape) == ("float8_e4m3fn", (2, 2, 128), (2, 2))
    widened = codes.astype(jnp.float32) * scales[..., None]
    want = gather(cache, slots, dtype=jnp.float32, **at)
    np.testing.assert_array_equal(np.asarray(widened), np.asarray(want))
    stored = record.stored(record.encode(*values))
    if layer != 2:
        same_bytes((codes[:, 0], scales[:, :1]), (stored["key"], stored["key_scale"]))
    assert not np.asarray(scales[:, 1]).any() and not np.asarray(codes[:, 1], np.float32).any()


@pytest.mark.parametrize("layer", [-1, -3, 3, 2**31 - 1])
def test_a_layer_that_a_stack_has_not_is_nothing(layer, rng):
    record = RECORD_FORMATS["index_key"]
    cache, layer = poisoned(record, page=4, layers=3), jnp.int32(layer)
    wrote = write(cache, draw(rng, record, 2), jnp.asarray([0, 5]), layer=layer)
    np.testing.assert_array_equal(np.asarray(wrote.pages), np.asarray(cache.pages))
    assert not np.asarray(gather(wrote, jnp.asarray([0, 5]), layer=layer)).any()


def test_a_layer_is_given_exactly_to_a_stack(rng):
    record = RECORD_FORMATS["index_key"]
    one, stack = (poisoned(record, page=4, layers=n) for n in (None, 2))
    values, slots = draw(rng, record, 2), jnp.asarray([0, 5])
    for call in (functools.partial(write_records, values=values, slots=slots), gather_slots(slots)):
        with pytest.raises(ArgumentError, match=r"given 0; allowed: None"):
            call(one, layer=0)
        with pytest.raises(ArgumentError, match=r"given None; allowed: below 2"):
            call(stack)


def gather_slots(slots):
    return functools.partial(gather_records, slots=slots)


def test_layers_of_a_stack_are_scanned(rng):
    """One program writes all layers: the layer is a traced number."""
    record = RECORD_FORMATS["v4"]
    cache, slots = poisoned(record, page=4, layers=3), jnp.asarray([7, -1, 2])
    values = [draw(rng, record, 3) for _ in range(3)]

    def body(cache, given):
        layer, *values = given
        return write_records(cache, tuple(values), slots, layer=layer), None

    stacked = [jnp.stack(v) for v in zip(*values, strict=True)]
    scanned, _ = jax.jit(lambda c: jax.lax.scan(body, c, (jnp.arange(3), *stacked)))(cache)
    for layer in range(3):
        want = by_hand(np.array(cache.pages[layer]), record, values[layer], [7, -1, 2], page=4)
        np.testing.assert_array_equal(np.asarray(scanned.pages[layer]), want)


@record_of
def test_a_donated_stack_stays_in_place(record, rng):
    """A write takes the pages' memory and copies none of it, nor does a read."""
    cache = RecordCache.alloc(num_pages=64, page=64, format=record, layers=3)
    given = draw(rng, record, 3), jnp.asarray([7, -1, 2])
    at = {"layer": jnp.int32(1)}
    wrote = jax.jit(write_records, donate_argnums=0).lower(cache, *given, **at)
    one_layer = cache.pages.nbytes // 3
    used = wrote.compile().memory_analysis()
    assert used.alias_size_in_bytes == cache.pages.nbytes
    assert used.temp_size_in_bytes < one_layer / 4
    used = jax.jit(gather_records).lower(cache, given[1], **at).compile().memory_analysis()
    assert used.temp_size_in_bytes < one_layer / 4


@pytest.mark.parametrize("layer", [None, 1])
def test_rows_of_elements_outside_of_the_cache_are_zeros(layer, rng):
    """Also where row 0 and the last row hold numbers."""
    cache = LatentCache.alloc(
        num_pages=2, page=3, rank=4, rope=2, layers=None if layer is None else 3
    )
    cache = replace(cache, pages=jnp.ones_like(cache.pages))
    slots = jnp.asarray([-1, 0, 6, 5, -6, 2**31 - 1])
    at = {} if layer is None else {"layer": jnp.int32(layer)}
    rows = gather_rows(cache, slots, dtype=jnp.float32, **at)
    np.testing.assert_array_equal(np.asarray(rows)[:, 0], [0, 1, 0, 1, 0, 0])


@pytest.mark.parametrize("change", ["half a page", "int8"])
def test_pages_of_another_kind_are_refused(change):
    cache = RecordCache.alloc(num_pages=3, page=64, format="ds_mla")
    pages = cache.pages[:, : 32 * 656] if change == "half a page" else cache.pages.astype(jnp.int8)
    cache = replace(cache, pages=pages)
    with pytest.raises(ArgumentError, match=r"pages of the cache: given .* uint8\[pages, 41984\]"):
        ops.gather_rows(cache, jnp.arange(3), dtype=jnp.float32)
