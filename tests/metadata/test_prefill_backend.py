"""Prefill backends: reasons, orders, registry, life of a builder, and the reference's numbers."""

import sys
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import ops
from mla_jax.cache import FORMATS
from mla_jax.config import MLADims
from mla_jax.errors import ArgumentError, ConfigError, PrefillBackendError, UnsupportedError
from mla_jax.metadata.buckets import MLABucket
from mla_jax.metadata.compat.prefill_backend import (
    DeviceCapability,
    MLAPrefillBackend,
    MLAPrefillBuilderState,
    MLAPrefillImpl,
    MLAPrefillLifecycle,
    MLAPrefillMetadata,
    MLAPrefillSelectorConfig,
)
from mla_jax.metadata.compat.prefill_backends import (
    OP,
    PREFILL_BACKENDS,
    MosaicPrefillBackend,
    MosaicPrefillImpl,
    XLAPrefillBackend,
    XLAPrefillImpl,
)
from mla_jax.metadata.compat.prefill_selection import (
    CUSTOM,
    LATER_ORDER,
    SEED_ORDER,
    PrefillRegistry,
    Priority,
)
from mla_jax.metadata.mla import ContextMetadata, PrefillMetadata, build_mla
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Backend, OneOf, Problem, Registry, Requirement
from mla_jax.types import Array, AttnState, Float

SM80, SM90, SM100 = (DeviceCapability(*c) for c in ((8, 0), (9, 0), (10, 0)))
R1, GLM, SMALL = (128, 64, 128), (192, 64, 256), (64, 64, 128)
HERE = __name__


class Plain(MLAPrefillBackend):
    """Any device, half precision."""

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__.upper()

    @classmethod
    def get_prefill_impl_cls(cls) -> type[MLAPrefillImpl]:
        return XLAPrefillImpl


class Blackwell(Plain):
    supported_majors = (10,)
    supported_dims = (R1,)


class BlackwellGLM(Blackwell):
    supported_dims = (R1, GLM)


class Demanding(Blackwell):
    packages: ClassVar = {"no_such_library": "pip install no-such-library"}


def config(dims=R1, dtype="bfloat16", features=()):
    return MLAPrefillSelectorConfig(dtype=dtype, mla_dimensions=dims, features=frozenset(features))


def registry(order=(), **classes: type) -> PrefillRegistry:
    return PrefillRegistry(
        op="mla_prefill",
        order=order,
        paths={n: f"{HERE}.{c.__name__}" for n, c in classes.items()},
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Class paths lead to this very module, whatever pytest calls it."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


# Reasons


def test_four_reasons_at_once_in_order():
    reasons = Demanding.validate_configuration(SM90, config(dims=SMALL, dtype="float32"))
    assert reasons == [
        "compute capability 9.0 not supported; supported: 10.x",
        "dtype float32 not supported; supported: float16, bfloat16",
        "package no_such_library is not installed (pip install no-such-library)",
        "head dimensions (nope, rope, v) = (64, 64, 128) not supported; supported: (128, 64, 128)",
    ]


@pytest.mark.parametrize(
    "candidate, capability, given, words",
    [
        (Plain, None, config(), []),
        (Plain, SM80, config(SMALL), []),
        (Plain, SM90, config(dtype="float32"), ["float32"]),
        (Blackwell, SM100, config(), []),
        (Blackwell, None, config(), ["capability unknown"]),
        (Blackwell, SM90, config(), ["9.0"]),
        (Blackwell, SM100, config(GLM), ["(192, 64, 256)"]),
        (BlackwellGLM, SM100, config(GLM), []),
        (Blackwell, SM80, config(dtype="float32"), ["8.0", "float32"]),
        (Plain, SM90, config(features=["soft_cap", "fp8_query"]), ["soft_cap", "fp8_query"]),
        (XLAPrefillBackend, None, config(SMALL, "float32"), []),
        (XLAPrefillBackend, SM90, config(dtype="float8_e4m3fn"), ["float8_e4m3fn"]),
    ],
)
def test_reasons(candidate, capability, given, words):
    reasons = candidate.validate_configuration(capability, given)
    assert len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))


def test_a_backend_may_say_for_itself_that_it_is_not_available():
    class Absent(Plain):
        @classmethod
        def is_available(cls) -> bool:
            return False

    assert Absent.validate_configuration(SM90, config()) == ["ABSENT is not available here"]


