"""DeepSeek V4: the engine's steps against whole sequences; pools, streams, poison, caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.config_v4 import StreamConfig
from mla_jax.errors import ArgumentError, EngineError
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.check import check
from mla_jax.metadata.common import GroupSpec, build_common
from mla_jax.metadata.deepseek_v4 import Pools
from mla_jax.metadata.window import WindowLimits
from mla_jax.model.compressor import Pool
from mla_jax.model.hyper_connections import Streams
from mla_jax.model.rope import cos_sin
from mla_jax.model.sampling import SamplingParams
from mla_jax.ops import append_window, gather_rows
from mla_jax.pallas.pooling.ref import pooled
from tests.model import v4

NEAR = 2e-5 if jax.default_backend() == "cpu" else 2e-4  # of float32 logits
WISH = SamplingParams(max_new_tokens=10, ignore_eos=True)
PROMPTS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 60)
"""Around groups of 4 and 16, the window of 8, and the selection of 3 states."""


def prompts(rng, lengths=PROMPTS):
    return [rng.integers(3, 64, n).tolist() for n in lengths]


def whole(module, ids):
    """Logits of every position of one sequence, without a cache."""
    if not hasattr(module, "_whole"):
        object.__setattr__(module, "_whole", jax.jit(lambda x: module.logits(module.full(x)[0])))
    padded = jnp.asarray([ids + [0] * (v4.LONGEST - len(ids))])
    return np.asarray(module._whole(padded))[: len(ids)]


@pytest.fixture(scope="module")
def served():
    """A model, its configuration and an engine whose pools are too small for all requests."""
    cfg = v4.config()
    module = v4.model(cfg)
    return module, cfg, v4.engine(module, cfg, ladder=v4.ladder(), want_logits=True, num_pages=28)


@pytest.mark.slow
def test_steps_equal_whole_sequences(served, rng):
    """Prompts in chunks, together, queued and preempted: logits of every drawn token."""
    module, _, engine = served
    asked = prompts(rng)
    wish = dataclasses.replace(WISH, max_new_tokens=24)
    for prompt, done in zip(asked, engine.generate(asked, wish), strict=True):
        want = whole(module, prompt + list(done.token_ids))[len(prompt) - 1 : -1]
        np.testing.assert_allclose(np.asarray(done.logits), want, atol=NEAR)
        assert list(done.token_ids) == want.argmax(-1).tolist()
    assert engine.stats().pages_used == 0
    assert engine.stats().preemptions > 0
    assert engine.stats().compiles == len(engine.builder.rungs()) == 3


def test_windows_hold_what_is_seen(served, rng):
    """A request of 60 tokens never has more pages of the window than one chunk and 8 tokens."""
    _, _, engine = served
    window = engine.scheduler.groups[0]
    window.pool.peak = 0
    engine.generate(prompts(rng, (60,)), WISH)
    assert window.window == 8
    assert window.pool.peak == (v4.CHUNK + 8) // v4.PAGE


def test_memory_that_nobody_wrote_changes_no_bit(served, rng):
    """NaN in every row of every group instead of zeros."""
    _, _, engine = served
    asked = prompts(rng, (5, 17, 40))
    clean = engine.generate(asked, WISH)
    for group, cache in engine._caches.items():
        engine._caches[group] = dataclasses.replace(
            cache, pages=jnp.full_like(cache.pages, jnp.nan)
        )
    dirty = engine.generate(asked, WISH)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a.logits, b.logits)


def poison(engine):
    """NaN in every row of every group, 0xFF in every record."""
    for group, cache in engine._caches.items():
        fill = 0xFF if isinstance(cache, RecordCache) else jnp.nan
        pages = jnp.full_like(cache.pages, fill)
        engine._caches[group] = dataclasses.replace(cache, pages=pages)


def wide(**changes):
    """Widths of the published records."""
    return v4.config(
        dim=512, rope_dim=64, index_dim=128, heads=2, compress_ratios=(4, 16), hash_layers=0,
        **changes,
    )  # fmt: skip


@pytest.mark.slow
def test_records(rng):
    """8 bits: 584-byte records and index keys; poison changes no bit, most tokens stay."""
    cfg = wide()
    module = v4.model(cfg)
    low = v4.engine(module, cfg, cache_format="fp8_e4m3", want_logits=True)
    formats = {g.name: g.format for g in low.groups}
    assert formats == {
        "window": "v4", "states_4": "v4", "states_16": "v4", "index_keys": "index_key",
        "open_4": "fp32", "open_16": "fp32",
    }  # fmt: skip
    asked = prompts(rng, (5, 20, 40))
    wish = dataclasses.replace(WISH, max_new_tokens=4)
    clean = low.generate(asked, wish)
    for prompt, done in zip(asked, clean, strict=True):
        want = whole(module, prompt + list(done.token_ids))[len(prompt) - 1 : -1]
        assert np.abs(done.logits - want).mean() < 0.1 * np.abs(want).mean()
    poison(low)
    for a, b in zip(clean, low.generate(asked, wish), strict=True):
        np.testing.assert_array_equal(a.logits, b.logits)
    with pytest.raises(EngineError, match=r"cache_format fp8_e4m3: widths: given .*allowed"):
        v4.engine(v4.model(v4.config()), v4.config(), cache_format="fp8_e4m3")


@pytest.mark.slow
def test_sixteen_bits(rng):
    cfg = wide()
    engine = v4.engine(v4.model(cfg, "bfloat16"), cfg, cache_format="bf16", want_logits=True)
    for done in engine.generate(prompts(rng, (1, 20)), WISH):
        assert np.isfinite(done.logits).all()
        assert len(done.token_ids) == 10


@pytest.mark.slow
@pytest.mark.parametrize("ratios", [(0, 0), (4, 4), (16, 4, 16, 4, 16)])
def test_schedules_of_layers(ratios, rng):
    """Groups exist for the layers that there are; repeated periods are one text."""
    cfg = v4.config(compress_ratios=ratios)
    module = v4.model(cfg)
    engine = v4.engine(module, cfg)
    names = {g.name for g in engine.groups}
    assert ("states_4" in names) == ("index_keys" in names) == ("open_4" in names) == (4 in ratios)
    assert ("states_16" in names) == ("open_16" in names) == (16 in ratios)
    (prompt,) = prompts(rng, (39,))
    (done,) = engine.generate([prompt], WISH)
    want = whole(module, prompt + list(done.token_ids))[len(prompt) - 1 : -1]
    assert list(done.token_ids) == want.argmax(-1).tolist()


def test_later_tokens_change_nothing(served, rng):
    """Causal, and by groups too: a state counts as soon as its last token is there."""
    module, _, _ = served
    (ids,) = prompts(rng, (60,))
    base = whole(module, ids)
    for cut in (3, 4, 15, 16, 31, 59):
        changed = whole(module, ids[:cut] + [63 - i for i in ids[cut:]])
        np.testing.assert_allclose(changed[:cut], base[:cut], atol=NEAR)
        assert np.abs(changed[cut:] - base[cut:]).max() > 1e-3


# Pools


def one_state(values, gates, gain, eps=1e-6):
    """One group in float64, token by token: no rotation."""
    top = np.exp(gates - gates.max(0))
    state = (values * top / top.sum(0)).sum(0)
    return gain * state / np.sqrt((state**2).mean() + eps)


@pytest.mark.parametrize("halves", [1, 2])
def test_pooled(halves, rng):
    groups, span, dim, pairs = 3, 8, 12, 2
    v, g = rng.normal(size=(2, groups, span, halves, dim))
    there = np.ones((groups, span), bool)
    there[1, : span // 2], there[2] = False, False
    v[1, 0], g[1, 0], g[2] = np.nan, np.nan, np.nan  # what is not there may be anything
    gain, turn = rng.normal(size=dim), rng.normal(size=(groups, pairs))
    cast = [jnp.asarray(x, jnp.float32) for x in (v, g)]
    angles = jnp.asarray(np.cos(turn), jnp.float32), jnp.asarray(np.sin(turn), jnp.float32)
    got = pooled(*cast, jnp.asarray(there), jnp.asarray(gain, jnp.float32), *angles, eps=1e-6)
    for i in (0, 1):
        half = np.arange(span) // (span // halves) if halves == 2 else np.zeros(span, int)
        rows = [j for j in range(span) if there[i, j]]
        pick = [(v[i, j, half[j]], g[i, j, half[j]]) for j in rows]
        want = one_state(*map(np.stack, zip(*pick, strict=True)), gain)
        tail = want[-2 * pairs :].reshape(pairs, 2) @ [1, 1j] * np.exp(1j * turn[i])
        want[-2 * pairs :] = np.stack([tail.real, tail.imag], -1).ravel()
        np.testing.assert_allclose(got[i], want, atol=2e-5)
    np.testing.assert_array_equal(got[2], 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_pools_of_any_cut(overlap, rng):
    """However a sequence is cut: the same states, every group once, from the step or the ring."""
    ratio, requests, longest = 4, 3, 40
    span = ratio * (1 + overlap)
    states = GroupSpec("states", 2, ratio=ratio)
    pools = Pools(states=states, ring=GroupSpec("open", span, ring=True))
    bucket = CommonBucket(requests=requests, tokens=24, pages=(5, 1))
    tables = {
        "states": jnp.asarray(rng.permutation(15).reshape(3, 5).astype(np.int32)),
        "open": jnp.asarray([[2], [0], [1]], jnp.int32),
    }
    ring = np.full((3 * span,), -1)  # position and request of what is kept
    done = np.zeros(requests, int)
    found = [[] for _ in range(requests)]
    goal = np.array([longest, 17, 3])
    while (done < goal).any():
        take = np.minimum(rng.integers(0, 9, requests), goal - done)
        starts = np.concatenate([[0], np.cumsum(take)]).astype(np.int32)
        common = build_common(
            jnp.asarray(starts), jnp.asarray((done + take).astype(np.int32)), tables,
            jnp.int32(requests), bucket=bucket, groups=(states, pools.ring),
        )  # fmt: skip
        meta = pools.build(common)
        check(common)
        check(meta)
        owner, position = np.asarray(common.requests), np.asarray(common.positions)
        names = 1000 * owner + position  # of this step's tokens
        for i, end in enumerate(np.asarray(meta.ends)):
            if end < 0:
                continue
            places = [
                names[t] if t >= 0 else ring[k] if k >= 0 else None
                for t, k in zip(meta.tokens[i].tolist(), meta.kept[i].tolist(), strict=True)
            ]
            r, last = owner[end], position[end]
            want = [1000 * r + p if p >= 0 else None for p in range(last - span + 1, last + 1)]
            assert places == want
            assert meta.first[i] == last + 1 - ratio
            found[r].append(last // ratio)
        keep = np.asarray(meta.keep)
        ring[keep[keep >= 0]] = names[keep >= 0]
        done += take
    assert found == [list(range(n // ratio)) for n in goal]


def test_a_group_without_its_predecessor():
    """The first state takes its own tokens alone; the second one the first's too."""
    cfg = v4.config()
    pool = Pool(cfg, 8, ratio=4, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (8, cfg.hidden))
    angles = cos_sin(jnp.arange(8), cfg.rope(4))
    base = pool.whole(x, angles)
    changed = pool.whole(x.at[0].add(1.0), angles)
    assert (base[0] != changed[0]).any()
    assert (base[1] != changed[1]).any()
    later = pool.whole(x.at[4].add(1.0), angles)
    np.testing.assert_array_equal(base[0], later[0])


