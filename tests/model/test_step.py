"""The paged step against whole sequences without a cache."""

import dataclasses
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import dispatch
from mla_jax.metadata.buckets import MLABucket
from mla_jax.metadata.packed import pack
from mla_jax.model.mla import absorb_weights
from mla_jax.model.program_store import source_of
from mla_jax.pallas.dense_decode import xla
from mla_jax.pallas.registry import Backend, Registry
from tests.model import tiny

PAGE = 4
TOKENS = np.random.default_rng(0).integers(0, 64, 45)
DECODE = MLABucket(decodes=4, prefills=0, prefill_tokens=0, pages=12, context_rows=0)
PREFILL = MLABucket(decodes=0, prefills=2, prefill_tokens=32, pages=12, context_rows=8)
MIXED = MLABucket(decodes=2, prefills=2, prefill_tokens=16, pages=12, context_rows=8)


ABSORBED = dataclasses.replace(MIXED, context_rows=0, absorb=3)


def full_logits(model, tokens):
    return np.asarray(model.logits(model.full(jnp.asarray(tokens)[None])))[0]


@pytest.fixture(scope="module")
def small():
    cfg = tiny.config()
    model = tiny.model(cfg)
    return cfg, tiny.step(model, page=PAGE), full_logits(model, TOKENS)


def close(got, want):
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moe", "q_rank"),
    [("greedy", None), ("group_limited_greedy", 12), ("noaux_tc", 12), (None, 12)],
)
def test_absorbed_decode_equals_expanded_prefill(moe, q_rank):
    cfg = tiny.config(
        moe,
        q_rank=q_rank,
        attention_bias=True,
        tied=moe is None,
        layers=2,
        sparse_layers=(False, moe is not None),
    )
    model = tiny.model(cfg)
    want = full_logits(model, TOKENS[:20])
    step, caches = tiny.step(model, page=PAGE), tiny.caches(cfg, num_pages=8, page=PAGE)
    pages = [5, 2, 7, 1, 4]
    out, caches = tiny.run(step, caches, PREFILL, prefills=[(TOKENS[:9], 0, pages)])
    close(out.logits[0], want[8])
    for t in range(9, 20):
        out, caches = tiny.run(step, caches, DECODE, decodes=[([TOKENS[t]], t, pages)])
        close(out.logits[0], want[t])


@pytest.mark.slow
def test_one_plan_serves_all_layers(monkeypatch):
    """Every layer of a step gets the plan that was made once; prefill alone makes none."""
    made, used = [], []

    def run(*args, plan, **kwargs):
        used.append(plan)
        return xla.dense_decode(*args, **kwargs)

    def make(lens, starts, **sizes):
        made.append(lens + 1)
        return made[-1]

    class Planned(Backend):
        plan = staticmethod(make)

    registry = Registry((Planned("mla_decode", "planned", run), *dispatch.REGISTRY.backends))
    monkeypatch.setattr(dispatch, "REGISTRY", registry)
    cfg = tiny.config()
    step, caches = tiny.step(tiny.model(cfg), page=PAGE), tiny.caches(cfg, num_pages=8, page=PAGE)
    _, caches = tiny.run(step, caches, PREFILL, prefills=[(TOKENS[:9], 0, [5, 2, 7])])
    assert not made
    tiny.run(step, caches, DECODE, decodes=[([TOKENS[9]], 9, [5, 2, 7])])
    assert len(made) == 1
    assert len(used) == 2  # the text of a dense layer and that of the expert layers


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[], [1], [16], [7, 8, 31], [15, 16, 17]])
def test_chunked_prefill_equals_whole(small, cuts):
    cfg, step, want = small
    caches = tiny.caches(cfg, num_pages=40, page=PAGE)
    pages = list(np.random.default_rng(1).permutation(12) + 1)
    for lo, hi in zip([0, *cuts], [*cuts, 32], strict=True):
        out, caches = tiny.run(step, caches, PREFILL, prefills=[(TOKENS[lo:hi], lo, pages)])
        close(out.logits[0], want[hi - 1])


def mixed_step(cfg, step, *, fill, swap=False, bucket=MIXED):
    """Two decodes and two prefills in different states, in one step."""
    caches = tiny.caches(cfg, num_pages=40, page=PAGE, fill=fill)
    pages = np.random.default_rng(3).permutation(39)[:36].reshape(4, 9) + 1
    done = [11, 22, 0, 9]
    for i, n in enumerate(done):
        if n:
            _, caches = tiny.run(step, caches, PREFILL, prefills=[(TOKENS[:n], 0, pages[i])])
    decodes = [([TOKENS[done[i]]], done[i], pages[i]) for i in (0, 1)]
    prefills = [(TOKENS[done[i] : done[i] + 7], done[i], pages[i]) for i in (2, 3)]
    if swap:
        decodes, prefills = decodes[::-1], prefills[::-1]
    return tiny.run(step, caches, bucket, decodes, prefills)


