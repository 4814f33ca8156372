"""Public functions: what they refuse, what they choose, and that they live under jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.cache import LatentCache
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.metadata.mla import DecodeMetadata, PrefillMetadata
from mla_jax.pallas.dense_decode import mosaic as decode_kernel
from mla_jax.pallas.dense_prefill import mosaic as prefill_kernel
from mla_jax.pallas.device import DeviceInfo
from mla_jax.types import AttnState
from tests.cases import TINY, V2_LITE, decode_case, prefill_case
from tests.compare import same_bits

H200 = DeviceInfo(
    platform="gpu", kind="NVIDIA H200", sm=90, sms=132, shared_memory=232448, l2=50 << 20
)


def zeros(*shape, dtype="bfloat16"):
    return jnp.zeros(shape, dtype)


CACHE = {"num_pages": 2, "page": 4, "rank": 16, "rope": 4}
META = {
    "max_query_len": 1, "page_table": (2, 3), "seq_lens": (2,), "query_starts": (3,),
}  # fmt: skip
STARTS = {"query_starts": (3,), "key_starts": (3,)}


def meta(cls, **sizes):
    return cls(
        **{k: v if isinstance(v, int) else zeros(*v, dtype="int32") for k, v in sizes.items()}
    )


def decode(q_latent=(2, 3, 16), q_rope=(2, 3, 4), dtype="bfloat16", change=None, **kwargs):
    cache = LatentCache.alloc(**CACHE)
    m = meta(DecodeMetadata, **(META | (change or {})))
    q = zeros(*q_latent, dtype=dtype), zeros(*q_rope)
    return ops.mla_decode(*q, cache, m, **({"scale": 1.0} | kwargs))


def prefill(q=(4, 3, 12), kv=(5, 3, 14), k_rope=(5, 4), change=None, **kwargs):
    m = meta(PrefillMetadata, **(STARTS | (change or {})))
    args = zeros(*q), zeros(*kv), zeros(*k_rope), m
    return ops.mla_prefill(*args, **({"scale": 1.0} | kwargs))


def write(kv=(5, 16), kr=(5, 4), slots=(5,), kind="int32"):
    cache = LatentCache.alloc(**CACHE)
    return ops.write_latent(cache, zeros(*kv), zeros(*kr), zeros(*slots, dtype=kind))


def gather(dtype="bfloat16", rows=4, starts=(3,)):
    index = [zeros(*s, dtype="int32") for s in ((2, 3), (2,), starts)]
    return ops.gather_latent(LatentCache.alloc(**CACHE), *index, rows=rows, dtype=dtype)


def merge(*shapes):
    return ops.merge_attn_states(
        *(AttnState(out=zeros(*s), lse=zeros(*s[:2], dtype="float32")) for s in shapes)
    )


def swap():
    src, dst = LatentCache.alloc(**CACHE), LatentCache.alloc(**(CACHE | {"format": "fp32"}))
    return ops.swap_blocks(src, dst, zeros(1, 2, dtype="int32"))


REFUSED = [
    (lambda: decode(q_latent=(2, 3, 8)),
     "mla_decode: q_latent of shape (2, 3, 8): given rank=8; allowed: rank=16"),
    (lambda: decode(q_rope=(2, 2, 4)), "given heads=2; allowed: heads=3"),
    (lambda: decode(q_rope=(2, 4)), "q_rope: given shape (2, 4); allowed: [tokens, heads, rope]"),
    (lambda: decode(dtype="float32"), "q_latent float32, q_rope bfloat16; allowed: one dtype"),
    (lambda: decode(dtype="float8_e4m3fn"), "allowed: bfloat16, float16, float32"),
    (lambda: decode(out_dtype="int8"), "mla_decode: out_dtype: given dtype int8"),
    (lambda: decode(change={"seq_lens": (3,)}), "given requests=3; allowed: requests=2"),
    (lambda: decode(change={"query_starts": (2,)}), "given requests=1; allowed: requests=2"),
    (lambda: decode(change={"max_query_len": 0}), "max_query_len: given 0; allowed: a static"),
    (lambda: decode(scale=jnp.float32(1)), "allowed: a finite Python number. It is static"),
    (lambda: decode(scale=float("nan")), "mla_decode: scale: given nan"),
    (lambda: decode(tuning=64), "mla_decode[xla]: tuning: given 64; allowed: None"),
    (lambda: prefill(q=(4, 3, 3)), "mla_prefill: widths: given q 3, k_rope 4, kv 14"),
    (lambda: prefill(kv=(5, 3, 8)), "Pass kv as the up-projection leaves it"),
    (lambda: prefill(k_rope=(6, 4)), "given keys=6; allowed: keys=5"),
    (lambda: prefill(change={"key_starts": (4,)}), "given requests=3; allowed: requests=2"),
    (lambda: prefill(causal=1), "mla_prefill: causal: given 1 (int); allowed: True or False"),
    (lambda: write(kv=(4, 16)), "write_latent: rows of kv_latent: given 4; allowed: at least 5"),
    (lambda: write(kr=(5, 5)), "given rope=5; allowed: rope=4"),
    (lambda: write(kind="float32"), "slots: given dtype float32; allowed: an integer dtype"),
    (lambda: gather(dtype="float8_e4m3fn"), "gather_latent: dtype: given dtype float8_e4m3fn"),
    (lambda: gather(rows=-1), "gather_latent: rows: given -1"),
    (lambda: gather(starts=(2,)), "given requests=1; allowed: requests=2"),
    (lambda: merge(), "merge_attn_states: states: given none; allowed: one or more"),
    (lambda: merge((2, 3, 4), (2, 3, 5)), "states[1].out of shape (2, 3, 5): given dim=5"),
    (swap, "swap_blocks: src: given {'cache': 'bf16'"),
    (lambda: ops.copy_blocks(LatentCache.alloc(**CACHE), zeros(2, 3, dtype="int32")),
     "copy_blocks: pairs: given shape (2, 3); allowed: [pairs, 2]"),
    (lambda: ops.explain("mla_deocde"), "explain: op: given 'mla_deocde'; allowed: write_latent"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[t for _, t in REFUSED])
def test_refusals_name_what_was_given_and_allowed(call, text, our_errors):
    with pytest.raises(ArgumentError) as refusal:
        call()
    assert text in str(refusal.value)


def test_unknown_backend_lists_the_names(our_errors):
    with pytest.raises(UnsupportedError) as refusal:
        decode(backend="mosiac")
    assert str(refusal.value) == (
        "mla_decode[mosiac]: no backend of this name (registered: mosaic, xla). Would accept: xla."
    )


def test_pages_of_another_dtype_than_the_format(our_errors):
    cache = LatentCache.alloc(**CACHE)
    wrong = LatentCache(
        pages=cache.pages.astype(jnp.float16), scale=cache.scale, rank=16, format=cache.format
    )
    with pytest.raises(ArgumentError, match="given float16; allowed: bfloat16, as format bf16"):
        ops.copy_blocks(wrong, zeros(1, 2, dtype="int32"))


def plan_of(case, backend=None):
    q_latent, _, cache, m = case.args
    tokens, heads, _ = q_latent.shape
    return ops.plan_decode(
        m, cache, tokens=tokens, heads=heads, dtype=q_latent.dtype, backend=backend
    )


def test_a_backend_without_plans(rng, our_errors):
    case = decode_case(rng, seq_lens=[3, 4], page=4)
    assert plan_of(case, "xla") is None
    with pytest.raises(ArgumentError, match=r"mla_decode\[xla\]: plan: given tuple"):
        ops.mla_decode(*case.args, scale=1.0, backend="xla", plan=())


def test_the_plan_of_a_kernel(rng, monkeypatch, our_errors):
    """Made on any device from lengths alone; one of other sizes is refused before any launch."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: H200)
    case = decode_case(rng, dims=V2_LITE, seq_lens=[3, 4], page=16)
    short = decode_case(rng, dims=V2_LITE, seq_lens=[3], page=16)
    plan = plan_of(case, "mosaic")
    assert int(plan.merges[0, 0]) == len(case.args[0]) - 2, "padding alone is listed"
    with pytest.raises(ArgumentError, match=r"mla_decode: plan: given .'tokens': 3"):
        ops.mla_decode(*case.args, scale=1.0, backend="mosaic", plan=plan_of(short, "mosaic"))


