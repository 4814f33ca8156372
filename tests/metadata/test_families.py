"""Random traffic of the scheduler through the builders of all families."""

import random
from dataclasses import replace

import jax
import numpy as np
import pytest

from mla_jax.errors import MetadataError
from mla_jax.metadata.buckets import MLALadder, default_steps
from mla_jax.metadata.builder import AttentionMetadataBuilder, MLAMetadataBuilder
from mla_jax.metadata.check import check, check_host
from mla_jax.metadata.common import GroupSpec, HostBatch, build_common, warmup_common
from mla_jax.metadata.deepseek_v4 import V4MetadataBuilder
from mla_jax.metadata.deepseek_v32 import V32MetadataBuilder
from mla_jax.metadata.indexer import Indexer, IndexerDecision
from mla_jax.metadata.mla import MLAMetadata
from mla_jax.metadata.packed import pack
from mla_jax.metadata.window import WindowDecision, Windows
from mla_jax.model.sampling import SamplingParams
from mla_jax.pages import PageGroup, PagePool
from mla_jax.scheduler import Plan, Scheduler

PAGE, LONGEST, REQUESTS, CHUNK = 8, 256, 12, 40
SIZES = {
    "max_requests": REQUESTS,
    "max_prefill_tokens": CHUNK,
    "max_pages": LONGEST // PAGE,
}


def v3() -> MLAMetadataBuilder:
    def absorb(queries, contexts):
        return 4 if any(contexts) and max(queries) <= 6 else 0

    return MLAMetadataBuilder(
        ladder=MLALadder.default(**SIZES, context_rows=24),
        group=GroupSpec("latent", PAGE),
        absorb=absorb,
        absorb_run=4,
    )


def v32() -> V32MetadataBuilder:
    keys = GroupSpec("index_keys", 4)
    return V32MetadataBuilder(
        ladder=default_steps(**SIZES),
        latent=GroupSpec("latent", PAGE),
        indexer=Indexer(group=keys, max_logits_bytes=4 * 2048),
    )


def v32_dense() -> V32MetadataBuilder:
    """Sequences up to 90 tokens are not selected from, but for few tokens on long contexts."""

    def absorb(queries, contexts):
        return 4 if any(contexts) and max(queries) <= 6 else 0

    return replace(v32(), topk=90, context_rows=24, absorb=absorb)


def v4() -> V4MetadataBuilder:
    return V4MetadataBuilder(
        ladder=default_steps(**SIZES),
        windows=Windows(
            group=GroupSpec("window", PAGE),
            window=16,
            compress_ratios=(0, 4, 128),
            max_model_len=LONGEST,
            max_batched_tokens=CHUNK,
            chunk_requests=1,
        ),
        compressed=(GroupSpec("states_4", 4, ratio=4), GroupSpec("states_128", 1, ratio=128)),
        indexer=Indexer(group=GroupSpec("index_keys", 8, ratio=4), max_logits_bytes=4 * 2048),
    )


BUILDERS = {"v3": v3, "v32": v32, "v32_dense": v32_dense, "v4": v4}


def steps(builder: AttentionMetadataBuilder, count: int, *, seed: int):
    """Plans of a scheduler that is given, cancels and preempts requests at random."""
    rng = random.Random(seed)
    first, *others = builder.groups  # the first runs out of pages
    pools = {first: PagePool(40)} | {g: PagePool(40 * REQUESTS) for g in others}
    scheduler = Scheduler(
        groups=[PageGroup(name=g.name, pool=pool, tokens=g.tokens) for g, pool in pools.items()],
        max_requests=REQUESTS,
        max_prefill_tokens=CHUNK,
        max_model_len=LONGEST,
        vocab=99,
    )
    for n in range(count):
        for _ in range(rng.choice([0, 0, 1, 3]) if len(scheduler) < 20 or n == 0 else 0):
            prompt = [1] * rng.choice([1, 2, 7, 40, 41, 90, 200])
            params = SamplingParams(max_new_tokens=rng.randint(1, 56))
            scheduler.add(f"{n}-{rng.random()}", prompt, params)
        plan = scheduler.schedule()
        if not plan.work:
            continue
        yield plan
        if rng.random() < 0.1:
            scheduler.cancel(rng.choice(plan.work).request.id)
        scheduler.commit(plan, [2] * len(plan.work), [0.0] * len(plan.work))
    assert scheduler.preemptions > 0 or count < 300


def host_of(plan: Plan) -> HostBatch:
    lens = np.array([w.length for w in plan.work])
    return HostBatch.of(lens, lens + [w.start for w in plan.work])


