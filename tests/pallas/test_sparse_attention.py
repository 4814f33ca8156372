"""Sparse attention: every backend against float64, one token at a time."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax.cache import RECORD_FORMATS, LatentCache, RecordCache, SparseScope
from mla_jax.config import MLADims
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.ops import mla_sparse_decode, mla_sparse_prefill, write_rows
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.sparse_attention import xla
from mla_jax.pallas.sparse_attention.ref import attend
from tests import aot
from tests.cases import TINY, V3, draw, run
from tests.compare import attention, judge, same_bits
from tests.pallas.experts import missing
from tests.pallas.interpreted import INTERPRETER, in_a_process

OP = "mla_sparse_decode"
SCALE = 0.13
SMALL = MLADims(heads=3, rank=128, nope=8, rope=64, v=6, q_rank=None)
"""The narrowest widths of a kernel."""

V4 = MLADims(heads=64, rank=448, nope=8, rope=64, v=8, q_rank=None)
"""Of its rows all 512 columns are the value."""

every_form = pytest.mark.parametrize(
    "kind",
    [
        {"form": "fp32", "dtype": "float32"},
        {"form": "bf16"},
        {"form": "bf16", "dims": V3, "heads": 5},
        {"form": "ds_mla", "dims": V3, "heads": 5},
        {"form": "v4", "dims": V4, "heads": 5},
    ],
    ids=["fp32", "bf16", "v3_bf16", "ds_mla", "v4"],
)


def solve(*args, **kwargs):
    """``mla_sparse_decode``, or a skip with the registry's reason."""
    try:
        return mla_sparse_decode(*args, scale=SCALE, **kwargs)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


@dataclass
class Drawn:
    """A call, and what each token attends to in float64."""

    q: np.ndarray
    cache: LatentCache | RecordCache
    slots: np.ndarray
    stored: np.ndarray  # float64 [slots, row]; NaN where nothing was written
    rank: int
    dtype: str

    @property
    def args(self):
        q = jnp.asarray(self.q)
        return q[..., : self.rank], q[..., self.rank :], self.cache, jnp.asarray(self.slots)

    def parts(self, slots=None, *, extra=None, value=None):
        """``q, k, v, seen`` of every token, for ``judge``."""
        found = []
        for t, row in enumerate(self.slots if slots is None else slots):
            inside = row[(row >= 0) & (row < len(self.stored))]
            k = self.stored[inside]
            if extra is not None:
                own = extra.slots[t][(extra.slots[t] >= 0) & (extra.slots[t] < len(extra.stored))]
                k = np.concatenate([k, extra.stored[own]])
            k = k if len(k) else np.zeros((1, self.q.shape[-1]))
            seen = np.full((1, len(k)), bool(len(inside)) or (extra is not None and len(own) > 0))
            found.append((self.q[t : t + 1], k, k[:, : value or self.rank], seen))
        return found


def drawn(rng, *, dims=SMALL, heads=None, tokens=6, keys=11, page=4, pages=9, form="bf16",
          dtype="bfloat16", missing=0.3):  # fmt: skip
    """Half of the slots written, the rest poison; lists of written slots with holes."""
    heads = heads or dims.heads
    if form in RECORD_FORMATS:
        cache = RecordCache.alloc(num_pages=pages, page=page, format=form)
        cache = replace(cache, pages=jnp.full_like(cache.pages, 0xFF))
    else:
        cache = LatentCache.alloc(
            num_pages=pages, page=page, rank=dims.rank, rope=dims.rope, format=form
        )
        cache = replace(cache, pages=jnp.full_like(cache.pages, jnp.nan))
    row = dims.row
    written = rng.permutation(pages * page)[: pages * page // 2]
    x = draw(rng, len(written), row, dtype=dtype)
    values = tuple(jnp.asarray(v) for v in np.split(x, [dims.rank], axis=1))
    cache = write_rows(cache, values, jnp.asarray(written))
    stored = np.full((pages * page, row), np.nan)
    if form in RECORD_FORMATS:
        back = cache.format.decode(cache.format.encode(*values))
        x = np.concatenate([np.asarray(b, np.float64) for b in back], axis=1)
    stored[written] = x.astype(np.float64)
    slots = rng.choice(written, (tokens, keys)).astype(np.int32)
    slots[rng.random(slots.shape) < missing] = -1
    q = draw(rng, tokens, heads, row, dtype=dtype)
    return Drawn(q, cache, slots, stored, dims.rank, dtype)


@pytest.mark.parametrize("sinks", [None, jnp.zeros(1)])
def test_a_row_that_is_infinite_is_never_left_out(sinks):
    cache = LatentCache.alloc(num_pages=1, page=4, rank=4, rope=0, format="fp32")
    rows = jnp.array([[1.0, 2, 3, 4], [jnp.inf, 0, 0, 0]])
    cache = write_rows(cache, (rows,), jnp.array([0, 1]))
    given = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 0)), cache, jnp.array([[0, 1]])
    state = mla_sparse_decode(*given, scale=1.0, sinks=sinks)
    assert np.isnan(state.out).all() and np.isnan(state.lse).all()


