"""The interface of expanded-prefill backends: what one can do, and how it is called.

``MLAPrefillBackend`` is a class of data and hooks without state, ``MLAPrefillImpl`` one layer's
attention, ``MLAPrefillLifecycle`` the order in which a metadata builder calls the hooks.
``prefill_selection`` chooses among backends; implementations live above this package.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mla_jax.cache import CacheFormat
from mla_jax.config import MLADims
from mla_jax.errors import ArgumentError, ConfigError
from mla_jax.metadata.mla import ContextMetadata, MLAMetadata, PrefillMetadata
from mla_jax.types import Array, AttnState, Float, Int

__all__ = [
    "FEATURES",
    "DeviceCapability",
    "MLAAttentionMetadata",
    "MLAPrefillBackend",
    "MLAPrefillBuilderState",
    "MLAPrefillImpl",
    "MLAPrefillLifecycle",
    "MLAPrefillMetadata",
    "MLAPrefillSelectorConfig",
]

FEATURES = (
    "deterministic",
    "batch_invariant",
    "sliding_window",
    "soft_cap",
    "attention_sink",
    "fp8_query",
)
"""What a model or a user may ask for beyond plain attention."""


class DeviceCapability(NamedTuple):
    """Compute capability of a CUDA device."""

    major: int
    minor: int

    @classmethod
    def of_sm(cls, sm: int) -> "DeviceCapability | None":
        """``90`` is 9.0, ``100`` is 10.0; None for 0, which is no CUDA device."""
        return cls(*divmod(sm, 10)) if sm else None

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, kw_only=True)
class MLAPrefillSelectorConfig:
    """What selection depends on besides the device. Hashable."""

    dtype: str  # of queries, keys and values
    mla_dimensions: tuple[int, int, int]  # per head: nope, rope, v
    features: frozenset[str] = frozenset()  # of FEATURES

    def __post_init__(self):
        if unknown := self.features - set(FEATURES):
            raise ArgumentError("features of a prefill", sorted(unknown), ", ".join(FEATURES))

    @classmethod
    def of(
        cls, dims: MLADims, dtype: DTypeLike, features: Iterable[str] = ()
    ) -> "MLAPrefillSelectorConfig":
        """The configuration of a model."""
        widths = (dims.nope, dims.rope, dims.v)
        name = jnp.dtype(dtype).name
        return cls(dtype=name, mla_dimensions=widths, features=frozenset(features))

    @property
    def is_r1_compatible(self) -> bool:
        """Head widths of DeepSeek V2, V3 and R1."""
        return self.mla_dimensions == (128, 64, 128)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MLAPrefillMetadata:
    """The prefill part of a step. A backend may return a subtype from its hook."""

    new: PrefillMetadata  # new tokens among themselves; queries and keys start alike
    context: ContextMetadata | None  # cached context in chunks; None = no prefill has any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MLAAttentionMetadata:
    """A step with its prefill part in the form that the backend wants."""

    common: MLAMetadata
    prefill: MLAPrefillMetadata | None  # None iff the bucket has no prefills


@dataclass(kw_only=True)
class MLAPrefillBuilderState:
    """What a backend keeps between steps: static plans and callables by shape, never arrays."""

    workspace_rows: int | None = None  # rows the backend wants reserved; None = none
    plans: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MLAPrefillImpl(ABC):
    """Expanded attention of one layer, ``softmax(scale * q k^T) v``."""

    dims: MLADims
    scale: float
    requires_v_padding: ClassVar[bool] = True  # values as wide as keys; zeros, cut off again

    def __post_init__(self):
        if self.requires_v_padding and self.dims.v > self.dims.qk:
            raise ConfigError("MLADims.v", self.dims.v, f"at most {self.dims.qk}, the key width")

    @abstractmethod
    def attend(
        self, q: Float[Array, "tokens heads qk"], k: Float[Array, "keys heads qk"],
        v: Float[Array, "keys heads vpad"], meta: PrefillMetadata, *, causal: bool,
    ) -> AttnState:  # fmt: skip
        """Ragged attention; a query without keys gives the identity ``(0, -inf)``."""

    @overload
    def run_prefill_new_tokens(
        self, pm: MLAPrefillMetadata, q: Array, k: Array, v: Array, return_lse: Literal[False]
    ) -> Array: ...
    @overload
    def run_prefill_new_tokens(
        self, pm: MLAPrefillMetadata, q: Array, k: Array, v: Array, return_lse: Literal[True]
    ) -> tuple[Array, Array]: ...
    def run_prefill_new_tokens(
        self,
        pm: MLAPrefillMetadata,
        q: Float[Array, "tokens heads qk"],
        k: Float[Array, "tokens heads qk"],
        v: Float[Array, "tokens heads v"],
        return_lse: bool,
    ) -> (
        Float[Array, "tokens heads v"]
        | tuple[Float[Array, "tokens heads v"], Float[Array, "heads tokens"]]
    ):
        """Causal attention of each request's new tokens; ``lse`` is heads first, natural log."""
        out, lse = self._run(q, k, v, pm.new, causal=True)
        return (out, lse) if return_lse else out

    def run_prefill_context_chunk(
        self,
        pm: MLAPrefillMetadata,
        chunk_idx: Int[Array, ""] | int,
        q: Float[Array, "tokens heads qk"],
        k: Float[Array, "keys heads qk"],
        v: Float[Array, "keys heads v"],
    ) -> tuple[Float[Array, "tokens heads v"], Float[Array, "heads tokens"]]:
        """All queries over one chunk of cached context: no mask, every key precedes them."""
        if pm.context is None:
            raise ArgumentError(
                "run_prefill_context_chunk: pm.context", None, "the context of a step that has some"
            )
        return self._run(q, k, v, pm.context.chunk(jnp.int32(chunk_idx))[1], causal=False)

    def _run(self, q, k, v, meta: PrefillMetadata, *, causal: bool) -> tuple[Array, Array]:
        if self.requires_v_padding:
            v = jnp.pad(v, ((0, 0), (0, 0), (0, self.dims.qk - self.dims.v)))
        state = self.attend(q, k, v, meta, causal=causal)
        return state.out[..., : self.dims.v], state.lse.T


