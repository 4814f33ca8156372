"""What a family must say, shown by a toy one, and the families that have no model yet."""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.config_v4 import V4Config
from mla_jax.engine import Engine
from mla_jax.errors import ConfigError, EngineError
from mla_jax.metadata.buckets import CommonBucket, MLALadder
from mla_jax.metadata.builder import AttentionMetadataBuilder
from mla_jax.metadata.check import check, check_host
from mla_jax.metadata.common import GroupSpec
from mla_jax.metadata.packed import pack
from mla_jax.model.family import (
    FAMILIES,
    CacheGroup,
    Family,
    Serving,
    family_of,
)
from mla_jax.model.presets import V3_2
from mla_jax.model.sampling import SamplingParams
from mla_jax.placement import Placement
from mla_jax.types import cdiv
from tests import imports
from tests.metadata import test_families as random_traffic

VOCAB, WIDTH = 32, 8

# The toy: each token's row in pages of 4; each second one's row in pages of 3 rows, 6 tokens. A
# token sees, weighted by place, all rows up to its own; numbers are small integers: exact.


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    family: str = "toy"
    vocab: int = VOCAB
    max_positions: int = 48
    eos: tuple[int, ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ToyDecision:
    bucket: CommonBucket = field(metadata={"static": True})

    @property
    def common_bucket(self) -> CommonBucket:
        return self.bucket


@dataclass(frozen=True, kw_only=True)
class ToyBuilder(AttentionMetadataBuilder):
    specs: tuple[GroupSpec, ...]
    buckets: tuple[CommonBucket, ...]

    @property
    def groups(self):
        return self.specs

    def decide(self, host):
        fits = (b for b in self.buckets if host.num_tokens <= b.tokens)
        return ToyDecision(bucket=next(fits, self.buckets[-1]))

    def build(self, common, decision):
        self.check_common(common, decision)
        return common

    def rungs(self):
        return tuple(ToyDecision(bucket=b) for b in self.buckets)

    def warmup_decision(self, decision):
        return decision


class Toy(nnx.Module):
    def __init__(self, config, *, dtype, rngs):
        self.embed = nnx.Param(jax.random.randint(rngs(), (VOCAB, WIDTH), -3, 4).astype(dtype))
        self.head = nnx.Param(jax.random.randint(rngs(), (WIDTH, VOCAB), -3, 4).astype(dtype))

    def derive(self):
        return None

    def __call__(self, tokens, meta, caches, *, derived, backend, placement):
        x, hidden, caches = self.embed[...][tokens], 0, dict(caches)
        for group in meta.groups:
            cache, slots = caches[group.name], meta.slots[group.name]
            rows = cache.pages.reshape(-1, WIDTH)
            rows = rows.at[jnp.where(slots < 0, len(rows), slots)].set(x, mode="drop")
            caches[group.name] = dataclasses.replace(cache, pages=rows.reshape(cache.pages.shape))
            table = meta.page_tables[group.name][meta.requests]
            seen = caches[group.name].pages[0][table].reshape(len(tokens), -1, WIDTH)
            place = jnp.arange(seen.shape[1], dtype=jnp.int32)
            real = place < ((meta.positions + 1) // group.ratio)[:, None]
            weight = jnp.where(real, place % 5 + group.ratio, 0).astype(x.dtype)
            hidden += jnp.einsum("tk,tkw->tw", weight, jnp.where(real[..., None], seen, 0))
        return hidden, caches

    def logits(self, hidden):
        return hidden @ self.head[...]


def toy_groups(config: ToyConfig, serving: Serving) -> tuple[CacheGroup, ...]:
    each = {"layers": 1, "rank": WIDTH, "format": serving.cache_format}
    near = CacheGroup(name="near", page=serving.page, **each)
    return near, CacheGroup(name="far", page=3, ratio=2, **each)


def toy_builder(config: ToyConfig, serving: Serving) -> ToyBuilder:
    groups = tuple(group.spec for group in toy_groups(config, serving))
    most, pages = serving.max_requests, tuple(g.pages_of(serving.max_model_len) for g in groups)
    tokens = most, most + serving.prefill_chunk
    buckets = (CommonBucket(requests=most, tokens=n, pages=pages) for n in tokens)
    return ToyBuilder(specs=groups, buckets=tuple(buckets))


TOY = Family(name="toy", model_types=("toy",), groups=toy_groups, builder=toy_builder, module=Toy)


def by_hand(model: Toy, tokens: list[int], new: int) -> list[int]:
    """Greedy tokens behind a prompt, in numpy, from nothing but the tokens."""
    embed, head = np.asarray(model.embed[...]), np.asarray(model.head[...])
    tokens, start = list(tokens), len(tokens)
    while len(tokens) < start + new:
        x = embed[tokens]
        far = x[1::2]
        hidden = (np.arange(len(x)) % 5 + 1) @ x + (np.arange(len(far)) % 5 + 2) @ far
        tokens.append(int(np.argmax(hidden @ head)))
    return tokens[start:]


@pytest.fixture(scope="module")
def toy():
    return Toy(ToyConfig(), dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_a_toy_with_two_groups_is_served_by_the_same_engine(toy):
    """Preempted, in chunks, cancelled: tokens are those by hand, pages of both are whole."""
    engine = Engine(
        toy, ToyConfig(), family=TOY, num_pages=14, page=4, max_requests=4, prefill_chunk=7
    )
    assert engine.warm_up() == 2
    near, far = engine.scheduler.groups
    assert (near.tokens, far.tokens, near.pool.capacity, far.pool.capacity) == (4, 6, 13, 9)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=20)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 28)).tolist() for _ in range(16)]
    want = [by_hand(toy, prompt, 20) for prompt in prompts]
    assert len({tuple(tokens[-5:]) for tokens in want}) > 8  # the tokens say something
    gone = engine.add(prompts[0], params)
    engine.step()
    assert engine.cancel(gone)
    found = engine.generate(prompts, params)
    assert [list(c.token_ids) for c in found] == want
    stats = engine.stats()
    assert stats.preemptions > 3
    assert stats.compiles == len(stats.buckets) == 2
    for group in (near, far):
        assert group.pool.peak > group.pool.capacity // 2
        assert sorted(group.pool.alloc(group.pool.capacity))[0] == 1


