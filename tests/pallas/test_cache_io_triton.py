"""Backend ``triton`` of single rows: interpreted, compiled for devices, and on a GPU.

What it computes is in ``test_records.py``; here it has the definition's bytes.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.cache import RECORD_FORMATS, LatentCache, RecordCache
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.pallas.cache_io import records
from mla_jax.pallas.device import DeviceInfo
from tests import aot
from tests.pallas.experts import missing, resources
from tests.pallas.interpreted import INTERPRETER, in_a_process
from tests.pallas.test_records import numbers, poisoned, same_bytes

DEVICES = {
    sm: DeviceInfo(platform="gpu", kind="any", sm=sm, sms=100, shared_memory=101376)
    for sm in (80, 89, 90)
}
spec = jax.ShapeDtypeStruct
RULES = [(name, rule.name) for name, form in RECORD_FORMATS.items() for rule in form.rules]
form_of = pytest.mark.parametrize("name", RECORD_FORMATS)


def elements(format):
    facts = {"num_pages": 4, "page": 16, "rank": 512, "rope": 64}
    return LatentCache.alloc(**facts, format=format, layers=2)


def allocated(form, *, num_pages=4, page=64, layers=2):
    return RecordCache.alloc(num_pages=num_pages, page=page, format=form, layers=layers)


@pytest.mark.slow
@pytest.mark.skipif(bool(INTERPRETER), reason=INTERPRETER or "installed")
def test_interpreted():
    in_a_process("cache_interpreted.py")


def test_what_runs_where():
    """Records and rows of elements on a GPU from sm80 on; explicit requests elsewhere fail."""
    cache, slots = allocated("ds_mla"), jnp.zeros(3, jnp.int32)
    values = numbers(np.random.default_rng(0), cache.format, 5, "bfloat16")
    keys, latents = allocated("index_key"), elements("bf16")
    calls = (
        ("write_rows", (cache, values, slots), {}),
        ("gather_rows", (cache, slots), {"dtype": jnp.bfloat16}),
        ("gather_rows", (latents, slots), {"dtype": jnp.bfloat16}),
        ("gather_codes", (keys, slots), {}),
    )
    for op, args, facts in calls:
        for device in DEVICES.values():
            text = ops.explain(op, *args, **facts, layer=1, device=device)
            assert "runs triton" in text or missing("triton"), text
        old = dataclasses.replace(DEVICES[80], sm=75)
        assert "device sm75, needs sm80 or newer" in ops.explain(
            op, *args, **facts, layer=1, device=old
        )
    with pytest.raises(UnsupportedError, match="needs sm80 or newer"):
        ops.write_rows(cache, values, slots, layer=1, backend="triton")
    own = RecordCache.alloc(num_pages=1, page=1, format=latents.format.record(4, 2))
    assert "cache=bf16 not in {ds_mla" in ops.explain(
        "write_rows", own, ((jnp.zeros((3, 4))), jnp.zeros((3, 2))), slots, device=DEVICES[90]
    )


def test_codes_are_those_of_index_keys():
    with pytest.raises(ArgumentError, match=r"gather_codes: format of the cache: given ds_mla"):
        ops.gather_codes(allocated("ds_mla"), jnp.zeros(3, jnp.int32), layer=0)


COMPILER = missing("triton")


def launches(monkeypatch, sm, fn, *args):
    """What the assembler makes of each Triton program of ``fn``, which is traced only."""
    from mla_jax.pallas import triton_lib

    found = []

    def call(kernel, *args, out, grid, warps, stages, aliases=None, **constants):
        outs = out if isinstance(out, tuple) else (out,)
        types = tuple(f"*{triton_lib.NAMES[x.dtype.name]}" for x in (*args, *outs))
        facts = {"sm": sm, "warps": warps, "stages": stages}
        program = triton_lib.compiled(kernel, types, tuple(constants.items()), **facts)
        found.append(resources(program))
        made = tuple(jnp.zeros(x.shape, x.dtype) for x in outs)
        return made if isinstance(out, tuple) else made[0]

    monkeypatch.setattr(DeviceInfo, "current", lambda: DEVICES[sm])
    monkeypatch.setattr(triton_lib, "call", call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Triton's own
        jax.jit(fn).trace(*args)
    return found


@pytest.mark.skipif(bool(COMPILER), reason=COMPILER or "installed")
@pytest.mark.parametrize("sm", DEVICES)
@form_of
def test_compiles_for(name, sm, monkeypatch):
    """Records by every rule from every activation, to every activation; nothing is spilled."""
    slots, layer = spec((70,), jnp.int32), spec((), jnp.int32)
    for rule in RECORD_FORMATS[name].rules:
        form = RECORD_FORMATS[name].with_rule(rule.name)
        cache = jax.eval_shape(functools.partial(allocated, form))
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            values = tuple(spec((70, f.count), dtype) for f in form.values)

            def both(cache, values, slots, layer, dtype=dtype):
                cache = ops.write_rows(cache, values, slots, layer=layer, backend="triton")
                found = ops.gather_rows(cache, slots, dtype=dtype, layer=layer, backend="triton")
                codes = name == "index_key" and ops.gather_codes(cache, slots, layer=layer)
                return found, codes

            found = launches(monkeypatch, sm, both, cache, values, slots, layer)
            assert len(found) == (3 if name == "index_key" else 2)
            assert not any(report.stack for report in found), found


@pytest.mark.skipif(bool(COMPILER), reason=COMPILER or "installed")
@pytest.mark.parametrize("sm", DEVICES)
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32", "fp8_e4m3"])
def test_elements_compile_for(format, sm, monkeypatch):
    cache = jax.eval_shape(functools.partial(elements, format))
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        gather = functools.partial(ops.gather_rows, dtype=dtype, layer=1, backend="triton")
        (report,) = launches(monkeypatch, sm, gather, cache, spec((70,), jnp.int32))
        assert not report.stack


AOT = aot.available() or missing("triton")


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@form_of
def test_compiles_for_sm90_in_place(name, monkeypatch):
    """One launch to write and one to read, and no copy of the cache."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    form = RECORD_FORMATS[name]
    cache = jax.eval_shape(functools.partial(allocated, form, num_pages=512, layers=8))
    values = tuple(spec((128, f.count), jnp.bfloat16) for f in form.values)
    given = values, spec((128,), jnp.int32), spec((), jnp.int32)

    def step(cache, values, slots, layer):
        cache = ops.write_rows(cache, values, slots, layer=layer)
        return cache, ops.gather_rows(cache, slots, dtype=jnp.bfloat16, layer=layer)

    compiled, _ = aot.compile_sm90(step, cache, *given, donate=(0,))
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count('custom_call_target="triton_kernel_call_ffi"') == 2, entry
    assert " copy(" not in entry and " fusion(" not in entry, entry
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


