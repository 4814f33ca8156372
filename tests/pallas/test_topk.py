"""Selection: every backend against sorting, over pages and over gathered keys."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.errors import ArgumentError
from mla_jax.metadata.buckets import default_steps
from mla_jax.metadata.common import GroupSpec, HostBatch, build_common
from mla_jax.metadata.deepseek_v32 import V32MetadataBuilder
from mla_jax.metadata.indexer import Indexer
from mla_jax.ops import indexer_logits, select_topk, write_rows
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.indexer import paged_sm90, scores_sm90
from mla_jax.pallas.indexer.ref import quantise_queries
from mla_jax.pallas.topk import mosaic, rows_sm90, xla
from mla_jax.pallas.topk.ref import best_positions
from mla_jax.types import cdiv
from tests import aot
from tests.cases import GARBAGE_PAGE, run
from tests.pallas.experts import missing, module_of

topk = module_of("topk.triton")
OP = "select_topk_decode"
K, KEYS = 16, 700  # more keys than a block, and no multiple of one


def oracle(scores, length, k):
    """Positions of the best of one row, by numpy's sort on (score down, position up)."""
    seen = np.asarray(scores, np.float64)[: max(int(length), 0)]
    order = np.lexsort((np.arange(len(seen)), -np.where(seen == 0, 0, seen)))
    best = np.sort(order[:k])
    return np.concatenate([best, np.full(k - len(best), -1)]).astype(np.int32)


def _scores(name: str, rng) -> np.ndarray:
    at = np.arange(KEYS, dtype=np.float32)
    match name:
        case "random":
            return rng.normal(size=KEYS).astype(np.float32)
        case "constant":
            return np.full(KEYS, 0.5, np.float32)
        case "zeros":
            return np.where(at % 3 == 0, -0.0, 0.0).astype(np.float32)
        case "ties":
            return rng.integers(0, 4, KEYS).astype(np.float32)
        case "ascending":
            return at
        case "descending":
            return -at
        case "ten_bits":  # equal in all but the last bits
            return (1 + rng.integers(0, 1024, KEYS) * 2.0**-23).astype(np.float32)
        case "negative":
            return (-1 - rng.random(KEYS)).astype(np.float32)
    raise AssertionError(name)