def test_a_wrong_page_of_either_group_is_a_wrong_token(toy, monkeypatch):
    """The toy reads what its page tables say."""
    prompt, params = list(range(20)), SamplingParams(max_new_tokens=8)
    want, batch = by_hand(toy, prompt, 8), Engine._batch
    engine = Engine(toy, ToyConfig(), family=TOY, num_pages=14, page=4, prefill_chunk=7)
    assert list(engine.generate([prompt], params)[0].token_ids) == want
    for name in ("near", "far"):

        def wrong(self, plan, host, decision, name=name):
            made = batch(self, plan, host, decision)
            table = made.page_tables[name]
            if plan.num_decodes:
                table[:, :2] = table[:, 1::-1].copy()
            return made

        monkeypatch.setattr(Engine, "_batch", wrong)
        assert list(engine.generate([prompt], params)[0].token_ids) != want


def test_the_engine_imports_no_model():
    """Not by itself: families do."""
    named = imports.imported_names(imports.PACKAGE / "engine.py")
    assert not [name for name in named if "deepseek" in name.lower()]
    assert "mla_jax.model.family" in named


def serving(**changes) -> Serving:
    facts = {
        "page": random_traffic.PAGE,
        "max_requests": random_traffic.REQUESTS,
        "prefill_chunk": random_traffic.CHUNK,
        "max_model_len": random_traffic.LONGEST,
        "context_rows": 24,
        "cache_format": "bf16",
        "dtype": jnp.dtype("bfloat16"),
        "backend": None,
        "absorb_prefills": False,
        "fp8_activations": False,
        "ladder": None,
        "placement": Placement.of(None),
    }
    return Serving(**(facts | changes))


def test_settings_of_a_cpu():
    found = Serving.of(V3_2, max_model_len=64)
    assert (found.prefill_chunk, found.fp8_activations) == (512, False)
    ladder = MLALadder.default(max_requests=2, max_prefill_tokens=24, max_pages=4)
    assert Serving.of(V3_2, max_model_len=64, ladder=ladder).prefill_chunk == 24