def test_the_definition_reads_no_row_that_is_not_seen(rng):
    q, rows = draw(rng, 2, 3, 20), draw(rng, 2, 7, 20)
    seen = rng.random((2, 7)) < 0.5
    seen[:, 0] = True
    rows[~seen] = np.nan
    got = attend(*map(jnp.asarray, (q, rows, seen)), scale=SCALE, value=16)
    for t in range(2):
        k = rows[t][seen[t]]
        out, lse = attention(q[t : t + 1], k, k[:, :16], np.ones((1, len(k)), bool), scale=SCALE)
        np.testing.assert_allclose(got.out[t], out[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.lse[t], lse[0], rtol=1e-5)


def value_of(dims):
    """Columns of the value where they are not the latent's."""
    return {"value": dims.row} if dims == V4 else {}


def judged(state, d, parts):
    judge(state, SimpleNamespace(scale=SCALE, dtype=d.dtype), parts)


CASES = {
    "tiny": {"dims": TINY},
    "tiny_fp32": {"dims": TINY, "form": "fp32", "dtype": "float32"},
    "small": {},
    "small_fp32": {"form": "fp32", "dtype": "float32"},
    "v3_widths": {"dims": V3, "heads": 5, "keys": 40, "pages": 20},
    "v3_heads": {"dims": V3, "tokens": 2, "keys": 70, "page": 64, "pages": 3},
    "one_head": {"dims": V3, "heads": 1, "tokens": 3},
    "fp16": {"form": "fp16", "dtype": "float16"},
    "records": {"dims": V3, "heads": 4, "form": "ds_mla", "keys": 30, "page": 8},
    "records_and_heads": {"dims": V3, "heads": 70, "form": "ds_mla", "keys": 130, "pages": 40},
    "records_of_v4": {"dims": V4, "heads": 9, "form": "v4", "keys": 70, "page": 2, "pages": 50},
    "v4_and_heads": {"dims": V4, "heads": 128, "form": "v4", "keys": 150, "pages": 40},
    "v4_elements": {"dims": V4, "heads": 70, "keys": 65, "page": 7},
    "one_token_of_many_pieces": {"dims": V3, "heads": 64, "tokens": 1, "keys": 1000, "pages": 80},
    "more_tokens_than_workers": {"dims": V3, "heads": 8, "tokens": 150, "keys": 66},
    "one_key": {"keys": 1, "missing": 0.5},
    "long_list": {"heads": 20, "keys": 700, "pages": 40, "tokens": 2},
    "nothing": {"missing": 1.0},
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, backend, rng):
    d = drawn(rng, **CASES[name])
    value = value_of(CASES[name].get("dims", SMALL))
    state = run(mla_sparse_decode, *d.args, scale=SCALE, backend=backend, **value)
    assert state.out.dtype == jnp.dtype(d.dtype)
    judged(state, d, d.parts(**value))


@every_form
def test_places_and_order_mean_nothing(kind, backend, rng):
    """-1 anywhere, indices outside of the cache, and any order: the same sums."""
    d, value = drawn(rng, **kind, missing=0), value_of(kind.get("dims", SMALL))
    slots = np.concatenate([d.slots, np.full((6, 5), -1, np.int32)], axis=1)
    slots[:, -4], slots[:, -3], slots[:, -2] = 36, 2**31 - 1, -(2**31)
    slots = rng.permuted(slots, axis=1)
    call = (*d.args[:3], jnp.asarray(slots))
    state = run(mla_sparse_decode, *call, scale=SCALE, backend=backend, **value)
    judged(state, d, d.parts(**value))


@every_form
def test_a_slot_twice_counts_twice(kind, backend, rng):
    d, value = drawn(rng, **kind, tokens=1, keys=2, missing=0), value_of(kind.get("dims", SMALL))
    d.slots = np.array([[d.slots[0, 0], d.slots[0, 0], d.slots[0, 1]]])
    state = run(mla_sparse_decode, *d.args, scale=SCALE, backend=backend, **value)
    judged(state, d, d.parts(**value))


@every_form
def test_lengths(kind, backend, rng):
    """Valid slots behind a length are no rows."""
    d, value = drawn(rng, **kind, missing=0), value_of(kind.get("dims", SMALL))
    lengths = jnp.asarray([0, 1, 5, 11, 99, -3])
    state = solve(*d.args, lengths=lengths, backend=backend, **value)
    cut = [row[: max(n, 0)] for row, n in zip(d.slots, lengths.tolist(), strict=True)]
    judged(state, d, d.parts(cut, **value))


@pytest.mark.parametrize("tokens", [6, 200])
@every_form
def test_sinks(kind, tokens, backend, rng):
    """``out * sigmoid(lse - sink)``; ``lse`` without them. Few tokens are split, many are not."""
    kind, value = kind | {"heads": 3}, value_of(kind.get("dims", SMALL))
    d = drawn(rng, **kind, tokens=tokens)
    plain = solve(*d.args, backend=backend, **value)
    sinks = jnp.asarray([-jnp.inf, 0.5, jnp.inf])
    state = solve(*d.args, sinks=sinks, backend=backend, **value)
    share = np.array(jax.nn.sigmoid(plain.lse - sinks))
    share[:, 0] = np.isfinite(plain.lse[:, 0])
    exact = kind["form"] == "fp32"
    allowed = {"rtol": 1e-6, "atol": 1e-7} if exact else {"rtol": 2**-7, "atol": 1e-6}
    got, want = (np.asarray(x.out, np.float32) for x in (state, plain))
    np.testing.assert_allclose(got, want * share[..., None], **allowed)
    np.testing.assert_array_equal(state.lse, plain.lse)


@every_form
def test_two_scopes_are_one_softmax(kind, backend, rng):
    """The second cache has other pages; both lists have holes and lengths."""
    value = 512 if "dims" in kind else 20
    d = drawn(rng, **kind, missing=0.5)
    more = drawn(rng, **kind, page=7, pages=5, keys=4, missing=0.5)
    lengths = jnp.asarray([4, 4, 0, 2, 4, 1])
    extra = SparseScope(
        cache=more.cache, slots=jnp.asarray(more.slots), lengths=lengths, layer=None
    )
    state = solve(*d.args, extra=extra, value=value, backend=backend)
    column = np.arange(4)
    more.slots = np.where(column < np.asarray(lengths)[:, None], more.slots, -1)
    judged(state, d, d.parts(extra=more, value=value))
    assert state.out.shape[-1] == value


@every_form
def test_a_stack_takes_its_layer(kind, backend, rng):
    d, value = drawn(rng, **kind), value_of(kind.get("dims", SMALL))
    records = isinstance(d.cache, RecordCache)
    poison = jnp.full_like(d.cache.pages, 0xFF if records else jnp.nan)
    more = {} if records else {"scale": jnp.ones(3, jnp.float32)}
    stack = replace(d.cache, pages=jnp.stack([poison, d.cache.pages, poison]), **more)
    want = solve(*d.args, backend=backend, **value)
    call = (*d.args[:2], stack, d.args[3])
    got = solve(*call, layer=jnp.int32(1), backend=backend, **value)
    same_bits(got, want)


def test_few_tokens_at_a_time_are_all_at_once(rng, monkeypatch):
    """The workspace decides how many; 7 tokens do not divide evenly."""
    d = drawn(rng, tokens=7, form="fp32", dtype="float32")
    want = mla_sparse_decode(*d.args, scale=SCALE)
    monkeypatch.setattr(xla, "WORKSPACE", 3 * 11 * SMALL.row)
    got = mla_sparse_decode(*d.args, scale=SCALE)
    np.testing.assert_allclose(got.out, want.out, atol=1e-5)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-5)