def test_config_is_hashable_and_read_from_a_model():
    dims = MLADims(heads=4, rank=512, nope=128, rope=64, v=128, q_rank=None)
    given = MLAPrefillSelectorConfig.of(dims, jnp.bfloat16)
    assert {given: 1}[config()] == 1
    assert given.is_r1_compatible
    assert not config(GLM).is_r1_compatible
    with pytest.raises(ArgumentError, match=r"telepathy.*sliding_window"):
        config(features=["telepathy"])


def test_capability_of_an_architecture():
    assert [DeviceCapability.of_sm(n) for n in (0, 89, 90, 100)] == [None, (8, 9), SM90, SM100]


# Orders and selection

NAMES = ("FLASH_ATTN", "TRTLLM_RAGGED", "FLASHINFER", "CUDNN", "TOKENSPEED_MLA")


def originals(order):
    """The original's backends by what they ask for."""
    return registry(
        order,
        FLASH_ATTN=Plain,
        TRTLLM_RAGGED=Blackwell if order is SEED_ORDER else BlackwellGLM,
        FLASHINFER=Blackwell,
        CUDNN=Blackwell,
        TOKENSPEED_MLA=Blackwell,
    )


@pytest.mark.parametrize(
    "order, capability, dims, names",
    [
        (SEED_ORDER, SM100, R1, ("TRTLLM_RAGGED", "FLASHINFER", "CUDNN", "FLASH_ATTN")),
        (SEED_ORDER, SM90, R1, ("FLASH_ATTN",)),
        (SEED_ORDER, None, R1, ("FLASH_ATTN",)),
        (LATER_ORDER, SM100, R1, ("FLASH_ATTN", "TRTLLM_RAGGED", "FLASHINFER", "TOKENSPEED_MLA")),
        (LATER_ORDER, SM100, GLM, ("TRTLLM_RAGGED", "FLASH_ATTN", "FLASHINFER", "TOKENSPEED_MLA")),
        (LATER_ORDER, SM90, GLM, ("FLASH_ATTN",)),
    ],
)
def test_orders(order, capability, dims, names):
    backends = originals(order)
    assert backends.ordered(capability, config(dims)) == names
    wanted = getattr(sys.modules[__name__], backends.path(names[0]).rpartition(".")[2])
    assert backends.select(capability, config(dims)) is wanted


def test_the_first_without_reasons_is_taken():
    assert originals(SEED_ORDER).select(SM100, config(SMALL)) is Plain
    late = registry((Priority(names=("ABSENT", "A", "B")),), A=Demanding, B=Plain)
    assert late.select(SM100, config()) is Plain


def test_nothing_qualifies_lists_every_backend_with_its_reasons():
    with pytest.raises(PrefillBackendError) as error:
        originals(SEED_ORDER).select(SM100, config(SMALL, "float32"))
    assert isinstance(error.value, ValueError)
    assert [r.split(":")[0] for r in error.value.reasons] == list(SEED_ORDER[0].names)
    assert str(error.value).count("float32") == 4
    with pytest.raises(PrefillBackendError, match="no backend in the order"):
        registry().select(SM90, config())


def test_a_module_of_a_missing_package_is_a_reason(monkeypatch):
    monkeypatch.setattr(Demanding, "packages", {"no_such_library.part": "pip install it"})
    (reason,) = Demanding.validate_configuration(SM100, config())
    assert "no_such_library.part" in reason


def test_an_explicit_choice_is_that_backend_or_an_error():
    backends = originals(LATER_ORDER)
    assert backends.select(SM100, config(), "FLASHINFER") is Blackwell
    with pytest.raises(PrefillBackendError, match=r"FLASHINFER\]: .*9\.0.*accept: FLASH_ATTN"):
        backends.select(SM90, config(), "FLASHINFER")


def test_a_failed_import_is_a_reason():
    backends = PrefillRegistry(
        op="mla_prefill",
        order=(Priority(names=("A", "B", "C")),),
        paths={"A": "no_such_package.A", "B": f"{HERE}.NoSuchClass", "C": f"{HERE}.Plain"},
    )
    assert backends.select(SM90, config()) is Plain
    assert "no_such_package" in backends.reasons("A", SM90, config())[0]
    assert "NoSuchClass" in backends.reasons("B", SM90, config())[0]


