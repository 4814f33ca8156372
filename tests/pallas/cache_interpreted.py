"""The Triton programs of single rows of a cache, by the interpreter on the CPU: the same bytes."""

import functools
import os
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.cache import ELEMENT_FORMATS, RECORD_FORMATS, LatentCache, RecordCache
from mla_jax.pallas import triton_lib
from mla_jax.pallas.cache_io import records, triton
from tests.pallas.interpreted import call
from tests.pallas.test_records import numbers as any_numbers
from tests.pallas.test_records import poisoned, same_bytes

RULES = [(name, rule.name) for name, f in RECORD_FORMATS.items() for rule in f.rules]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    assert os.environ.get("TRITON_INTERPRET") == "1"
    monkeypatch.setattr(triton_lib, "call", call)


numbers = functools.partial(any_numbers, rounded=True)  # the interpreter cuts bfloat16 off


def spots(rng, page, pages=3):
    """Slots of some rows, of none, and outside of the cache."""
    inside = rng.permutation(pages * page)[: min(2 * page + 1, 9)]
    slots = rng.permutation([*inside, -1, pages * page, -pages * page, 2**31 - 1])
    return jnp.asarray(slots, jnp.int32)


@pytest.mark.parametrize(("name", "rule"), RULES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("page", [2, 64])
def test_writing(name, rule, page, dtype, rng):
    """As the definition writes, byte for byte; poison between the records stays."""
    form = RECORD_FORMATS[name].with_rule(rule)
    cache, slots = poisoned(form, page=page), spots(rng, page)
    values = numbers(rng, form, len(slots) + 2, dtype)
    same_bytes(
        triton.write_records(cache, values, slots), records.write_records(cache, values, slots)
    )


@pytest.mark.parametrize("name", RECORD_FORMATS)
@pytest.mark.parametrize("layer", [0, 2, 3, -1])
def test_one_layer_of_a_stack(name, layer, rng):
    """Another layer stays; one that is not there stores nothing and reads as zeros."""
    form, layer = RECORD_FORMATS[name], jnp.int32(layer)
    cache, slots = poisoned(form, page=4, layers=3), spots(rng, 4)
    values = numbers(rng, form, len(slots), "float32")
    given = cache, values, slots
    same_bytes(
        triton.write_records(*given, layer=layer), records.write_records(*given, layer=layer)
    )
    cache = records.write_records(*given, layer=jnp.int32(2))
    for dtype in (jnp.float32, jnp.float16):
        facts = {"dtype": dtype, "layer": layer}
        got, want = (f.gather_rows(cache, slots, **facts) for f in (triton, records))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("name", RECORD_FORMATS)
@pytest.mark.parametrize("page", [2, 64])
def test_gathering(name, page, rng):
    """Slots in two axes; rows that nobody wrote are NaN and stay where they are."""
    form = RECORD_FORMATS[name]
    cache, slots = poisoned(form, page=page), spots(rng, page)
    cache = records.write_records(cache, numbers(rng, form, len(slots), "float32"), slots)
    lists = jnp.stack([slots, slots[::-1]])
    got, want = (f.gather_rows(cache, lists, dtype=jnp.float32) for f in (triton, records))
    assert got.shape == (2, len(slots), form.row)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("name", [n for n in ELEMENT_FORMATS if n != "bf16"])
@pytest.mark.parametrize("layers", [None, 2])
def test_gathering_elements(name, layers, rng):
    """Rows of any width; codes of e4m3 take the scale of their layer."""
    facts = {"scale": 0.3} if name.startswith("fp8") else {}
    cache = LatentCache.alloc(
        num_pages=3, page=4, rank=20, rope=3, format=name, layers=layers, **facts
    )
    drawn = rng.normal(size=cache.pages.shape)
    cache = replace(cache, pages=jnp.asarray(drawn, jnp.float32).astype(cache.pages.dtype))
    if layers:
        cache = replace(cache, scale=cache.scale * jnp.arange(1, 3, dtype=jnp.float32))
    slots = spots(rng, 4)
    for layer in (None,) if layers is None else (0, 1, 2, -1):
        layer = None if layer is None else jnp.int32(layer)
        for dtype in (jnp.float32, jnp.float16):
            facts = {"dtype": dtype, "layer": layer}
            got, want = (f.gather_rows(cache, slots, **facts) for f in (triton, records))
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_every_code(rng):
    """All 256 bytes as codes, also the two NaN, under several scales."""
    cache = RecordCache.alloc(num_pages=1, page=4, format="index_key")
    page = np.zeros(4 * 132, np.uint8)
    page[:512] = np.arange(512) % 256
    page[512:] = np.asarray([1, 2.0**-100, 3e-5, 448], np.float32).view(np.uint8)
    cache, slots = replace(cache, pages=jnp.asarray(page[None])), jnp.asarray([3, 1, -1, 0, 2])
    got, want = (f.gather_rows(cache, slots, dtype=jnp.float32) for f in (triton, records))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    got, want = (f.gather_codes(cache, slots) for f in (triton, records))
    same_bytes(got, want)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("layer", [None, 1, 2, -1])
def test_codes_as_they_are(page, layer, rng):
    form, slots = RECORD_FORMATS["index_key"], spots(rng, page)
    cache = poisoned(form, page=page, layers=None if layer is None else 2)
    at = {} if layer is None else {"layer": jnp.int32(1)}
    cache = records.write_records(cache, numbers(rng, form, len(slots), "float32"), slots, **at)
    at = {} if layer is None else {"layer": jnp.int32(layer)}
    got, want = (f.gather_codes(cache, slots, **at) for f in (triton, records))
    assert got[0].dtype == jnp.float8_e4m3fn and got[1].shape == slots.shape
    same_bytes(got, want)


def test_no_rows(rng):
    form, none = RECORD_FORMATS["index_key"], jnp.zeros((2, 0), jnp.int32)
    cache = poisoned(form, page=4)
    assert triton.gather_rows(cache, none).shape == (2, 0, 128)
    assert [x.shape for x in triton.gather_codes(cache, none)] == [(2, 0, 128), (2, 0)]
    same_bytes(triton.write_records(cache, numbers(rng, form, 5, "float32"), none[0]), cache)