def test_memory_does_not_grow_with_the_tokens():
    """Beside its arguments and results a call of many tokens needs what one of fewer needs."""
    cache = jax.eval_shape(
        lambda: LatentCache.alloc(num_pages=64, page=64, rank=512, rope=64, format="bf16")
    )

    def temporary(tokens):
        s = jax.ShapeDtypeStruct
        parts = (s((tokens, 4, n), jnp.bfloat16) for n in (512, 64))
        slots = s((tokens, 2048), jnp.int32)
        lowered = jax.jit(mla_sparse_decode, static_argnames="scale").lower(
            *parts, cache, slots, scale=0.1
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(64), temporary(512)
    assert many < few + 512 * 2048 * 4 * 3 + 512 * 4 * 576 * 4 * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill_over_gathered_rows(dtype, rng):
    d = drawn(rng, form={"float32": "fp32", "bfloat16": "bf16"}[dtype], dtype=dtype)
    rows = jnp.asarray(d.stored.astype(getattr(ml_dtypes, dtype, dtype)))
    slots = d.slots.copy()
    slots[0, 0], slots[1, 0] = len(d.stored), 2**31 - 1
    q_latent, q_rope, _, _ = d.args
    lengths = jnp.asarray([11, 11, 3, 0, 11, 11])
    state = run(
        mla_sparse_prefill, q_latent, q_rope, rows, jnp.asarray(slots), scale=SCALE, backend=None,
    )  # fmt: skip
    judged(state, d, d.parts(slots))
    state = mla_sparse_prefill(
        q_latent, q_rope, rows, jnp.asarray(slots), scale=SCALE, lengths=lengths, value=SMALL.row
    )
    cut = [row[:n] for row, n in zip(slots, lengths.tolist(), strict=True)]
    judged(state, d, d.parts(cut, value=SMALL.row))


@pytest.mark.parametrize("prefill", ["xla", "mosaic"])
@pytest.mark.parametrize(("dims", "tokens"), [(V3, 6), (V4, 300)], ids=["v3", "v4"])
def test_prefill_of_published_widths(dims, tokens, prefill, rng):
    d = drawn(rng, dims=dims, heads=9, tokens=tokens, keys=70)
    rows = jnp.asarray(d.stored.astype(ml_dtypes.bfloat16))
    d.slots[0, 0], d.slots[1, 0] = len(d.stored), 2**31 - 1
    q_latent, q_rope, _, slots = d.args
    value = value_of(dims)
    given = (q_latent, q_rope, rows, slots)
    state = run(mla_sparse_prefill, *given, scale=SCALE, backend=prefill, **value)
    judged(state, d, d.parts(**value))


def test_refusals(rng, our_errors):
    d = drawn(rng)
    q_latent, q_rope, cache, slots = d.args
    with pytest.raises(ArgumentError, match=r"q_latent 128 and q_rope 63.*together 192"):
        mla_sparse_decode(q_latent, q_rope[..., 1:], cache, slots, scale=SCALE)
    with pytest.raises(ArgumentError, match="value: given 193; allowed: None, or 1 to 192"):
        mla_sparse_decode(*d.args, scale=SCALE, value=193)
    with pytest.raises(ArgumentError, match=r"slots.*tokens=5.*tokens=6"):
        mla_sparse_decode(q_latent, q_rope, cache, slots[1:], scale=SCALE)
    with pytest.raises(ArgumentError, match="layer: given 0"):
        mla_sparse_decode(*d.args, scale=SCALE, layer=0)
    other = LatentCache.alloc(num_pages=2, page=4, rank=8, rope=4)
    extra = SparseScope(cache=other, slots=slots, lengths=None, layer=None)
    with pytest.raises(ArgumentError, match="row of the extra cache: given 12; allowed: 192"):
        mla_sparse_decode(*d.args, scale=SCALE, extra=extra)
    with pytest.raises(ArgumentError, match="write_rows: values: given 1; allowed: 2"):
        write_rows(cache, (q_latent[:, 0],), slots[:, 0])


@pytest.mark.slow
@pytest.mark.skipif(bool(INTERPRETER), reason=INTERPRETER)
def test_interpreted():
    """The kernels of this page and of selection, by Triton's interpreter."""
    in_a_process("sparse_interpreted.py")


WITHOUT = aot.available() or missing("triton")


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
@pytest.mark.parametrize(
    ("form", "heads", "more"),
    [("bf16", 128, 0), ("bf16", 16, 512), ("ds_mla", 128, 0), ("v4", 128, 0), ("v4", 64, 512)],
)
def test_compiles_for_sm90(form, heads, more, monkeypatch):
    """One launch for many tokens, and no copy of a cache."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    rank = 448 if form == "v4" else 512

    def cache(page):
        facts = {"num_pages": 32768 // page, "page": page, "format": form, "layers": 8}
        return jax.eval_shape(
            lambda: (
                RecordCache.alloc(**facts)
                if form in RECORD_FORMATS
                else LatentCache.alloc(**facts, rank=rank, rope=64)
            )
        )

    spec, low = jax.ShapeDtypeStruct, jnp.bfloat16

    def call(q_latent, q_rope, caches, slots, layer):
        extra = None
        if more:
            extra = SparseScope(cache=caches[1], slots=slots[:, :more], lengths=None, layer=layer)
        return mla_sparse_decode(
            q_latent, q_rope, caches[0], slots, scale=0.1, layer=layer, extra=extra, value=512,
            backend="triton",
        )  # fmt: skip

    caches = [cache(64), cache(2)] if more else [cache(64)]
    compiled, _ = aot.compile_sm90(
        call, spec((512, heads, rank), low), spec((512, heads, 64), low), caches,
        spec((512, 2048), jnp.int32), spec((), jnp.int32),
    )  # fmt: skip
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count('custom_call_target="triton_kernel_call_ffi"') == 1, entry
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 512 * heads * 576 * 2 + 2**23