class MLAPrefillBackend(ABC):
    """Capabilities as class data, and the hooks of a metadata builder. Never instantiated."""

    supported_dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    supported_majors: ClassVar[tuple[int, ...]] = ()  # compute capabilities; empty = any device
    supported_dims: ClassVar[tuple[tuple[int, int, int], ...]] = ()  # empty = any
    supported_features: ClassVar[frozenset[str]] = frozenset()
    packages: ClassVar[dict[str, str]] = {}  # import name → how to install it

    @classmethod
    @abstractmethod
    def get_name(cls) -> str:
        """A stable identifier."""

    @classmethod
    @abstractmethod
    def get_prefill_impl_cls(cls) -> type[MLAPrefillImpl]:
        """What runs a layer."""

    @classmethod
    def get_prefill_metadata_cls(cls) -> type[MLAPrefillMetadata]:
        """What ``post_process_prefill_metadata`` returns."""
        return MLAPrefillMetadata

    @classmethod
    def get_chunked_context_metadata_cls(cls) -> type[ContextMetadata]:
        """The type of its ``context``."""
        return ContextMetadata

    @classmethod
    def supports_dtype(cls, dtype: DTypeLike) -> bool:
        return jnp.dtype(dtype).name in cls.supported_dtypes

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        """``None``: the device has none, or it is unknown."""
        return not cls.supported_majors or (
            capability is not None and capability.major in cls.supported_majors
        )

    @classmethod
    def is_available(cls) -> bool:
        """Whether its libraries are installed."""
        return not cls._missing_packages()

    @classmethod
    def validate_configuration(
        cls, capability: DeviceCapability | None, config: MLAPrefillSelectorConfig
    ) -> list[str]:
        """Every reason against it at once: capability, dtype, library, widths, features."""
        reasons = []
        if not cls.supports_compute_capability(capability):
            given = "unknown" if capability is None else f"{capability} not supported"
            allowed = ", ".join(f"{m}.x" for m in cls.supported_majors)
            reasons.append(f"compute capability {given}; supported: {allowed or 'see the class'}")
        if not cls.supports_dtype(config.dtype):
            allowed = ", ".join(cls.supported_dtypes)
            reasons.append(f"dtype {config.dtype} not supported; supported: {allowed}")
        if not cls.is_available():
            missing = [
                f"package {p} is not installed ({how})" for p, how in cls._missing_packages()
            ]
            reasons += missing or [f"{cls.get_name()} is not available here"]
        if cls.supported_dims and config.mla_dimensions not in cls.supported_dims:
            allowed = ", ".join(map(str, cls.supported_dims))
            reasons.append(
                f"head dimensions (nope, rope, v) = {config.mla_dimensions} not supported; "
                f"supported: {allowed}"
            )
        return reasons + cls.missing_features(config)

    @classmethod
    def missing_features(cls, config: MLAPrefillSelectorConfig) -> list[str]:
        """A reason for each feature asked for that it has not."""
        wanted = [f for f in FEATURES if f in config.features - cls.supported_features]
        return [f"feature {f} not supported" for f in wanted]

    @classmethod
    def _missing_packages(cls) -> list[tuple[str, str]]:
        return [(p, how) for p, how in cls.packages.items() if not _installed(p)]

    @classmethod
    def create_builder_state(
        cls, dims: MLADims, kv_spec: CacheFormat, layer_names: tuple[str, ...]
    ) -> MLAPrefillBuilderState:
        """Called once per metadata builder."""
        del dims, kv_spec, layer_names
        return MLAPrefillBuilderState()

    @classmethod
    def post_process_prefill_metadata(
        cls, pm: MLAPrefillMetadata, state: MLAPrefillBuilderState
    ) -> MLAPrefillMetadata:
        """After the prefill part is made, before it is attached. Pure."""
        del state
        return pm

    @classmethod
    def finalize_attention_metadata(
        cls, am: MLAAttentionMetadata, state: MLAPrefillBuilderState, dims: MLADims
    ) -> MLAAttentionMetadata:
        """After the whole of a step is made, for plans that need both parts. Pure."""
        del state, dims
        return am


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a parent
        return False


