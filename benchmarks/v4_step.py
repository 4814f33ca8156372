"""V4's small steps, new rows and compressed states, beside vLLM's kernels on the same numbers."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sparse_decode import BYTES_PER_S
from benchmarks.timing import Isolated, isolated_us, waited
from mla_jax.cache import LatentCache, RecordCache, StatePool
from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import GroupSpec, build_common
from mla_jax.metadata.deepseek_v4 import Pools
from mla_jax.ops import append_window, gather_rows, pool_states
from mla_jax.pallas.append.ref import rms_norm
from mla_jax.types import cdiv, round_up

__all__ = ["CASES", "METHOD", "Case", "Made", "made", "run"]

HEADS, DIM, INDEX, PAIRS, PAGE, EPS = 64, 512, 128, 32, 64, 1e-6
CONTEXT, RECORD, KEY = 4096, 584, 132
BLOCK = {4: 4, 128: 8}  # rows in a page of vLLM's open groups
ALLOWED = 0.05  # between rows of two writers of e4m3: some codes differ by one
METHOD = (
    f"V4-Flash's widths ({HEADS} heads of {DIM}), pages of {PAGE}, 584-byte records and 132-byte "
    "index keys (append_bf16: elements). Up to 128 tokens are one of each request, of which one in "
    "so many completes a group; 8,192 are one prompt. us: summed kernel time of an isolated call "
    "of backend triton (kineto), span_us: start of its first kernel to end of its last; xla_us: of "
    "backend xla; medians, in turn, in one process; inputs of few tokens stay in L2. Peers: "
    "append: fused_deepseek_v4_qnorm_rope_kv_..._insert, which gets kv normed already, ours norms "
    "it; pool: save_partial_states and the compress kernel of each pool, launched from Python, so "
    "no span of theirs; ours writes into the ring what a later step needs, vLLM's every token. "
    "error: of rows and queries against backend xla; peer_error: the peer's. floor: bytes read and "
    "written once / 4.25 TB/s"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``ratio`` 0: new rows and queries; else the states of all pools of that ratio."""

    tokens: int
    ratio: int = 0
    form: str = "v4"

    @property
    def name(self) -> str:
        kind = f"pool{self.ratio}" if self.ratio else f"append_{self.form}"
        return f"{kind}_t{self.tokens}"

    @property
    def requests(self) -> int:
        return self.tokens if self.tokens <= 128 else 1

    @property
    def dims(self) -> tuple[int, ...]:
        """Channels of each pool."""
        return (DIM, INDEX) if self.ratio == 4 else (DIM,)

    @property
    def halves(self) -> int:
        return 2 if self.ratio == 4 else 1

    @property
    def lens(self) -> np.ndarray:
        """Keys of each request: the first one completes a group, one in ``ratio`` of the others."""
        if self.requests < self.tokens or not self.ratio:
            return np.full(self.requests, self.tokens if self.requests == 1 else CONTEXT)
        return CONTEXT + self.ratio - np.arange(self.requests) % self.ratio

    @property
    def query_lens(self) -> np.ndarray:
        return np.full(self.requests, self.tokens // self.requests)

    @property
    def bytes(self) -> int:
        """Read or written once."""
        if not self.ratio:
            row = RECORD if self.form == "v4" else 2 * DIM
            return self.tokens * (2 * 2 * HEADS * DIM + 2 * DIM + row)
        new = sum(self.tokens * 2 * self.halves * d * 4 for d in self.dims)
        if self.requests < self.tokens:  # little of it is kept
            return new + self.tokens // self.ratio * (RECORD + KEY * (self.ratio == 4))
        ends = cdiv(self.requests, self.ratio)
        waited = sum((self.ratio * self.halves - 1) * 2 * d * 4 for d in self.dims)
        return 2 * new + ends * (waited + RECORD + KEY * (self.ratio == 4))


CASES = tuple(
    Case(tokens=tokens, ratio=ratio, form=form)
    for ratio, form in ((0, "v4"), (0, "bf16"), (4, "v4"), (128, "v4"))
    for tokens in (1, 32, 128, 8192)
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """One side of a case: ``call(backend)(held, *given) -> (held, out)``."""

    call: Callable[[str], Callable[..., Any]]
    held: Any  # donated and returned
    given: tuple
    rows: Callable[[Any], list[jax.Array]]  # of what is held: what the call has stored
    peer: Callable[[Path], tuple[str, Callable[[], Any], Callable[[Any], list[jax.Array]]]]


def run(peers: Path | None, chosen: list[str], turn: AbstractContextManager) -> Iterator[dict]:
    """Check and time the chosen cases; all of them are compiled before the first ``turn``."""
    ready = [_checked(case, peers) for case in CASES if case.name in chosen]
    for row, sides in ready:
        with turn:
            row |= _times(isolated_us(sides))
        print({k: v for k, v in row.items() if "kernels" not in k}, flush=True)
        yield row


def made(case: Case) -> Made:
    """The arrays of a case and its calls."""
    return _pools(case) if case.ratio else _rows(case)


def _checked(case: Case, peers: Path | None) -> tuple[dict, dict[str, Callable[[], Any]]]:
    """Errors of our backends and of the peer, and a call of each."""
    both, results, sides = made(case), {}, {}
    for backend in ("triton", "xla"):
        program = jax.jit(both.call(backend), donate_argnums=0)
        program = program.lower(both.held, *both.given).compile()
        held = [jax.tree.map(jnp.copy, both.held)]

        def once(program=program, held=held):
            held[0], out = program(held[0], *both.given)
            jax.block_until_ready((held[0], out))
            return out

        out = once()
        results[backend] = [*both.rows(held[0]), *jax.tree.leaves(out)]
        sides[backend] = once
    row: dict[str, Any] = {"case": case.name, "floor_us": 1e6 * case.bytes / BYTES_PER_S}
    row["error"] = _error(results["triton"], results["xla"])
    assert row["error"] < ALLOWED, f"{case.name}: off by {row['error']}"
    if peers is not None:
        name, call, read = both.peer(peers)
        row |= {"peer": name, "peer_error": _error(read(waited(call)), results["xla"])}
        if row["peer_error"] < ALLOWED:
            sides["peer"] = functools.partial(waited, call)
        else:
            print(f"{case.name}: {name} is off by {row['peer_error']}", flush=True)
    return row, sides


def _times(found: dict[str, Isolated]) -> dict[str, Any]:
    ours, xla, peer = found["triton"], found["xla"], found.get("peer")
    row = {"us": ours.sum, "span_us": ours.span, "kernels": ours.kernels}
    row |= {"xla_us": xla.sum, "xla_kernels": xla.kernels, "ratio_xla": xla.sum / ours.sum}
    if peer is not None:
        row |= {"peer_us": peer.sum, "peer_kernels": peer.kernels, "ratio": peer.sum / ours.sum}
    return row


def _error(got: list, want: list) -> float:
    """The largest relative one of all results."""
    assert len(got) == len(want)
    wide = [[np.asarray(x.astype(jnp.float32)) for x in side] for side in (got, want)]
    pairs = zip(*wide, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def _cache(form: str, dim: int, pages: int) -> LatentCache | RecordCache:
    facts = {"num_pages": pages, "page": PAGE, "format": form}
    if form == "bf16":
        return LatentCache.alloc(rank=dim - 2 * PAIRS, rope=2 * PAIRS, **facts)
    return RecordCache.alloc(**facts)


def _turns(positions: np.ndarray) -> np.ndarray:
    """cos, then sin of each position, as vLLM keeps them."""
    turn = positions[:, None] * 160000.0 ** -(np.arange(PAIRS) / PAIRS)
    return np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)


def _torch(x: Any, dtype: Any = None) -> Any:
    """A copy on torch's side."""
    import torch

    x = torch.from_dlpack(jnp.copy(jnp.asarray(x))).clone()
    torch.cuda.synchronize()  # JAX may use the memory of its copy again
    return x if dtype is None else x.to(dtype)


def _paged(cache: RecordCache) -> Any:
    """vLLM's view of pages of records, a copy."""
    flat = _torch(cache.pages)
    record = cache.format.row_bytes
    return flat.as_strided((len(flat), PAGE, record), (flat.stride(0), record, 1))


def _read(like: LatentCache | RecordCache, tensor: Any, slots: np.ndarray) -> jax.Array:
    """Rows of what a peer has written into a copy of ``like``'s pages."""
    pages = jnp.from_dlpack(tensor.as_strided(like.pages.shape, _strides(like.pages.shape)))
    return gather_rows(replace(like, pages=pages), jnp.asarray(slots), dtype=jnp.float32)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


def _rows(case: Case) -> Made:
    """Queries and the one row of each token."""
    tokens, keys = case.tokens, jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (tokens, HEADS, DIM), jnp.bfloat16)
    kv = jax.random.normal(keys[1], (tokens, DIM), jnp.bfloat16)
    gain = 1 + 0.1 * jax.random.normal(keys[2], (DIM,)).astype(jnp.bfloat16)
    positions = np.arange(tokens) if case.requests == 1 else case.lens - 1
    table = _turns(np.arange(max(CONTEXT, tokens)))
    cos, sin = np.split(table[positions], 2, axis=1)
    cache = _cache(case.form, DIM, cdiv(tokens, PAGE))
    slots = np.random.default_rng(0).permutation(tokens).astype(np.int32)

    def call(backend: str):
        def one(cache, q, kv, gain, cos, sin, slots):
            given = cache, q, kv, gain, (cos, sin), slots
            return append_window(*given, eps=EPS, backend=backend)[::-1]

        return one

    def peer(peers: Path):
        import torch

        from benchmarks import vllm_v4

        normed = _torch(rms_norm(kv, gain, eps=EPS))
        to = _torch(cache.pages)
        where = (_torch(x, torch.int64) for x in (slots, positions.astype(np.int32)))
        fused = vllm_v4.insert(
            peers, _torch(q), normed, to, *where, _torch(table), eps=EPS, page=PAGE
        )
        return "vLLM", fused, lambda q: [_read(cache, to, slots), jnp.from_dlpack(q)]

    given = q, kv, gain, *map(jnp.asarray, (cos, sin, slots))
    stored = functools.partial(gather_rows, slots=jnp.asarray(slots), dtype=jnp.float32)
    return Made(call=call, held=cache, given=given, rows=lambda c: [stored(c)], peer=peer)


def _step(case: Case):
    """The step's common metadata, and its groups."""
    span = case.ratio * case.halves
    states, ring = GroupSpec("states", PAGE, ratio=case.ratio), GroupSpec("open", span, ring=True)
    width = cdiv(int(case.lens.max()), case.ratio * PAGE)
    tables = {
        "states": jnp.arange(case.requests * width, dtype=jnp.int32).reshape(-1, width),
        "open": jnp.arange(case.requests, dtype=jnp.int32)[:, None],
    }
    starts = np.concatenate([[0], np.cumsum(case.query_lens)])
    bucket = CommonBucket(requests=case.requests, tokens=case.tokens, pages=(width, 1))
    common = build_common(
        *(jnp.asarray(x, jnp.int32) for x in (starts, case.lens)), tables,
        jnp.int32(case.requests), bucket=bucket, groups=(states, ring),
    )  # fmt: skip
    return common, Pools(states=states, ring=ring).build(common)


def _pools(case: Case) -> Made:
    """The states of all pools that one layer has."""
    common, meta = _step(case)
    tokens, halves, span = case.tokens, case.halves, case.ratio * case.halves
    key = iter(jax.random.split(jax.random.key(1), 32))
    pages = common.page_tables["states"].size
    pools = tuple(
        StatePool(
            cache=_cache(form, dim, pages),
            values=jax.random.normal(next(key), (tokens, halves, dim)),
            gates=jax.random.normal(next(key), (tokens, halves, dim)),
            bias=jax.random.normal(next(key), (case.ratio, halves, dim)),
            gain=1 + 0.1 * jax.random.normal(next(key), (dim,)).astype(jnp.bfloat16),
            slots=common.slots["states"],
        )
        for form, dim in zip(("v4", "index_key"), case.dims, strict=False)
    )
    columns = sum(2 * halves * d for d in case.dims)
    ring = LatentCache.alloc(
        num_pages=case.requests, page=span, rank=columns, rope=0, format="fp32"
    )
    ring = replace(ring, pages=jax.random.normal(next(key), ring.pages.shape))
    table = _turns(np.arange(max(int(case.lens.max()), CONTEXT)))
    angles = tuple(jnp.asarray(x) for x in np.split(table[np.asarray(meta.first)], 2, axis=1))
    apart = tuple(replace(p, cache=None) for p in pools)

    def call(backend: str):
        def one(held, apart, meta, positions, angles):
            ring, caches = held
            whole = tuple(replace(p, cache=c) for p, c in zip(apart, caches, strict=True))
            facts = {"eps": EPS, "backend": backend}
            return pool_states(ring, whole, meta, positions, angles, **facts), ()

        return one

    slots = np.asarray(common.slots["states"])
    slots = slots[slots >= 0]

    def rows(held):
        at = jnp.asarray(slots)
        return [gather_rows(cache, at, dtype=jnp.float32) for cache in held[1]]

    return Made(
        call=call,
        held=(ring, tuple(p.cache for p in pools)),
        given=(apart, meta, common.positions, angles),
        rows=rows,
        peer=lambda peers: _peer_pools(peers, case, common, ring, pools, table, slots),
    )


def _peer_pools(peers: Path, case: Case, common, ring, pools, angles, slots):
    """vLLM's save and compress of each pool, one behind the other."""
    import torch

    from benchmarks import vllm_v4

    block, span = BLOCK[case.ratio], case.ratio * case.halves
    positions = np.asarray(common.positions)
    owners = np.asarray(common.requests)
    # Each request's blocks in turn, as many as hold a group; a prompt has all of its own.
    own = span // block if case.requests == case.tokens else cdiv(case.tokens, block)
    width = round_up(cdiv(int(case.lens.max()), block), 16)
    table = np.arange(case.requests)[:, None] * own + np.arange(width) % own
    state_slots = table[owners, positions // block] * block + positions % block
    shared = {
        "ratio": case.ratio,
        "table": _torch(table.astype(np.int32)),
        "owners": _torch(owners),
        "positions": _torch(positions, torch.int64),
        "state_slots": _torch(state_slots.astype(np.int32), torch.int64),
        "slots": _torch(common.slots["states"], torch.int64),
        "angles": _torch(angles),
        "eps": EPS,
    }
    names, calls, caches, begin = [], [], [], 0
    for p, dim in zip(pools, case.dims, strict=True):
        columns = 2 * case.halves * dim
        part = ring.pages[..., begin : begin + columns]
        begin += columns
        if case.requests < case.tokens:
            part = jnp.zeros((own * block, columns))
        cache = _paged(p.cache)
        given = vllm_v4.Pool(
            values=_torch(p.values.reshape(case.tokens, -1)),
            gates=_torch(p.gates.reshape(case.tokens, -1)),
            bias=_torch(p.bias.reshape(case.ratio, -1)),
            state=_torch(part.reshape(-1, block, columns)),
            cache=cache,
            gain=_torch(p.gain),
            **shared,
        )
        name, call = vllm_v4.pool(peers, given)
        names, calls, caches = [*names, name], [*calls, call], [*caches, cache]

    def all_pools():
        for call in calls:
            call()

    def read(_):
        found = zip(pools, caches, strict=True)
        return [_read(p.cache, cache, slots) for p, cache in found]

    return f"vLLM, {' and '.join(names)}", all_pools, read