# --- on a GPU -------------------------------------------------------------------------------------


def spots(rng, page, pages=3):
    inside = rng.permutation(pages * page)[: 2 * page + 1]
    return rng.permutation([*inside, -1, pages * page, -pages * page, 2**31 - 1]).astype(np.int32)


def on_gpu(op, *args, backend, **facts):
    """``xla`` on the CPU: on a GPU its divisions are not always rounded to the nearest."""
    device = jax.devices("cpu" if backend == "xla" else "gpu")[0]
    with jax.default_device(device):
        return _jitted(op, backend, *facts.items())(*jax.device_put(args, device))


@functools.cache
def _jitted(op, backend, *facts):
    return jax.jit(functools.partial(op, backend=backend, **dict(facts)))


def written_in(cache, values, slots, layer, **facts):
    return ops.write_rows(cache, values, slots, layer=layer, **facts)


def gathered_in(cache, slots, layer, **facts):
    return ops.gather_rows(cache, slots, layer=layer, **facts)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 2, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("name", "rule"), RULES)
def test_same_bytes_as_the_definition(name, rule, dtype, page, rng):
    """Of finite values every byte; of others whether they are numbers."""
    form = RECORD_FORMATS[name].with_rule(rule)
    slots = jnp.asarray(spots(rng, page))
    for finite in (True, False):
        given = poisoned(form, page=page), numbers(rng, form, 2 * page + 7, dtype, finite=finite)
        got, want = (on_gpu(ops.write_rows, *given, slots, backend=b) for b in ("triton", "xla"))
        if finite:
            same_bytes(got, want)
        for low in (jnp.float32, jnp.bfloat16, jnp.float16):
            sides = [
                on_gpu(ops.gather_rows, cache, slots, dtype=low, backend=b)
                for cache, b in ((got, "triton"), (got, "xla"), (want, "xla"))
            ]
            first, *others = (np.asarray(x, np.float32) for x in sides)
            for other in others:
                np.testing.assert_array_equal(first, other)