def tables_of(plan: Plan, builder: AttentionMetadataBuilder, decision) -> dict[str, np.ndarray]:
    """The scheduler's pages of every group."""
    bucket, tables = decision.common_bucket, {}
    for k, (group, width) in enumerate(zip(builder.groups, bucket.pages, strict=True)):
        table = tables[group.name] = np.zeros((bucket.requests, width), np.int32)
        for row, work in zip(table, plan.work, strict=False):
            pages = work.request.pages[k][:width]
            row[: len(pages)] = pages
    return tables


def program(builder: AttentionMetadataBuilder, traced: list):
    """What a step does before its layers: one packed buffer in, metadata out."""

    def step(packed):
        (starts, lens, requests), tables, decision = packed.unpack()
        traced.append(decision.bucket)
        common = build_common(
            starts, lens, tables, requests, bucket=decision.common_bucket, groups=builder.groups
        )
        return builder.build(common, decision)

    return jax.jit(step)


def check_made(part) -> None:
    """Its class, called with the same fields, gives the same: it takes no others, and looks."""
    again = replace(part)  # jaxtyping checks shapes and dtypes
    assert type(again) is type(part) and vars(again) == vars(part)
    for inner in vars(part).values():
        if isinstance(inner, IndexerDecision | WindowDecision):
            check_made(inner)