def test_mixed_batch_and_its_order(small):
    cfg, step, want = small
    rows = [11, 22, 6, 15]
    out, _ = mixed_step(cfg, step, fill=0.0)
    close(out.logits, want[rows])
    swapped, _ = mixed_step(cfg, step, fill=0.0, swap=True)
    close(swapped.logits, want[[22, 11, 15, 6]])


def test_prefills_over_pages_equal_expanded_ones(small):
    cfg, step, want = small
    out, _ = mixed_step(cfg, step, fill=0.0, bucket=ABSORBED)
    close(out.logits, want[[11, 22, 6, 15]])


@pytest.mark.parametrize("bucket", [MIXED, ABSORBED])
def test_poisoned_cache_changes_no_bit(small, bucket):
    cfg, step, _ = small
    clean, _ = mixed_step(cfg, step, fill=0.0, bucket=bucket)
    dirty, caches = mixed_step(cfg, step, fill=np.nan, bucket=bucket)
    np.testing.assert_array_equal(clean.logits, dirty.logits)
    np.testing.assert_array_equal(clean.read(), dirty.read())
    written = ~np.isnan(np.asarray(caches["latent"].pages[0])).any(-1)
    assert written.sum() == 12 + 23 + 7 + 16, "only real tokens write the cache"


def test_one_program_per_bucket_whatever_the_batch(small):
    cfg, _, _ = small
    step = tiny.step(tiny.model(cfg), page=PAGE)
    caches = tiny.caches(cfg, num_pages=40, page=PAGE)
    for n in (1, 5, 17, 32):
        _, caches = tiny.run(step, caches, PREFILL, prefills=[(TOKENS[:n], 0, range(1, 13))])
    assert step.compiled == 1


def test_what_the_next_step_takes_is_updated_in_place(small):
    cfg, step, _ = small
    caches = tiny.caches(cfg, num_pages=40, page=PAGE)
    packed = pack(tiny.batch(DECODE, [([1], 0, [1])], []))
    text = step.compile(packed.layout, caches).as_text().splitlines()[0]
    assert text.count("may-alias") + text.count("must-alias") == 2 + 3 + 1
    # Pages and their scales; counts, bias and logits of the token history; tokens.


@pytest.mark.slow
def test_a_stored_program_is_the_program(small, tmp_path):
    """A second process neither traces nor compiles, and gives the same bits.

    Also where JAX's persistent cache, which the suite has, holds the program already.
    """
    cfg, _, want = small
    model = tiny.model(cfg)
    given = {"prefills": [(TOKENS[:9], 0, [5, 2, 7])]}

    def run(store=(tmp_path, ("facts",))):
        step = tiny.step(model, page=PAGE, store=store)
        traced = []
        step._body = lambda *args, body=step._body: traced.append(1) or body(*args)
        out, _ = tiny.run(step, tiny.caches(cfg, num_pages=8, page=PAGE), PREFILL, **given)
        return out, len(traced)

    run(store=None)
    (first, traced), (again, none) = run(), run()
    assert (traced, none) == (1, 0)
    close(first.logits[0], want[8])
    np.testing.assert_array_equal(first.logits, again.logits)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    cut, traced = run()
    assert traced == 1, "half a file is no program"
    np.testing.assert_array_equal(first.logits, cut.logits)


@pytest.mark.slow
def test_weights_taken_anew_are_served_with_all_that_follows_from_them():
    """The absorbed form of a changed up-projection is never stale."""
    cfg = tiny.config()
    model, other = tiny.model(cfg), tiny.model(cfg, seed=1)
    step = tiny.step(model, page=PAGE)
    step.take(other)
    caches = tiny.caches(cfg, num_pages=8, page=PAGE)
    _, caches = tiny.run(step, caches, PREFILL, prefills=[(TOKENS[:9], 0, [5, 2, 7])])
    out, _ = tiny.run(step, caches, DECODE, decodes=[([TOKENS[9]], 9, [5, 2, 7])])
    close(out.logits[0], full_logits(other, TOKENS[:10])[9])
    assert step.compiled == 2


def test_absorbed_weights_are_the_two_halves():
    kv_up = jax.random.normal(jax.random.key(0), (16, 4, 14), jnp.float32)
    k, v = absorb_weights(kv_up, nope=8)
    np.testing.assert_array_equal(k, np.einsum("rhd->hdr", kv_up[..., :8]))
    np.testing.assert_array_equal(v, np.einsum("rhd->hrd", kv_up[..., 8:]))


def test_a_program_follows_from_code_outside_of_the_package(tmp_path):
    """Two models of one name whose files differ have programs of their own."""

    def kind(path, text):
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("outside", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    with pytest.MonkeyPatch.context() as patch:
        sources = []
        for name, text in (("a.py", "class Toy: x = 1\n"), ("b.py", "class Toy: x = 2\n")):
            patch.setitem(sys.modules, "outside", kind(tmp_path / name, text))
            sources.append(source_of(sys.modules["outside"].Toy))
    assert sources == ["class Toy: x = 1\n", "class Toy: x = 2\n"]
    assert source_of(tiny.Step) == "Step"  # of this package: its digest covers it