@dataclass(frozen=True, kw_only=True)
class MLAPrefillLifecycle:
    """A backend inside a metadata builder: its state made once, its hooks called in order."""

    backend: type[MLAPrefillBackend]
    dims: MLADims
    state: MLAPrefillBuilderState

    @classmethod
    def start(
        cls,
        backend: type[MLAPrefillBackend],
        *,
        dims: MLADims,
        kv_spec: CacheFormat,
        layer_names: tuple[str, ...],
    ) -> "MLAPrefillLifecycle":
        """For the layers of one builder."""
        state = backend.create_builder_state(dims, kv_spec, layer_names)
        return cls(backend=backend, dims=dims, state=state)

    def impl(self, scale: float) -> MLAPrefillImpl:
        """The attention of one layer."""
        return self.backend.get_prefill_impl_cls()(dims=self.dims, scale=scale)

    def attach(self, common: MLAMetadata) -> MLAAttentionMetadata:
        """Prefill part → post-process → attach → finalize; nothing without prefills. Traceable."""
        if common.prefill is None:
            return MLAAttentionMetadata(common=common, prefill=None)
        pm = MLAPrefillMetadata(new=common.prefill, context=common.context)
        pm = self.backend.post_process_prefill_metadata(pm, self.state)
        kind = self.backend.get_prefill_metadata_cls()
        if not isinstance(pm, kind):
            what = f"{self.backend.get_name()}: result of post_process_prefill_metadata"
            hint = "Return that class, or name another in get_prefill_metadata_cls."
            raise ArgumentError(what, type(pm).__name__, kind.__name__, hint)
        am = MLAAttentionMetadata(common=common, prefill=pm)
        return self.backend.finalize_attention_metadata(am, self.state, self.dims)