def test_selection_is_cached_until_the_registry_changes(monkeypatch):
    backends = registry((Priority(names=("A",)),), A=Plain, B=Blackwell)
    calls = []
    reasons = backends.reasons
    monkeypatch.setattr(backends, "reasons", lambda *a: calls.append(a) or reasons(*a))
    for _ in range(3):
        assert backends.select(SM100, config()) is Plain
    assert len(calls) == 1
    backends.override("A", backends.path("B"))
    assert backends.select(SM100, config()) is Blackwell
    backends.clear_overrides()
    assert backends.select(SM100, config()) is Plain


# Registry


def test_unknown_names_list_the_valid_ones():
    backends = registry(A=Plain, B=Blackwell)
    for call in (backends.get, backends.path, lambda n: backends.override(n, "x.Y")):
        with pytest.raises(ValueError, match="NOPE; allowed: A, B, CUSTOM"):
            call("NOPE")
    with pytest.raises(ValueError, match="A, B, CUSTOM"):
        backends.select(SM90, config(), "NOPE")


def test_custom_has_no_class_until_registered():
    backends = registry((Priority(names=(CUSTOM, "A")),), A=Blackwell)
    with pytest.raises(ArgumentError, match=r"CUSTOM.*register"):
        backends.select(SM90, config(), CUSTOM)
    assert backends.select(SM100, config()) is Blackwell
    backends.register(CUSTOM, f"{HERE}.Plain")
    assert backends.get(CUSTOM) is Plain
    assert backends.select(SM100, config()) is Plain


@pytest.mark.parametrize("name", ["A", "not an identifier", ""])
def test_bad_registrations(name):
    with pytest.raises(ValueError, match="name of a prefill backend"):
        registry(A=Plain).register(name, f"{HERE}.Plain")


PREFERRED = ops.REGISTRY.of("mla_prefill")[0].name


def with_kernel(monkeypatch, backends, requirement=None):
    """The registry of operations with a Hopper kernel that needs this, or with none."""
    kernels = [Backend(op="mla_prefill", name="mosaic", function=print, requirement=r)
               for r in [requirement] if r is not None]  # fmt: skip
    kept = [b for b in ops.REGISTRY.backends if (b.op, b.name) != ("mla_prefill", "mosaic")]
    monkeypatch.setattr(ops, "REGISTRY", Registry((*kernels, *kept)))
    backends._chosen.clear()


HOPPER = Requirement(
    sm=OneOf(90),
    features={"dtype": OneOf("bfloat16", "float16"), "nope": OneOf(128), "v": OneOf(128)},
)


def test_our_registry(monkeypatch):
    """Hopper has the order of the operation's own registry; nobody else is offered the kernel."""
    assert PREFILL_BACKENDS.names() == ("mosaic", "xla", "CUSTOM")
    with_kernel(monkeypatch, PREFILL_BACKENDS)
    for capability in (None, SM80, SM90, SM100):
        assert PREFILL_BACKENDS.select(capability, config()) is XLAPrefillBackend
    with_kernel(monkeypatch, PREFILL_BACKENDS, HOPPER)
    for capability in (None, SM80, SM100):
        assert PREFILL_BACKENDS.select(capability, config()) is XLAPrefillBackend
    first = {"mosaic": MosaicPrefillBackend, "xla": XLAPrefillBackend}[PREFERRED]
    assert PREFILL_BACKENDS.select(SM90, config()) is first
    assert MosaicPrefillBackend.validate_configuration(SM90, config()) == []
    assert PREFILL_BACKENDS.select(SM90, config(SMALL)) is XLAPrefillBackend
    PREFILL_BACKENDS._chosen.clear()


def test_reasons_are_the_registrys(monkeypatch):
    """Names, order and words of the one registry; refusals name its operation."""
    with_kernel(monkeypatch, PREFILL_BACKENDS, HOPPER)
    given = config(SMALL, "float32", features=["soft_cap"])
    problem = Problem.of(OP, dtype="float32", nope=64, rope=64, v=128)
    said = HOPPER.missing(problem, DeviceInfo(platform="gpu", kind="any", sm=80))
    assert len(said) == 3
    reasons = MosaicPrefillBackend.validate_configuration(SM80, given)
    assert reasons == [*said, "feature soft_cap not supported"]
    with pytest.raises(PrefillBackendError) as error:
        PREFILL_BACKENDS.select(SM80, config(SMALL, "float32"), "mosaic")
    with pytest.raises(UnsupportedError) as registrys:
        ops.REGISTRY.choose(problem, DeviceInfo(platform="gpu", kind="any", sm=80), "mosaic")
    assert str(error.value) == str(registrys.value)
    PREFILL_BACKENDS._chosen.clear()


