"""Inputs of V4's small steps, new rows and compressed states, and the truth about them in numpy."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mla_jax.cache import ELEMENT_FORMATS, LatentCache, RecordCache, StatePool
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import CommonMetadata, GroupSpec, build_common
from mla_jax.metadata.deepseek_v4 import PoolMetadata, Pools
from tests.cases import draw, starts

EPS = 1e-6
PAGE, PAGES = 4, 9
WIDTHS = {"v4": (512, 32), "index_key": (128, 32)}
"""Channels and pairs of what byte records hold."""


def poisoned(cache):
    """Every byte as nobody left it: NaN, or 0xFF."""
    fill = 0xFF if isinstance(cache, RecordCache) else jnp.nan
    return dataclasses.replace(cache, pages=jnp.full_like(cache.pages, fill))


def empty(format, dim, pairs, *, num_pages=PAGES, page=PAGE, layers=None):
    """A poisoned cache of rows of ``dim`` channels."""
    facts = {"num_pages": num_pages, "page": page, "format": format, "layers": layers}
    if format in ELEMENT_FORMATS:
        return poisoned(LatentCache.alloc(rank=dim - 2 * pairs, rope=2 * pairs, **facts))
    return poisoned(RecordCache.alloc(**facts))


def normalised(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


def tail_turned(x, turn):
    """The last channels of ``[..., dim]`` as complex numbers, times ``exp(i turn)``."""
    n = 2 * turn.shape[-1]
    z = x[..., -n::2] + 1j * x[..., 1 - n :: 2] if n > 1 else x[..., :0]
    z = z * np.exp(1j * turn)
    flat = np.stack([z.real, z.imag], -1).reshape(*z.shape[:-1], n)
    return np.concatenate([x[..., : x.shape[-1] - n], flat], -1)


def angles(turn):
    return tuple(jnp.asarray(f(turn), jnp.float32) for f in (np.cos, np.sin))


def window_inputs(rng, tokens, heads, *, format="bf16", dtype="bfloat16", layers=None):
    """``(cache, q, kv, gain, turn, slots)``; the arrays are numpy's."""
    dim, pairs = WIDTHS.get(format, (48, 8))
    return (
        empty(format, dim, pairs, layers=layers),
        draw(rng, tokens, heads, dim, dtype=dtype),
        draw(rng, tokens, dim, dtype=dtype),
        draw(rng, dim, dtype=dtype),
        rng.uniform(-3, 3, (tokens, pairs)),
        rng.permutation(PAGES * PAGE)[:tokens].astype(np.int32),
    )


def window_truth(q, kv, gain, turn):
    """Queries and rows in float64."""
    q, kv, gain = (np.asarray(x, np.float64) for x in (q, kv, gain))
    return tail_turned(normalised(q), turn[:, None]), tail_turned(normalised(kv) * gain, turn)