@pytest.mark.gpu
@form_of
@pytest.mark.parametrize("layer", [0, 2, 3, -1])
def test_one_layer_of_a_stack(name, layer, rng):
    form, slots, layer = RECORD_FORMATS[name], jnp.asarray(spots(rng, 4)), jnp.int32(layer)
    given = poisoned(form, page=4, layers=3), numbers(rng, form, 13, "bfloat16", finite=True)
    got, want = (on_gpu(written_in, *given, slots, layer, backend=b) for b in ("triton", "xla"))
    same_bytes(got, want)
    given = got, slots, layer
    got, want = (
        on_gpu(gathered_in, *given, dtype=jnp.bfloat16, backend=b) for b in ("triton", "xla")
    )
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32", "fp8_e4m3"])
def test_rows_of_elements(format, rng):
    cache = elements(format)
    drawn = jnp.asarray(rng.normal(size=cache.pages.shape), jnp.float32)
    cache = dataclasses.replace(cache, pages=drawn.astype(cache.pages.dtype))
    if format == "fp8_e4m3":
        cache = dataclasses.replace(cache, scale=jnp.asarray([0.3, 2.5], jnp.float32))
    slots = jnp.asarray(spots(rng, 16))
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        for layer in (0, 1, 2):
            given = cache, slots, jnp.int32(layer)
            got, want = (
                on_gpu(gathered_in, *given, dtype=dtype, backend=b) for b in ("triton", "xla")
            )
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 5000])
def test_codes(rows, rng):
    form = RECORD_FORMATS["index_key"]
    cache = poisoned(form, page=64, num_pages=80)
    values = numbers(rng, form, 5000, "bfloat16", finite=True)
    cache = records.write_records(cache, values, jnp.asarray(rng.permutation(5000), jnp.int32))
    slots = rng.integers(-2, 5000, (rows, 1)).astype(np.int32)
    slots[-1] = 80 * 64
    got, want = (
        on_gpu(ops.gather_codes, cache, jnp.asarray(slots), backend=b) for b in ("triton", "xla")
    )
    assert got[0].shape == (rows, 1, 128) and got[1].shape == (rows, 1)
    same_bytes(got, want)


@pytest.mark.gpu
@form_of
def test_behind_two_gigabytes(name, rng):
    """The last rows of a cache whose bytes no int32 counts."""
    form, page = RECORD_FORMATS[name], 64
    pages = (2**31 + 2**20) // form.page_bytes(page)
    cache = RecordCache.alloc(num_pages=pages, page=page, format=form)
    slots = jnp.asarray([pages * page - 1, 0, pages * page - page], jnp.int32)
    values = numbers(rng, form, 5, "bfloat16", finite=True)
    write = functools.partial(ops.write_rows, backend="triton")
    cache = jax.jit(write, donate_argnums=0)(cache, values, slots)
    want = form.encode(*(v[:3] for v in values))
    got = on_gpu(ops.gather_rows, cache, slots, dtype=jnp.float32, backend="triton")
    exact = np.asarray(jnp.concatenate(form.decode(want), axis=-1))
    np.testing.assert_array_equal(np.asarray(got), exact)
    last = np.asarray(cache.pages[-1])
    for plane, part, width in zip(form.begins(page), want, form.widths, strict=True):
        at = plane + (page - 1) * width
        np.testing.assert_array_equal(last[at : at + width], np.asarray(part[0]))