def test_every_reason_against_the_kernel_at_once(monkeypatch):
    with_kernel(monkeypatch, PREFILL_BACKENDS)
    reasons = MosaicPrefillBackend.validate_configuration(
        SM80, config(SMALL, "int8", features=["soft_cap"])
    )
    words = ["dtype=int8 not in", "no backend of this name (registered: xla)", "soft_cap"]
    assert all(w in r for w, r in zip(words, reasons, strict=True))
    PREFILL_BACKENDS._chosen.clear()


# Life in a builder


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Planned(MLAPrefillMetadata):
    longest: Array


class Recording(Plain):
    calls: ClassVar[list[str]] = []

    @classmethod
    def get_prefill_metadata_cls(cls):
        return Planned

    @classmethod
    def create_builder_state(cls, dims, kv_spec, layer_names):
        cls.calls.append(f"create {kv_spec.name} {','.join(layer_names)}")
        return MLAPrefillBuilderState(plans={"heads": dims.heads})

    @classmethod
    def post_process_prefill_metadata(cls, pm, state):
        cls.calls.append(f"post {state.plans['heads']}")
        longest = jnp.max(jnp.diff(pm.new.query_starts))
        return Planned(new=pm.new, context=pm.context, longest=longest)

    @classmethod
    def finalize_attention_metadata(cls, am, state, dims):
        cls.calls.append(f"finalize {am.common.bucket.prefills} {type(am.prefill).__name__}")
        return am


DIMS = MLADims(heads=2, rank=8, nope=4, rope=2, v=3, q_rank=None)


def step(*, decodes=1, prefills=2):
    lens = np.array([1] * decodes + [3, 2, 4][:prefills] + [0], np.int32)
    bucket = MLABucket(
        decodes=decodes, prefills=prefills + bool(prefills), prefill_tokens=16 * bool(prefills),
        pages=4, context_rows=8 * bool(prefills),
    )  # fmt: skip
    lens = np.pad(lens, (0, 8))[: bucket.requests]
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    seq = np.where(lens > 0, lens + np.arange(len(lens)) * 5, 0).astype(np.int32)
    table = np.arange(bucket.requests * 4, dtype=np.int32).reshape(-1, 4)
    return build_mla(
        *map(jnp.asarray, (starts, seq, table)), jnp.int32(decodes), bucket=bucket, page=8
    )


def start(backend=Recording):
    return MLAPrefillLifecycle.start(
        backend, dims=DIMS, kv_spec=FORMATS["bf16"], layer_names=("0", "1")
    )


def test_hooks_run_in_order_and_the_state_once():
    Recording.calls.clear()
    life = start()
    attach = jax.jit(lambda common: life.attach(common))
    for _ in range(2):
        am = attach(step())
    assert Recording.calls == ["create bf16 0,1", "post 2", "finalize 3 Planned"]
    assert int(am.prefill.longest) == 3
    assert life.attach(step(prefills=0)).prefill is None
    assert len(Recording.calls) == 3


def test_default_hooks_change_nothing():
    common = step()
    am = start(XLAPrefillBackend).attach(common)
    assert am.common is common
    assert am.prefill.new is common.prefill
    assert am.prefill.context is common.context
    assert XLAPrefillBackend.get_chunked_context_metadata_cls() is ContextMetadata


# The implementation


@dataclass(frozen=True, kw_only=True)
class Padded(XLAPrefillImpl):
    """A kernel that wants values as wide as keys."""

    requires_v_padding: ClassVar[bool] = True

    def attend(
        self,
        q: Float[Array, "tokens heads qk"],
        k: Float[Array, "keys heads qk"],
        v: Float[Array, "keys heads qk"],
        meta: PrefillMetadata,
        *,
        causal: bool,
    ) -> AttnState:
        return super().attend(q, k, v, meta, causal=causal)


class Shared(MosaicPrefillImpl):
    """The kernel's reading of its arguments, by the reference."""

    kernel: ClassVar[str] = "xla"