def refuse_foreign_decode_plans(case, **changes):
    """The plan of a call that differs in one thing is refused, by name, before any launch."""
    q_latent, _, cache, m = case.args
    tokens, heads, _ = q_latent.shape
    sizes = {"tokens": tokens, "heads": heads, "dtype": q_latent.dtype}
    given = {"meta": m, "cache": cache, "tuning": None, **sizes} | changes
    plan = ops.plan_decode(given.pop("meta"), given.pop("cache"), **given, backend="mosaic")
    with pytest.raises(ArgumentError, match="mla_decode: plan: given") as refusal:
        ops.mla_decode(*case.args, scale=1.0, backend="mosaic", plan=plan)
    return str(refusal.value)


def test_plans_of_another_call_are_refused(rng, monkeypatch, our_errors):
    """The lengths could be equal, and every array as large: another page, width, cut, batch."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: H200)
    case = decode_case(rng, dims=V2_LITE, seq_lens=[3, 4, 20], page=16)
    m = case.args[3]
    other = LatentCache.alloc(num_pages=2, page=32, rank=512, rope=64)
    assert "'page': 32" in refuse_foreign_decode_plans(case, cache=other)
    wider = dataclasses.replace(m, page_table=jnp.pad(m.page_table, ((0, 0), (0, 1))))
    assert "'width': 3" in refuse_foreign_decode_plans(case, meta=wider)
    tuning = decode_kernel.heuristic(16, 1, workers=132)
    for change in ({"batch_invariant": True}, {"batch_invariant": True, "chunk": 2}):
        changed = dataclasses.replace(tuning, **change)
        assert "'chunk'" in refuse_foreign_decode_plans(case, tuning=changed)
    changed = dataclasses.replace(tuning, workers=78)
    assert "'workers': 78}; allowed: {'workers': 132}" in refuse_foreign_decode_plans(
        case, tuning=changed
    )
    fewer = DecodeMetadata(
        max_query_len=1, page_table=m.page_table[:2], seq_lens=m.seq_lens[:2],
        query_starts=m.query_starts[:3],
    )  # fmt: skip
    assert "'requests': 2" in refuse_foreign_decode_plans(case, meta=fewer)
    longer = dataclasses.replace(m, max_query_len=2)
    assert "'max_query_len': 2" in refuse_foreign_decode_plans(case, meta=longer)
    with pytest.raises(ArgumentError, match="plan: given tuple; allowed: a WorkPlan"):
        ops.mla_decode(*case.args, scale=1.0, backend="mosaic", plan=())


def prefill_plan(case, **changes):
    q, kv, k_rope, m = case.args
    sizes = {
        "tokens": q.shape[0], "keys": kv.shape[0], "heads": q.shape[1], "rope": k_rope.shape[1],
        "nope": case.dims.nope, "v": case.dims.v, "dtype": q.dtype,
    }  # fmt: skip
    return ops.plan_prefill(changes.pop("meta", m), **(sizes | changes))


def test_plans_of_prefill(rng, monkeypatch, our_errors):
    """None where there is nothing to plan; the kernel's own is that of the call, or refused."""
    case = prefill_case(rng, dims=V2_LITE, query_lens=[200, 0, 3])
    assert prefill_plan(case, backend="xla") is None
    with pytest.raises(ArgumentError, match=r"mla_prefill\[xla\]: plan: given tuple"):
        ops.mla_prefill(*case.args, scale=1.0, backend="xla", plan=())
    monkeypatch.setattr(DeviceInfo, "current", lambda: H200)
    plan = prefill_plan(case, backend="mosaic")
    assert int(plan.counts[0]) == 3, "tiles with keys: two of the first request, one of the last"
    foreign = (
        ({"tokens": 300}, "'tokens': 300"), ({"keys": 300}, "'keys': 300"),
        ({"causal": False}, "'causal': False"),
        ({"meta": PrefillMetadata(**{k: v[:3] for k, v in vars(case.args[3]).items()})},
         "'requests': 2"),
        ({"tuning": prefill_kernel.Tuning(heads_together=1, block=64, workers=132)}, "'block': 64"),
    )  # fmt: skip
    for changes, text in foreign:
        plan = prefill_plan(case, backend="mosaic", **changes)
        with pytest.raises(ArgumentError, match="mla_prefill: plan: given") as refusal:
            ops.mla_prefill(*case.args, scale=1.0, backend="mosaic", plan=plan)
        assert text in str(refusal.value)
    with pytest.raises(ArgumentError, match="plan: given tuple; allowed: a TilePlan"):
        ops.mla_prefill(*case.args, scale=1.0, backend="mosaic", plan=())