def test_append_window(rng, our_errors):
    """Norm without a gain for queries, with one for the row; the last channels rotated."""
    tokens, heads, dim, pairs = 5, 3, 12, 2
    q, kv = rng.normal(size=(tokens, heads, dim)), rng.normal(size=(tokens, dim))
    gain, turn = rng.normal(size=dim), rng.normal(size=(tokens, pairs))

    def made(x, g, t):
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * g
        tail = y[..., -2 * pairs :].reshape(*y.shape[:-1], pairs, 2) @ [1, 1j] * np.exp(1j * t)
        flat = np.stack([tail.real, tail.imag], -1).reshape(*y.shape[:-1], 2 * pairs)
        return np.concatenate([y[..., : -2 * pairs], flat], -1)

    cache = LatentCache.alloc(num_pages=2, page=4, rank=8, rope=4, format="fp32", layers=2)
    slots = jnp.asarray([3, -1, 6, 0, 2**30])
    low = jnp.float32
    angles = jnp.asarray(np.cos(turn), low), jnp.asarray(np.sin(turn), low)
    given = jnp.asarray(q, low), jnp.asarray(kv, low), jnp.asarray(gain, low), angles, slots
    got, cache = append_window(cache, *given, eps=1e-6, layer=1)
    np.testing.assert_allclose(got, made(q, 1.0, turn[:, None]), atol=2e-6)
    rows = gather_rows(cache, jnp.arange(8), dtype=low, layer=1)
    want = np.zeros((8, dim))
    want[[3, 6, 0]] = made(kv, gain, turn)[[0, 2, 3]]
    np.testing.assert_allclose(rows, want, atol=2e-6)
    np.testing.assert_array_equal(gather_rows(cache, jnp.arange(8), dtype=low, layer=0), 0)
    with pytest.raises(ArgumentError, match=r"append_window: kv.*dim=11.*dim=12"):
        append_window(cache, given[0], given[1][:, 1:], *given[2:], eps=1e-6, layer=1)