KINDS = (
    "random", "constant", "zeros", "ties", "ascending", "descending", "ten_bits", "negative",
)  # fmt: skip
LENGTHS = (-1, 0, 1, K - 1, K, K + 1, 255, 256, 257, 600, KEYS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition(kind, rng):
    rows = np.stack([_scores(kind, rng) for _ in LENGTHS])
    for row, length in zip(rows, LENGTHS, strict=True):
        row[max(length, 0) :] = np.nan
    got = best_positions(jnp.asarray(rows), jnp.asarray(LENGTHS), k=K)
    want = [oracle(row, n, K) for row, n in zip(rows, LENGTHS, strict=True)]
    np.testing.assert_array_equal(got, want)


def test_infinities_and_nan_are_ordered():
    scores = jnp.asarray([[-np.inf, 1.0, np.nan, -np.inf, np.inf, 2.0]], jnp.float32)
    for k, want in ((3, [1, 4, 5]), (4, [0, 1, 4, 5]), (5, [0, 1, 3, 4, 5])):
        got = best_positions(scores, jnp.asarray([6]), k=k)
        np.testing.assert_array_equal(got, [want])


def paged(rng, rows, *, page=64, dtype="fp32"):
    """A cache whose key ``p`` of a request scores ``rows[r][p]``: ``(cache, table)``.

    With weights ``(1, -1)`` of two heads ``e_0`` and ``e_1`` the score of ``[s+, s-]`` is ``s``.
    Pages are shuffled; what no key fills is NaN, what no request has is a garbage page.
    """
    width = cdiv(KEYS, page) + 1
    ids = rng.permutation(len(rows) * width + 2)
    cache = LatentCache.alloc(num_pages=len(ids), page=page, rank=2, rope=0, format=dtype)
    pages = np.full(cache.pages.shape, np.nan, np.float32)
    table = np.full((len(rows), width), GARBAGE_PAGE, np.int32)
    for r, row in enumerate(rows):
        table[r, : cdiv(len(row), page)] = ids[r * width : r * width + cdiv(len(row), page)]
        for p, s in enumerate(row):
            pages[table[r, p // page], p % page] = max(s, 0), max(-s, 0)
    return replace(cache, pages=jnp.asarray(pages, cache.pages.dtype)), jnp.asarray(table)


def probes(*axes):
    """The queries and weights of ``paged``."""
    q = jnp.broadcast_to(jnp.eye(2, dtype=jnp.float32), (*axes, 2, 2))
    return q, jnp.broadcast_to(jnp.asarray([1.0, -1.0]), (*axes, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [64, 7])
def test_decode_equals_the_oracle(kind, page, rng):
    """Several queries of a row, each with its own length; poison behind."""
    rows = [_scores(kind, rng) for _ in range(4)]
    cache, table = paged(rng, rows, page=page)
    lens = np.array([LENGTHS[:3], LENGTHS[3:6], LENGTHS[6:9], (*LENGTHS[9:], 300)])
    got = xla.select_decode(*probes(4, 3), cache, table, jnp.asarray(lens), k=K)
    want = [[oracle(row, n, K) for n in each] for row, each in zip(rows, lens, strict=True)]
    np.testing.assert_array_equal(got, want)


def test_prefill_equals_the_oracle(rng):
    """Gathered keys of two requests, one behind the other."""
    a, b = _scores("ties", rng), _scores("random", rng)[:300]
    keys = np.full((1100, 2), np.nan, np.float32)
    for start, row in ((0, a), (KEYS, b)):
        keys[start : start + len(row)] = np.stack([np.maximum(row, 0), np.maximum(-row, 0)], 1)
    starts = jnp.asarray([0, 0, KEYS, KEYS, KEYS, 0])
    ends = jnp.asarray([KEYS, 17, KEYS, KEYS + 5, KEYS + 300, 0])
    got = xla.select_prefill(*probes(6), jnp.asarray(keys), starts, ends, k=K)
    rows = [a, a, b, b, b, b]
    lens = np.asarray(ends - starts)
    want = [oracle(row, n, K) for row, n in zip(rows, lens, strict=True)]
    np.testing.assert_array_equal(got, want)


def test_nothing_is_scored_where_everything_fits(rng):
    """NaN in every key: no score is computed, the rows are 0, 1, 2, … all the same."""
    cache, table = paged(rng, [np.full(40, np.nan, np.float32)] * 2)
    got = xla.select_decode(*probes(2, 1), cache, table, jnp.asarray([[16], [3]]), k=K)
    np.testing.assert_array_equal(got[:, 0], [oracle(np.zeros(40), n, K) for n in (16, 3)])


HEADS, DIM, PAGE, TOPK = 4, 64, 8, 6
SPECS = GroupSpec("latent", 16), GroupSpec("index_keys", PAGE)


def builder(**more):
    ladder = default_steps(max_requests=4, max_prefill_tokens=48, max_pages=8)
    indexer = Indexer(group=SPECS[1], **more)
    return V32MetadataBuilder(ladder=ladder, latent=SPECS[0], indexer=indexer)


def step(rng, build, lens, contexts, *, form="fp32", poison=True):
    """A step over cached keys: ``(cache, metadata, tokens, keys of each request)``."""
    host = HostBatch.of(np.array(lens), np.array(lens) + np.array(contexts))
    decision = build.decide(host)
    bucket = decision.common_bucket
    ids, tables = rng.permutation(np.arange(1, 80)), {}
    for group, width in zip(build.groups, bucket.pages, strict=True):
        tables[group.name] = np.zeros((bucket.requests, width), np.int32)
        for r in range(len(lens)):
            tables[group.name][r] = ids[r * width : (r + 1) * width]
    starts, seq_lens, requests = host.padded_arrays(bucket)
    common = build_common(
        jnp.asarray(starts),
        jnp.asarray(seq_lens),
        {name: jnp.asarray(t) for name, t in tables.items()},
        jnp.asarray(requests),
        bucket=bucket,
        groups=build.groups,
    )
    meta = build.build(common, decision).indexer
    size = {"num_pages": 80, "page": PAGE}
    dim = 128 if form == "index_key" else DIM
    if form == "index_key":
        cache = RecordCache.alloc(**size, format=form)
        cache = replace(cache, pages=jnp.full_like(cache.pages, 0xFF)) if poison else cache
    else:
        cache = LatentCache.alloc(**size, rank=dim, rope=0, format=form)
        cache = replace(cache, pages=jnp.full_like(cache.pages, jnp.nan)) if poison else cache
    table, keys = tables["index_keys"], []
    for r, n in enumerate(np.array(lens) + np.array(contexts)):
        keys.append(rng.normal(size=(n, dim)).astype(np.float32))
        p = np.arange(n)
        slots = table[r, p // PAGE] * PAGE + p % PAGE
        cache = write_rows(cache, (jnp.asarray(keys[-1]),), jnp.asarray(slots))
    return cache, meta, bucket.tokens, keys


STEPS = {
    "decodes": ([1, 1, 1], [5, 90, 30]),
    "prefills": ([20, 9], [0, 40]),
    "mixed": ([1, 1, 30, 8], [70, 2, 0, 50]),
    "two_tokens_are_a_prefill": ([1, 2], [30, 40]),
}


def same_selection(got, scores, length, k, *, near=0.0):
    """The oracle's; positions whose scores are ``near`` the last one's may be others."""
    want = oracle(scores, length, k)
    if near == 0.0 or length <= k:
        np.testing.assert_array_equal(got, want)
        return
    assert (np.diff(got) > 0).all() and got[0] >= 0 and got[-1] < length, got
    last = scores[want].min()
    assert scores[got].min() >= last - near, (got, want)
    assert set(np.flatnonzero(scores[:length] > last + near)) <= set(got.tolist()), (got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("form", ["fp32", "bf16", "index_key"])
def test_a_step_selects_what_its_scores_say(name, form, rng):
    """Every token's row is the oracle on ``indexer_logits`` over its request's own keys.

    On a GPU products of e4m3 keep fewer bits of their sums than float32.
    """
    on_gpu = jax.default_backend() == "gpu"
    near = {"fp32": 0.0, "bf16": 1e-3, "index_key": 0.3}[form] if on_gpu else 0.0
    lens, contexts = STEPS[name]
    cache, meta, tokens, keys = step(rng, builder(), lens, contexts, form=form)
    dim = keys[0].shape[1]
    q = jnp.asarray(rng.normal(size=(tokens, HEADS, dim)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(tokens, HEADS)), jnp.float32)
    got = np.asarray(run(select_topk, q, w, cache, meta, k=TOPK, backend=None))
    if form == "index_key":
        q, w = quantise_queries(q, w)
        q = q.astype(jnp.bfloat16)  # exactly
    at = 0
    for r, (n, context) in enumerate(zip(lens, contexts, strict=True)):
        stored = jnp.asarray(keys[r])
        if form == "bf16":
            stored = stored.astype(jnp.bfloat16)
        if form == "index_key":
            (stored,) = cache.format.decode(cache.format.encode(stored))
        for j in range(n):
            rows = slice(at + j, at + j + 1)
            scores = indexer_logits(q[rows], w[rows], stored.astype(q.dtype))
            length = context + j + 1
            same_selection(got[at + j], np.asarray(scores)[0], length, TOPK, near=near)
        at += n
    assert (got[at:] == -1).all()


def test_codes_score_as_the_queries_do(rng):
    """Those of the original values, also where heads differ in size; e4m3 has three stored bits."""
    q = rng.normal(size=(5, HEADS, DIM)) * 10.0 ** rng.integers(-3, 4, (5, HEADS, 1))
    w, keys = rng.normal(size=(5, HEADS)), rng.normal(size=(40, DIM))
    q, w, keys = (jnp.asarray(x, jnp.float32) for x in (q, w, keys))
    codes, weights = quantise_queries(q, w)
    got = indexer_logits(codes.astype(jnp.float32), weights, keys)
    want = indexer_logits(q, w, keys)
    size = indexer_logits(jnp.abs(q), jnp.abs(w), jnp.abs(keys))  # of the sum's terms
    assert np.all(np.abs(got - want) <= 2**-4 * size)
    assert np.any(np.abs(got - want) > 0)


def test_chunks_change_nothing(rng):
    """Whatever few logits a chunk may have."""
    lens, contexts = STEPS["mixed"]
    found = []
    for logits in (4 * 2**20, 4 * 600, 4 * 50):
        cache, meta, tokens, keys = step(
            np.random.default_rng(3), builder(max_logits_bytes=logits), lens, contexts
        )
        draw = np.random.default_rng(4)
        q = jnp.asarray(draw.normal(size=(tokens, HEADS, DIM)), jnp.float32)
        w = jnp.asarray(draw.normal(size=(tokens, HEADS)), jnp.float32)
        found.append((int(meta.prefill.num_chunks), np.asarray(select_topk(q, w, cache, meta, 6))))
        assert len(keys) == 4
    assert found[0][0] < found[1][0] < found[2][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_array_equal(found[0][1], found[2][1])


def test_a_stack_takes_its_layer(rng):
    cache, meta, tokens, _ = step(rng, builder(), *STEPS["decodes"], poison=False)
    stack = replace(
        cache,
        pages=jnp.stack([jnp.full_like(cache.pages, jnp.nan), cache.pages]),
        scale=jnp.ones(2, jnp.float32),
    )
    q, w = jnp.ones((tokens, HEADS, DIM)), jnp.ones((tokens, HEADS))
    want = select_topk(q, w, cache, meta, TOPK)
    got = jax.jit(select_topk, static_argnums=4)(q, w, stack, meta, TOPK, layer=jnp.int32(1))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["decodes", "mixed"])
def test_under_shard_map_with_its_check(kind, rng):
    """Each device selects with queries of its own."""
    if len(jax.devices()) < 2:
        pytest.skip(f"needs 2 devices; the backend here has {len(jax.devices())}")
    cache, meta, tokens, _ = step(rng, builder(), *STEPS[kind], poison=False)
    q = jnp.asarray(rng.normal(size=(2, tokens, HEADS, DIM)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(2, tokens, HEADS)), jnp.float32)

    def select(q, w):
        return select_topk(q[0], w[0], cache, meta, TOPK, backend="xla")[None]

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=auto)
    spec = jax.P("x")
    got = jax.jit(jax.shard_map(select, mesh=mesh, in_specs=spec, out_specs=spec))(q, w)
    want = [select_topk(q[i], w[i], cache, meta, TOPK, backend="xla") for i in range(2)]
    np.testing.assert_array_equal(got, np.stack(want))


def test_refusals(rng, our_errors):
    cache, meta, tokens, _ = step(rng, builder(), *STEPS["decodes"])
    q, w = jnp.ones((tokens, HEADS, DIM)), jnp.ones((tokens, HEADS))
    with pytest.raises(ArgumentError, match=r"meta\.slots.*tokens"):
        select_topk(q[1:], w[1:], cache, meta, 3)
    records = RecordCache.alloc(num_pages=2, page=PAGE, format="v4")
    with pytest.raises(ArgumentError, match="format of the cache: given v4; allowed: index_key"):
        select_topk(q, w, records, meta, 3)
    with pytest.raises(ArgumentError, match="k: given 0; allowed: a static int, 1 or more"):
        select_topk(q, w, cache, meta, 0)
    with pytest.raises(ArgumentError, match=r"dim=63.*dim=64"):
        select_topk(q[..., 1:], w, cache, meta, 3)
    with pytest.raises(ArgumentError, match=r"weights.*heads=3"):
        select_topk(q, w[:, 1:], cache, meta, 3)
    with pytest.raises(ArgumentError, match="layer: given 0; allowed: None"):
        select_topk(q, w, cache, meta, 3, layer=0)
    nothing = replace(meta, decode=None, prefill=None)
    with pytest.raises(ArgumentError, match="meta: given neither decodes nor chunks"):
        select_topk(q, w, cache, nothing, 3)


def test_the_logits_have_a_derivative(rng):
    q, w, k = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 2, 4), (3, 2), (5, 4)))
    grads = jax.grad(lambda *a: indexer_logits(*a).sum(), argnums=(0, 1, 2))(q, w, k)
    dots = np.einsum("qhd,kd->qhk", q, k)
    np.testing.assert_allclose(grads[1], np.maximum(dots, 0).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(
        grads[2], np.einsum("qhk,qh,qhd->kd", dots > 0, w, q), rtol=1e-4, atol=1e-5
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_over_pages(kind, rng):
    """The kernel's own scores are exact here: small integers and powers of two."""
    rows = [np.round(_scores(kind, rng) * 64).clip(-255, 255) for _ in range(3)]
    cache, table = paged(rng, rows, page=64, dtype="bf16")
    pages = jnp.pad(cache.pages, ((0, 0), (0, 0), (0, 126)))
    cache = replace(cache, pages=pages, rank=128)
    q, w = probes(3, 2)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, 126))).astype(jnp.bfloat16)
    lens = np.array([[700, 257], [K, K + 1], [0, 600]], np.int32)
    for workspace in (topk.WORKSPACE, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topk, "WORKSPACE", workspace)
            run = jax.jit(lambda *a: topk.select_decode(*a, k=K))
            got = run(q, w, cache, table, jnp.asarray(lens))
        want = [[oracle(row, n, K) for n in each] for row, each in zip(rows, lens, strict=True)]
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
def test_on_a_gpu_over_long_contexts(rng):
    """131,072 keys in chunks and at once, V3.2's sizes: the same selection."""
    s, count = jax.random.normal, 131_072
    keys = jax.random.split(jax.random.key(0), 3)
    q = s(keys[0], (24, 64, 128), jnp.bfloat16)
    w = s(keys[1], (24, 64), jnp.float32)
    k = s(keys[2], (count, 128), jnp.bfloat16)
    starts = jnp.zeros(24, jnp.int32)
    ends = jnp.asarray([count - 5 * i for i in range(24)], jnp.int32)
    found = []
    for workspace in (1 << 25, 1 << 20, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topk, "WORKSPACE", workspace)
            run = jax.jit(lambda *a: topk.select_prefill(*a, k=2048))
            found.append(np.asarray(run(q, w, k, starts, ends)))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    scores = np.asarray(indexer_logits(q[:2], w[:2], k))
    for got, row, n in zip(found[0], scores, ends.tolist(), strict=False):
        same_selection(got, row, n, 2048, near=1e-2)


def coded(rng, count):
    """Codes and scales of ``count`` keys, and their scores by ``coded_probes``: all exact."""
    scores = rng.integers(-15, 16, count).astype(np.float32)
    codes = np.zeros((count, 128), np.float32)
    codes[:, 0], codes[:, 1] = np.maximum(scores, 0), np.maximum(-scores, 0)
    scales = 2.0 ** rng.integers(-3, 4, count).astype(np.float32)
    return jnp.asarray(codes, jnp.float8_e4m3fn), scales, scores * scales


def coded_cache(rng, table, *, form):
    """``coded`` keys at the pages of ``table`` in the second layer, NaN elsewhere; their scores."""
    width, scores = table.shape[1], []
    size = {"num_pages": table.size + 3, "page": 64, "format": form, "layers": 2}
    if form == "index_key":
        cache = RecordCache.alloc(**size)
        pages = np.full(cache.pages.shape, 0x7F, np.uint8)
    else:
        cache = LatentCache.alloc(**size, rank=128, rope=0)
        pages = np.full(cache.pages.shape, np.nan, np.float32)
    for row in table:
        codes, scales, found = coded(rng, width * 64)
        scores.append(found)
        if form == "index_key":
            raw = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.uint8))
            pages[1, row, : 64 * 128] = raw.reshape(width, -1)
            pages[1, row, 64 * 128 :] = scales.reshape(width, -1).view(np.uint8)
        else:
            scaled = codes.astype(jnp.float32) * scales[:, None]
            pages[1, row] = np.asarray(scaled).reshape(width, 64, 128)
    return replace(cache, pages=jnp.asarray(pages, cache.pages.dtype)), scores