def check_counts(meta, host: HostBatch) -> None:
    """Every part has the split of the host, and the indexer's chunks every query with keys."""
    decodes = host.leading_up_to(1)
    tokens = int(host.query_starts[decodes])
    split = [decodes, host.num_requests - decodes, tokens, host.num_tokens - tokens]
    if isinstance(meta, MLAMetadata):
        assert [int(meta.num_decodes), int(meta.num_decode_tokens)] == [decodes, tokens]
        return
    parts = [meta.indexer, *([meta.windows] if hasattr(meta, "windows") else [])]
    assert all(part.counts[:4].tolist() == split for part in parts)
    if getattr(meta, "dense", None) is not None:  # nothing is scored
        assert meta.indexer.prefill is None and meta.indexer.decode is None
        assert [int(meta.dense.num_decodes), int(meta.dense.num_decode_tokens)] == [decodes, tokens]
        return
    ratio = 4 if hasattr(meta, "windows") else 1
    queries, keys = host.lens_from(decodes)
    wanted = sum(q for q, k in zip(queries, keys, strict=True) if k // ratio)
    covered = 0
    if (prefill := meta.indexer.prefill) is not None:
        plan = np.asarray(prefill.plan)[: int(prefill.num_chunks)]
        covered = int((plan[:, 3] - plan[:, 2]).sum())
    assert wanted <= covered <= sum(queries)


@pytest.mark.parametrize("family", BUILDERS)
def test_random_traffic(family):
    """Programs are the rungs visited, all of them listed before; every step's metadata holds."""
    builder, traced, visited = BUILDERS[family](), [], set()
    listed = [d.bucket for d in builder.rungs()]
    each = 2 if family == "v32_dense" else 1  # programs of a rung
    assert len(set(listed)) == len(listed) <= 8 * each
    run = program(builder, traced)
    for plan in steps(builder, 300, seed=1):
        host = host_of(plan)
        decision = builder.decide(host)
        check_made(decision)
        tables = tables_of(plan, builder, decision)
        bucket = decision.common_bucket
        check_host(host, bucket=bucket, groups=builder.groups, page_tables=tables)
        meta = run(pack((host.padded_arrays(bucket), tables, decision)))
        check(meta, page=PAGE)
        positions = [p for w in plan.work for p in range(w.start, w.start + w.length)]
        assert meta.positions[: len(positions)].tolist() == positions
        assert int(meta.real.sum()) == len(positions)
        check_counts(meta, host)
        visited.add(decision.bucket)
    assert set(traced) == visited <= set(listed)
    assert len(traced) == len(visited)
    assert len(visited) >= len(listed) - each


def test_v32_writes_latents_to_the_pages_of_latents():
    """The index keys have pages of another size, and other pages."""
    builder, host = v32(), HostBatch.of(np.array([1, 3]), np.array([9, 3]))
    decision = builder.decide(host)
    bucket = decision.common_bucket
    tables = {}
    for group, width, pages in zip(
        builder.groups, bucket.pages, ([[1, 2], [3]], [[11, 12, 13], [14]]), strict=True
    ):
        table = tables[group.name] = np.zeros((bucket.requests, width), np.int32)
        for row, own in zip(table, pages, strict=False):
            row[: len(own)] = own
    meta = program(builder, [])(pack((host.padded_arrays(bucket), tables, decision)))
    assert meta.slots[:4].tolist() == [2 * 8, 3 * 8, 3 * 8 + 1, 3 * 8 + 2]
    assert meta.indexer.slots[:4].tolist() == [13 * 4, 14 * 4, 14 * 4 + 1, 14 * 4 + 2]
    assert meta.page_table[:2, :2].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize(("longest", "widths"), [(4096, 1), (163_840, 2), (1 << 20, 3)])
def test_stated_numbers_of_programs(longest, widths):
    """docs/metadata.md: 6 for each family, 8 with absorption; times the widths of page tables."""
    sizes = {"max_requests": 128, "max_prefill_tokens": 512, "max_pages": longest // 64}
    latent, keys = GroupSpec("latent", 64), Indexer(group=GroupSpec("index_keys", 64))
    dense = MLAMetadataBuilder(ladder=MLALadder.default(**sizes), group=latent)
    absorbing = replace(dense, absorb=lambda queries, contexts: 0, absorb_run=4)
    sparse = V32MetadataBuilder(ladder=default_steps(**sizes), latent=latent, indexer=keys)
    small = v4()
    windows = replace(small.windows, group=GroupSpec("window", 64), max_model_len=longest)
    wide = replace(small, ladder=default_steps(**sizes), windows=windows)
    assert [len(b.rungs()) // widths for b in (dense, absorbing, sparse, wide)] == [6, 8, 6, 6]
    for builder in (sparse, wide):  # nothing grows with the square of anything
        assert all(sum(x.size for x in jax.tree.leaves(d)) < 8192 for d in builder.rungs())


def test_which_steps_are_dense():
    """By the longest sequence, whoever has it, and by what absorb says of the prefills."""
    builder = v32_dense()
    cases = {
        "decodes": ([1, 1], [90, 3], True),
        "one decode is longer": ([1, 1], [91, 3], False),
        "prefills": ([40], [40], True),
        "the last chunk": ([10], [90], True),
        "few tokens on a context": ([6], [90], False),
        "mixed": ([1, 1, 30], [90, 2, 70], True),
        "a longer decode beside": ([1, 1, 30], [99, 2, 30], False),
        "nothing": ([], [], True),
    }
    for name, (queries, keys, dense) in cases.items():
        decision = builder.decide(HostBatch.of(np.array(queries, int), np.array(keys, int)))
        assert (decision.dense is not None) == dense, name
        assert decision.bucket == (decision.dense or decision.step)
        assert decision.step.prefill_tokens or not dense or decision.dense.context_rows == 0
    assert all(d.dense is None for d in v32().rungs())
    short = replace(builder, topk=LONGEST)
    kinds = [(d.dense is None, d.step.prefills > 0) for d in short.rungs()]
    assert (True, False) not in kinds, "decodes that are always dense have no other program"
    assert (True, True) in kinds, "prefills may be absorbed"
    assert all(d.dense for d in replace(short, absorb=None).rungs())
    for wrong in ({"topk": 0}, {"context_rows": 0}):
        with pytest.raises(MetadataError, match="sizes of dense steps"):
            replace(builder, **wrong)


@pytest.mark.parametrize("family", BUILDERS)
def test_rungs_compile_what_steps_run(family):
    """An empty decision of a rung has the structure, shapes and dtypes of every step in it."""
    builder, traced = BUILDERS[family](), []
    run = program(builder, traced)
    for empty in builder.rungs():
        b = empty.common_bucket
        none = {
            g.name: np.zeros((b.requests, w), np.int32)
            for g, w in zip(builder.groups, b.pages, strict=True)
        }
        arrays = np.zeros(b.requests + 1, np.int32), np.zeros(b.requests, np.int32), np.int32(0)
        meta = run(pack((arrays, none, empty)))
        assert not np.asarray(meta.real).any()
        check(meta, page=PAGE)
        assert all(
            (np.asarray(s) == -1).all()
            for s in getattr(meta, "common", warmup_common(b, builder.groups)).slots.values()
        )
    before, empties = len(traced), {d.bucket: d for d in builder.rungs()}
    for plan in steps(builder, 60, seed=2):
        decision = builder.decide(host_of(plan))
        none = builder.warmup_decision(decision)
        jax.tree.map(np.testing.assert_array_equal, none, empties[decision.bucket])
        tables = tables_of(plan, builder, decision)
        run(pack((host_of(plan).padded_arrays(decision.common_bucket), tables, decision)))
    assert len(traced) == before == len(builder.rungs())