class SharedBackend(Plain):
    @classmethod
    def get_prefill_impl_cls(cls) -> type[MLAPrefillImpl]:
        return Shared


class PaddedBackend(Plain):
    @classmethod
    def get_prefill_impl_cls(cls) -> type[MLAPrefillImpl]:
        return Padded


def oracle(q, k, v, query_starts, key_starts, *, scale, causal):
    """Float64, request by request."""
    tokens, heads, _ = q.shape
    out, lse = np.zeros((tokens, heads, v.shape[-1])), np.full((heads, tokens), -np.inf)
    for r in range(len(query_starts) - 1):
        a, b, c, d = *query_starts[r : r + 2], *key_starts[r : r + 2]
        for t in range(a, b):
            end = c + (t - a + 1) if causal else d
            if end == c:
                continue
            s = scale * np.einsum("hd,khd->hk", q[t].astype(np.float64), k[c:end])
            m = s.max(axis=1, keepdims=True)
            e = np.exp(s - m)
            lse[:, t] = m[:, 0] + np.log(e.sum(axis=1))
            out[t] = np.einsum("hk,khd->hd", e / e.sum(axis=1, keepdims=True), v[c:end])
    return out, lse


def draw(rng, rows, *, real):
    """Random rows, NaN behind the real ones; the rotary part of keys is one for all heads."""
    q, k, v = (
        rng.standard_normal((rows, DIMS.heads, d)).astype(np.float32)
        for d in (DIMS.qk, DIMS.qk, DIMS.v)
    )
    k[..., DIMS.nope :] = k[:, :1, DIMS.nope :]
    for x in (q, k, v):
        x[real:] = np.nan
    return q, k, v


@pytest.mark.parametrize("kind", [XLAPrefillBackend, SharedBackend, PaddedBackend])
def test_new_tokens(kind, rng):
    life = start(kind)
    pm = life.attach(step()).prefill
    starts = np.asarray(pm.new.query_starts)
    q, k, v = draw(rng, 16, real=starts[-1])
    impl = life.impl(0.4)
    want, want_lse = oracle(q, k, v, starts, starts, scale=0.4, causal=True)
    args = tuple(map(jnp.asarray, (q, k, v)))
    out, lse = impl.run_prefill_new_tokens(pm, *args, True)
    assert (out.shape, lse.shape, lse.dtype) == ((16, 2, 3), (2, 16), jnp.float32)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-6)
    alone = impl.run_prefill_new_tokens(pm, *args, False)
    np.testing.assert_array_equal(alone, out)


@pytest.mark.parametrize("kind", [XLAPrefillBackend, SharedBackend, PaddedBackend])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_context_chunk(kind, chunk, rng):
    """The requests' contexts are 5 and 10 rows, 8 of them in a chunk; the last chunk is empty."""
    life = start(kind)
    pm = life.attach(step()).prefill
    assert int(pm.context.num_chunks()) == 2
    key_starts = np.clip(np.array([0, 5, 15, 15]) - 8 * chunk, 0, 8)
    starts = np.asarray(pm.new.query_starts)
    q, _, _ = draw(rng, 16, real=starts[-1])
    _, k, v = draw(rng, 8, real=key_starts[-1])
    want, want_lse = oracle(q, k, v, starts, key_starts, scale=0.4, causal=False)
    run = jax.jit(life.impl(0.4).run_prefill_context_chunk)
    out, lse = run(pm, jnp.int32(chunk), *map(jnp.asarray, (q, k, v)))
    assert (out.shape, lse.shape, lse.dtype) == ((16, 2, 3), (2, 16), jnp.float32)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-6)


def test_a_chunk_of_no_context_is_refused():
    common = step()
    life = start(XLAPrefillBackend)
    pm = MLAPrefillMetadata(new=life.attach(common).prefill.new, context=None)
    q = jnp.zeros((16, 2, 6))
    with pytest.raises(ArgumentError, match=r"pm\.context"):
        life.impl(1.0).run_prefill_context_chunk(pm, 0, q, q, q[..., :3])


def test_padding_needs_room():
    wide = MLADims(heads=1, rank=8, nope=4, rope=2, v=8, q_rank=None)
    XLAPrefillImpl(dims=wide, scale=1.0)
    with pytest.raises(ConfigError, match=r"v: given 8; allowed: at most 6"):
        Padded(dims=wide, scale=1.0)