# Streams


def test_streams_equal_float64(rng):
    n, hidden, tokens = 3, 10, 4
    streams = Streams(hidden, StreamConfig(count=n), eps=1e-6, rngs=nnx.Rngs(0))
    streams.bias.set_value(jnp.asarray(rng.normal(size=(2 + n) * n), jnp.float32))
    streams.scale.set_value(jnp.asarray([0.7, 1.3, -0.4], jnp.float32))
    s, y = rng.normal(size=(tokens, n, hidden)), rng.normal(size=(tokens, hidden))
    x, mixing = streams(jnp.asarray(s, jnp.float32))
    back = mixing.back(jnp.asarray(s, jnp.float32), jnp.asarray(y, jnp.float32))
    w = np.asarray(streams.proj[...], np.float64).reshape(n * hidden, -1)
    b, a = (np.asarray(p[...], np.float64) for p in (streams.bias, streams.scale))
    for t in range(tokens):
        flat = s[t].ravel()
        z = flat / np.sqrt((flat**2).mean() + 1e-6) @ w
        pre = 1 / (1 + np.exp(-(a[0] * z[:n] + b[:n]))) + 1e-6
        post = 2 / (1 + np.exp(-(a[1] * z[n : 2 * n] + b[n : 2 * n])))
        m = np.exp((a[2] * z[2 * n :] + b[2 * n :]).reshape(n, n))
        m = m / m.sum(1, keepdims=True) + 1e-6
        for i in range(20):
            m = m if i == 0 else m / (m.sum(1, keepdims=True) + 1e-6)
            m = m / (m.sum(0, keepdims=True) + 1e-6)
        np.testing.assert_allclose(x[t], pre @ s[t], atol=1e-5)
        np.testing.assert_allclose(back[t], post[:, None] * y[t] + m.T @ s[t], atol=1e-5)


def test_workspaces_hold_every_chunk():
    """Of each layer type: as many rows as the plans of the largest steps ask for, never more."""
    engine_windows = v4.engine(v4.model(v4.config()), v4.config()).builder
    windows = engine_windows.windows
    step = engine_windows.rungs()[-1].windows.bucket
    limits = windows.limits
    assert isinstance(limits, WindowLimits)
    rows = windows.workspaces(step, v4.LONGEST)
    for ratio, most in zip((1, 4, 16), rows, strict=False):
        assert most <= limits.rows(ratio)
        states = v4.LONGEST // ratio if ratio > 1 else 0
        assert most >= min(limits.rows(ratio), states + step.prefill_tokens + 7)