V32 = dataclasses.replace(
    V3_2,
    layers=2,
    sparse_layers=(False, True),
    indexer=dataclasses.replace(V3_2.indexer, full=(True, True)),
    max_positions=256,
)
SPARSE = {
    "deepseek_v32": V32,
    "glm_moe_dsa": dataclasses.replace(
        V32, indexer=dataclasses.replace(V32.indexer, full=(True, False))
    ),
    "deepseek_v4": V4Config(compress_ratios=(0, 4, 128, 4), window=16, max_positions=256),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_families_take_the_schedulers_batches(name):
    """Random traffic: traces are the rungs visited, each listed before, and ``check`` holds."""
    family, given = family_of(name), serving()
    builder = family.builder(SPARSE[name], given)
    assert builder.groups == tuple(g.spec for g in family.groups(SPARSE[name], given))
    traced, visited = [], set()
    listed = {d.bucket for d in builder.rungs()}
    run = random_traffic.program(builder, traced)
    for plan in random_traffic.steps(builder, 200, seed=3):
        host = random_traffic.host_of(plan)
        decision = builder.decide(host)
        bucket = decision.common_bucket
        tables = random_traffic.tables_of(plan, builder, decision)
        check_host(host, bucket=bucket, groups=builder.groups, page_tables=tables)
        meta = run(pack((host.padded_arrays(bucket), tables, decision)))
        check(meta, page=random_traffic.PAGE)
        random_traffic.check_counts(meta, host)
        visited.add(decision.bucket)
    assert len(traced) == len(set(traced))
    assert set(traced) == visited <= listed


@pytest.mark.parametrize("name", SPARSE)
def test_caches_of_sparse_families(name):
    """One stack for each group, of the record that it says, as many bytes as it says."""
    for format, plain in (("bf16", True), ("fp8_e4m3", False)):
        for group in family_of(name).groups(SPARSE[name], serving(cache_format=format)):
            cache = group.alloc(5, Placement.of(None))
            elements = plain or group.ring  # open groups are float32 whatever is asked for
            assert isinstance(cache, LatentCache if elements else RecordCache)
            assert cache.pages.nbytes == 5 * group.page_bytes
            assert (cache.layers, cache.num_pages, cache.page) == (group.layers, 5, group.page)


def test_pages_at_real_sizes():
    """Of 64 tokens; a page of any compressed group covers 256."""
    given = serving(page=64, cache_format="fp8_e4m3")
    v32, glm, v4 = (family_of(n).groups(c, given) for n, c in SPARSE.items())
    for groups, selecting in ((v32, 2), (glm, 1)):
        assert [
            (g.name, g.layers, g.tokens, g.page_bytes // g.layers // g.page) for g in groups
        ] == [
            ("latent", 2, 64, 656),
            ("index_keys", selecting, 64, 132),
        ]
    small = dataclasses.replace(V32, dims=dataclasses.replace(V32.dims, rank=64))
    with pytest.raises(EngineError, match=r"fp8_e4m3: widths: given .*: 64.*allowed.*: 512"):
        family_of("deepseek_v32").groups(small, given)
    assert [(g.name, g.layers, g.tokens) for g in v4 if not g.ring] == [
        ("window", 4, 64),
        ("states_4", 2, 256),
        ("states_128", 1, 256),
        ("index_keys", 2, 256),
    ]
    # What waits of an open group, as vLLM stores it: 80 and 512 KiB a layer and request.
    kept = [(g.name, g.page, g.page_bytes // g.layers) for g in v4 if g.ring]
    assert kept == [("open_4", 8, 80 * 1024), ("open_128", 128, 512 * 1024)]
    counts = {"requests": 8, "chunk": 512}
    pages = {g.name: g.pages_for(2**20, **counts) for g in v4}
    assert pages["states_4"] == pages["states_128"] == pages["index_keys"] == 2**20 // 256
    assert (pages["window"], pages["open_4"], pages["open_128"]) == (8 * 4 + 8, 8, 8)
    assert cdiv(v4[0].page_bytes, v4[0].layers * 64) == 585  # 584, and the page's padding


def test_what_no_family_reads_is_refused():
    with pytest.raises(ConfigError, match="model_type: given 'other'; allowed: deepseek_v2"):
        family_of("other")
    with pytest.raises(ConfigError, match=r"compress_ratios: given \[0, 4, 8\]"):
        V4Config(compress_ratios=(0, 4, 8))
    assert {t for f in FAMILIES for t in f.model_types} >= set(SPARSE)