def test_prefill_explains_its_tuning(rng):
    case = prefill_case(rng, dims=V2_LITE, query_lens=[200, 3])
    text = ops.explain("mla_prefill", *case.args, scale=1.0, device=H200, plan=None)
    assert "runs mosaic\n  Tuning(heads_together=" in text and "workers=132" in text
    assert text.endswith("heuristic: nothing near was measured on NVIDIA H200")
    small = dataclasses.replace(H200, kind="NVIDIA H20", sms=78)
    text = ops.explain("mla_prefill", *case.args, scale=1.0, device=small)
    assert "workers=78" in text and "132" not in text


@pytest.mark.parametrize(
    ("device", "block"), [({"shared_memory": 232448}, 128), ({"shared_memory": 163840}, 64)]
)
def test_blocks_are_what_the_devices_shared_memory_holds(device, block):
    """163 KB are an A100's, whose kernels these are not: the size alone counts here."""
    tuning = prefill_kernel.heuristic(
        500, 500, 16, requests=2, nope=128, rope=64, v=128, causal=True,
        device=dataclasses.replace(H200, **device),
    )  # fmt: skip
    assert tuning.block == block


def test_a_tuning_that_does_not_fit_is_refused(rng, monkeypatch, our_errors):
    """From what the kernel allocates, before it is compiled."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: H200)
    case = prefill_case(rng, dims=V2_LITE, query_lens=[200, 3])
    tuning = prefill_kernel.Tuning(heads_together=1, block=128, stages=4, workers=132)
    with pytest.raises(ArgumentError, match="mla_dense_prefill: shared memory of a thread block"):
        ops.mla_prefill(*case.args, scale=1.0, backend="mosaic", tuning=tuning)


def test_explain_takes_shapes(rng):
    """Before any array exists: the arguments may be shapes, the device a named one."""
    case = decode_case(rng, seq_lens=[3, 4], pad_tokens=0, pad_requests=0)
    args = jax.eval_shape(lambda *a: a, *case.args)
    text = ops.explain("mla_decode", *args, scale=1.0)
    assert text.splitlines()[0].startswith(
        "mla_decode(dtype=bfloat16, out=bfloat16, heads=3, cache=bf16, rank=16, rope=4, page=4, "
        "max_query_len=1, tokens=2, requests=2, width=1)"
    )
    assert text.splitlines()[-1] == "runs xla"


def test_tracing_once_per_problem(rng):
    """Lengths and tables are arrays: other values, same program; and donation reuses the pages."""
    traces = []

    @jax.jit
    def step(q_latent, q_rope, cache, m):
        traces.append(1)
        return ops.mla_decode(q_latent, q_rope, cache, m, scale=1.0)

    case = decode_case(rng, seq_lens=[3, 4], page=4)
    *arrays, m = case.args
    step(*arrays, m)
    step(*arrays, jax.tree.map(jnp.zeros_like, m))
    assert len(traces) == 1

    cache = LatentCache.alloc(**CACHE)
    write = jax.jit(ops.write_latent, donate_argnums=0)
    kv, kr = zeros(1, 16), zeros(1, 4)
    text = write.lower(cache, kv, kr, zeros(1, dtype="int32")).compile().as_text()
    assert "input_output_alias" in text


def test_int64_metadata_is_not_needed_but_any_integer_is_taken(rng):
    case = prefill_case(rng, query_lens=[3, 2], pad=0, dtype="float32")
    *arrays, m = case.args
    short = jax.tree.map(lambda x: x.astype(jnp.int16), m)
    a, b = (ops.mla_prefill(*arrays, x, scale=case.scale) for x in (m, short))
    np.testing.assert_array_equal(a.out, b.out)
    assert a.out.shape == (5, TINY.heads, TINY.v)


def rows_written(slots, **more):
    cache = LatentCache.alloc(**CACHE)
    data = zeros(len(slots), 16) + 1, zeros(len(slots), 4) + 1
    pages = ops.write_latent(cache, *data, slots, **more).pages
    return np.flatnonzero(np.asarray(pages).reshape(-1, 20).astype(np.float32).any(axis=1))


@pytest.mark.parametrize("x64", [False, True])
def test_a_slot_in_64_bits_is_no_other_slot_in_32(x64, our_errors):
    """Too large in either direction stores nothing, and small ones are what they say."""
    slots = np.array([2**32 + 1, -(2**32) + 2, 2**31, 2**63 - 1, 5, -(2**31) - 1], np.int64)
    with jax.enable_x64(x64):
        given = jnp.asarray(slots) if x64 else slots
        assert rows_written(given).tolist() == [5]
        unsigned = slots.astype(np.uint64)
        assert rows_written(jnp.asarray(unsigned) if x64 else unsigned).tolist() == [5]
    words = np.array([2**32 - 1, 2**31 + 3, 6], np.uint32)
    assert rows_written(words).tolist() == rows_written(jnp.asarray(words)).tolist() == [6]


def test_metadata_of_numpy_is_taken_everywhere(rng, our_errors):
    """As 64-bit numbers too, which the table's garbage does not fit into 32 bits of."""

    def wide(tree):
        return jax.tree.map(lambda x: np.asarray(x).astype(np.int64), tree)

    case = decode_case(rng, seq_lens=[3, 9], page=4, pad_tokens=0)
    *arrays, m = case.args
    table = np.asarray(m.page_table).astype(np.int64)
    far = np.where(table > 10**9, table + 2**32, table)
    numpy = DecodeMetadata(**{**vars(wide(m)), "page_table": far})
    want = ops.mla_decode(*arrays, m, scale=1.0, backend="xla")
    same_bits(want, ops.mla_decode(*arrays, numpy, scale=1.0, backend="xla"))
    case = prefill_case(rng, query_lens=[3, 2], pad=0)
    *arrays, m = case.args
    want = ops.mla_prefill(*arrays, m, scale=1.0, backend="xla")
    same_bits(want, ops.mla_prefill(*arrays, wide(m), scale=1.0, backend="xla"))
    pairs = np.array([[0, 1], [2**32, 1]], np.int64)
    cache = LatentCache.alloc(**CACHE)
    ops.copy_blocks(cache, pairs)
    index = [np.zeros(s, np.int64) for s in ((2, 3), (2,), (3,))]
    assert not ops.gather_latent(cache, *index, rows=4, dtype="bfloat16").any()