def coded_probes(*axes):
    q = jnp.zeros((64, 128)).at[5, 0].set(1).at[63, 1].set(1).astype(jnp.float8_e4m3fn)
    w = jnp.zeros(64).at[5].set(1).at[63].set(-1)
    return jnp.broadcast_to(q, (*axes, 64, 128)), jnp.broadcast_to(w, (*axes, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("module", [mosaic, topk])
@pytest.mark.parametrize(("workspace", "columns"), [(1 << 25, 1 << 17), (1 << 25, 4096), (1, 4096)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("form", ["index_key", "bf16", "fp16"])
def test_on_a_gpu_over_shuffled_pages(module, workspace, columns, queries, form, rng, monkeypatch):
    """Rows of several blocks of pages; pages that are no row's, or missing, hold NaN or nothing."""
    monkeypatch.setattr(module, "WORKSPACE", workspace)
    if module is mosaic:
        monkeypatch.setattr(rows_sm90, "COLUMNS", columns)
    k, width, rows = 300, 200, 5
    table = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    cache, scores = coded_cache(rng, table, form=form)
    table[0, 7], table[1, 9], scores[0][448:512], scores[1][576:640] = -1, 2**30, 0, 0
    lens = rng.integers(k, width * 64 + 1, (rows, queries)).astype(np.int32)
    lens[2], lens[3, 0] = -1, k
    for r, row in enumerate(table):
        row[-(-int(lens[r].max()) // 64) :] = GARBAGE_PAGE
    q, w = coded_probes(rows, queries)
    q = q if form == "index_key" else q.astype(cache.pages.dtype)
    select = jax.jit(lambda *a: module.select_decode(*a, k=k, layer=jnp.int32(1)))
    got = select(q, w, cache, jnp.asarray(table), jnp.asarray(lens))
    want = [[oracle(row, n, k) for n in each] for row, each in zip(scores, lens, strict=True)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("module", [mosaic, topk])
@pytest.mark.parametrize(("workspace", "columns"), [(1 << 25, 1 << 17), (1 << 25, 4096), (1, 4096)])
def test_on_a_gpu_over_gathered_codes(module, workspace, columns, rng, monkeypatch):
    """Two requests behind each other, NaN behind both, queries that see little or nothing."""
    monkeypatch.setattr(module, "WORKSPACE", workspace)
    if module is mosaic:
        monkeypatch.setattr(rows_sm90, "COLUMNS", columns)
    k, count = 300, 20_001
    codes, scales, scores = coded(rng, count)
    codes = codes.at[12_000:12_100].set(jnp.nan)
    starts = np.where(np.arange(301) % 2, 12_100, 0).astype(np.int32)
    ends = np.where(starts, count, 12_000) - rng.integers(0, 7_000, 301).astype(np.int32)
    ends[7], ends[8] = starts[7], starts[8] + k
    q, w = coded_probes(301)
    select = jax.jit(lambda *a, s: module.select_prefill(*a, k=k, scales=s))
    got = select(q, w, codes, jnp.asarray(starts), jnp.asarray(ends), s=jnp.asarray(scales))
    want = [oracle(scores[a:b], b - a, k) for a, b in zip(starts, ends, strict=True)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("workers", "work"), [(1, 1), (1, 2), (3, 7), (132, 264), (132, 65_536)])
def test_stretches_are_all_of_the_work_once(workers, work):
    """Two parts of each thread block, as far from the beginning as from the end, equally long."""
    found = []
    for n in range(workers):
        (a, b), (c, d), *other = (
            tuple(map(int, scores_sm90.stretch_of(i, jnp.int32(n), workers, work)))
            for i in range(4)
        )
        assert c <= d == a <= b and (a % scores_sm90.NEAR == 0 or a == b)
        found.append(((c, b), (other[1][0], other[0][1])))
    assert sorted(n for both in found for a, b in both for n in range(a, b)) == list(range(work))
    sizes = [sum(b - a for a, b in both) for both in found]
    assert max(sizes) - min(sizes) <= 2
    for (a, b), (c, d) in found:
        assert abs(a - (work - d)) <= 1 and abs(b - (work - c)) <= 1


def test_pages_of_a_thread_block():
    """Few turns where rows are short and equal, many small thread blocks else."""
    workers = 5 * 132
    assert mosaic._span(128, 128, workers) == 26  # one turn
    assert mosaic._span(64, 512, workers) == mosaic._span(256, 128, workers) == mosaic.SHORT
    assert mosaic._span(1, 2048, workers) == 4 and mosaic._span(1, 128, workers) == 1
    assert mosaic._span(1000, 2, workers) == 2


WITHOUT = aot.available() or missing("triton")


def _stack(form):
    """Shapes of a stack of index keys."""
    facts = {"num_pages": 4096, "page": 64, "format": form, "layers": 8}
    return jax.eval_shape(
        lambda: (
            RecordCache.alloc(**facts)
            if form == "index_key"
            else LatentCache.alloc(**facts, rank=128, rope=0)
        )
    )


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
@pytest.mark.parametrize("form", ["index_key", "bf16", "fp16"])
@pytest.mark.parametrize("queries", [1, 2, 4, 8])
def test_mosaic_compiles_for_sm90(queries, form, monkeypatch):
    """No register is spilled, no product waits for another; thread blocks fit a multiprocessor."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    spec, records = jax.ShapeDtypeStruct, form == "index_key"
    dtypes = {"index_key": jnp.float8_e4m3fn, "bf16": jnp.bfloat16, "fp16": jnp.float16}
    table, lens = spec((128, 512), jnp.int32), spec((128, queries), jnp.int32)
    q, w = spec((128, queries, 64, 128), dtypes[form]), spec((128, queries, 64), jnp.float32)
    run = lambda *a: mosaic.select_decode(*a[:-1], k=2048, layer=a[-1])  # noqa: E731
    given = q, w, _stack(form), table, lens, spec((), jnp.int32)
    compiled, reports = aot.compile_sm90(run, *given)
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < 4 * (128 * 512 * 64 + 8 * 128 * queries * 2048) * queries + 2**20, used
    (paged,) = (r for r in reports if "index_ranks" in r.name)
    streams, blocks = paged_sm90.fit(queries, records=records)
    assert blocks * (paged.shared + 1024) <= 228 * 1024, paged.shared
    assert blocks * streams * 128 * paged.registers <= 2**16, paged.registers
    for report in reports:
        assert not report.spilled and not report.serialized, report.log


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
def test_mosaic_over_gathered_codes_compiles_for_sm90(monkeypatch):
    """No register is spilled, no product waits for another."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    spec, code = jax.ShapeDtypeStruct, jnp.float8_e4m3fn
    bounds = [spec((4096,), jnp.int32)] * 2
    gathered = lambda *a: mosaic.select_prefill(*a[:-1], k=2048, scales=a[-1])  # noqa: E731
    q, w, keys = spec((4096, 64, 128), code), spec((4096, 64), jnp.float32), spec((8192, 128), code)
    _, reports = aot.compile_sm90(gathered, q, w, keys, *bounds, spec((8192,), jnp.float32))
    for report in reports:
        assert not report.spilled and not report.serialized, report.log


@pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)
@pytest.mark.parametrize("form", ["index_key", "bf16"])
@pytest.mark.parametrize(("sm", "triton", "mosaic"), [(89, 3, 0), (90, 1, 1)])
def test_compiles_for_sm90(sm, triton, mosaic, form, monkeypatch):
    """Three launches for V3.2's decode of 128 requests, two on Hopper; no copy of the cache."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: replace(aot.H200, sm=sm))
    cache = _stack(form)
    spec = jax.ShapeDtypeStruct
    dtype = jnp.float8_e4m3fn if form == "index_key" else jnp.bfloat16

    def call(q, w, cache, table, lens, layer):
        return topk.select_decode(q, w, cache, table, lens, k=2048, layer=layer)

    compiled, _ = aot.compile_sm90(
        call, spec((128, 1, 64, 128), dtype), spec((128, 1, 64), jnp.float32), cache,
        spec((128, 512), jnp.int32), spec((128, 1), jnp.int32), spec((), jnp.int32),
    )  # fmt: skip
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count('custom_call_target="triton_kernel_call_ffi"') == triton, entry
    assert entry.count('custom_call_target="mosaic_gpu') == mosaic, entry
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < 4 * (128 * 512 * 64 + 8 * 128 * 2048) + 2**20, used