def near(format, dtype):
    """Errors of a stored row: two roundings of both channels of a pair, codes by half a step."""
    step = float(ml_dtypes.finfo(dtype).eps)
    if format not in ELEMENT_FORMATS:
        return {"rtol": 2**-4 + 2 * step, "atol": 2**-6 + 2 * step}
    stored = float(ml_dtypes.finfo(ELEMENT_FORMATS[format].dtype).eps)
    return {"rtol": 1.1 * (step + stored), "atol": 4e-6 + 1.5 * step}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """Values and gates of whole sequences, and what becomes of their groups."""

    ratio: int
    overlap: bool
    dims: tuple[int, ...]  # of each pool
    formats: tuple[str, ...]
    pairs: int
    values: list  # of each pool: of each sequence ``[tokens, halves, dim]``
    gates: list
    bias: list
    gain: list
    dtype: str

    @property
    def span(self):
        return self.ratio * (1 + self.overlap)

    @property
    def lens(self):
        return [len(v) for v in self.values[0]]

    @property
    def groups(self):
        """Cache groups: of the states, and the ring."""
        states = GroupSpec("states", PAGE, ratio=self.ratio)
        return states, GroupSpec("open", self.span, ring=True)

    def turn(self, first):
        return np.asarray(first)[..., None] * 0.3 / (1 + np.arange(self.pairs))

    def truth(self, pool, sequence):
        """The states of one sequence in float64, group by group."""
        v, g = (np.asarray(x[pool][sequence], np.float64) for x in (self.values, self.gates))
        g = g + np.asarray(self.bias[pool], np.float64)[np.arange(len(g)) % self.ratio]
        found = []
        for w in range(len(v) // self.ratio):
            own = np.arange(w * self.ratio, (w + 1) * self.ratio)
            old = own - self.ratio
            parts = [(v[own, -1], g[own, -1])]
            if self.overlap and w:
                parts.append((v[old, 0], g[old, 0]))
            values, gates = (np.concatenate(x) for x in zip(*parts, strict=True))
            p = np.exp(gates - gates.max(0))
            state = (p * values).sum(0) / p.sum(0)
            state = normalised(state) * np.asarray(self.gain[pool], np.float64)
            found.append(tail_turned(state, self.turn(w * self.ratio)))
        return np.stack(found) if found else np.zeros((0, self.dims[pool]))


def sequences(
    rng, lens, *, ratio=4, overlap=True, formats=("fp32",), dims=None, pairs=None, dtype="float32"
) -> Sequences:
    dims = dims or tuple(WIDTHS.get(f, (24 - 8 * i, 4))[0] for i, f in enumerate(formats))
    halves = 1 + overlap
    drawn = [[draw(rng, n, halves, d) for n in lens] for d in (*dims, *dims)]
    return Sequences(
        ratio=ratio,
        overlap=overlap,
        dims=dims,
        formats=tuple(formats),
        pairs=pairs or WIDTHS.get(formats[0], (0, 4))[1],
        values=drawn[: len(dims)],
        gates=[[2 * g for g in gates] for gates in drawn[len(dims) :]],
        bias=[draw(rng, ratio, halves, d) for d in dims],
        gain=[draw(rng, d, dtype=dtype) for d in dims],
        dtype=dtype,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What one step gives to ``pool_states``, but for the caches."""

    common: CommonMetadata
    meta: PoolMetadata
    pools: tuple[StatePool, ...]
    angles: tuple

    def args(self, ring, caches):
        pools = (dataclasses.replace(p, cache=c) for p, c in zip(self.pools, caches, strict=True))
        return ring, tuple(pools), self.meta, self.common.positions, self.angles


class Memory:
    """Poisoned caches and rings for some sequences, their pages shuffled."""

    def __init__(self, rng, s: Sequences, *, layers=None, extra=2):
        states, ring = s.groups
        self.s, count = s, len(s.lens)
        width = max(1, *(-(-n // (s.ratio * PAGE)) for n in s.lens))
        ids = rng.permutation(count * width + extra)[: count * width].reshape(count, width)
        rows = rng.permutation(count + extra)[:count]
        self.tables = {
            states.name: jnp.asarray(ids, jnp.int32),
            ring.name: jnp.asarray(rows[:, None], jnp.int32),
        }
        self.caches = tuple(
            empty(f, d, s.pairs, num_pages=count * width + extra, layers=layers)
            for f, d in zip(s.formats, s.dims, strict=True)
        )
        columns = sum(2 * (1 + s.overlap) * d for d in s.dims)
        facts = {"num_pages": count + extra, "page": s.span, "format": "fp32", "layers": layers}
        self.ring = poisoned(LatentCache.alloc(rank=columns, rope=0, **facts))

    def step(self, done, take, *, tokens) -> Step:
        """``take`` more tokens of each sequence, ``done`` of which are there; NaN behind them."""
        s, count = self.s, len(done)
        bucket = CommonBucket(
            requests=count, tokens=tokens, pages=tuple(t.shape[1] for t in self.tables.values())
        )
        common = build_common(
            jnp.asarray(starts(take)), jnp.asarray(np.add(done, take), jnp.int32), self.tables,
            jnp.int32(count), bucket=bucket, groups=s.groups,
        )  # fmt: skip
        meta = Pools(states=s.groups[0], ring=s.groups[1]).build(common)

        def flat(each):
            rows = [x[a : a + n] for x, a, n in zip(each, done, take, strict=True)]
            found = np.full((tokens, *each[0].shape[1:]), np.nan, np.float32)
            found[: sum(take)] = np.concatenate(rows)
            return jnp.asarray(found)

        pools = tuple(
            StatePool(
                cache=cache,
                values=flat(s.values[i]),
                gates=flat(s.gates[i]),
                bias=jnp.asarray(s.bias[i]),
                gain=jnp.asarray(s.gain[i]),
                slots=common.slots["states"],
            )
            for i, cache in enumerate(self.caches)
        )
        turn = angles(s.turn(np.asarray(meta.first)))
        return Step(common=common, meta=meta, pools=pools, angles=turn)

    def rows(self, sequence):
        """Slots of a sequence's states, in their order."""
        w = np.arange(self.s.lens[sequence] // self.s.ratio)
        return np.asarray(self.tables["states"])[sequence][w // PAGE] * PAGE + w % PAGE


def cuts(rng, lens, most):
    """Random steps ``(done, take)`` of at most ``most`` tokens a sequence, until all are there."""
    done = np.zeros(len(lens), int)
    while (done < lens).any():
        take = np.minimum(rng.integers(0, most + 1, len(lens)), lens - done)
        yield done.tolist(), take.tolist()
        done = done + take
