"""Prefill backends of this library, by name. A new one is a class here and a row below.

``k`` of this interface has its rotary part expanded. Latent attention has one rotary key for all
heads, so a kernel that reads it once takes it from the first head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from mla_jax import ops
from mla_jax.metadata.mla import PrefillMetadata
from mla_jax.metadata.prefill_backend import MLAPrefillBackend, MLAPrefillImpl
from mla_jax.metadata.prefill_selection import PrefillRegistry, Priority
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.problems import ACTIVATIONS
from mla_jax.pallas.registry import Problem, Requirement
from mla_jax.types import Array, AttnState, Float

__all__ = [
    "PREFILL_BACKENDS",
    "MosaicPrefillBackend",
    "MosaicPrefillImpl",
    "XLAPrefillBackend",
    "XLAPrefillImpl",
]


@dataclass(frozen=True, kw_only=True)
class XLAPrefillImpl(MLAPrefillImpl):
    """The reference: ``ops.mla_prefill`` with every key expanded, its rotary part included."""

    requires_v_padding: ClassVar[bool] = False

    def attend(
        self,
        q: Float[Array, "tokens heads qk"],
        k: Float[Array, "keys heads qk"],
        v: Float[Array, "keys heads vpad"],
        meta: PrefillMetadata,
        *,
        causal: bool,
    ) -> AttnState:
        kv = jnp.concatenate([k, v], axis=-1)
        shared = jnp.zeros((k.shape[0], 0), k.dtype)
        return ops.mla_prefill(q, kv, shared, meta, scale=self.scale, causal=causal, backend="xla")


class XLAPrefillBackend(MLAPrefillBackend):
    """Any device, any head widths."""

    supported_dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32")

    @classmethod
    def get_name(cls) -> str:
        return "XLA"

    @classmethod
    def get_prefill_impl_cls(cls) -> type[MLAPrefillImpl]:
        return XLAPrefillImpl


WIDTHS = ((128, 64, 128), (192, 64, 256))
"""(nope, rope, v) of a head: DeepSeek V2 to R1 and Kimi; GLM."""


def _requirement() -> Requirement | None:
    """What the kernel needs; None where it is not registered."""
    known = {b.name: b.requirement for b in ops.REGISTRY.of("dense_prefill")}
    return known.get(MosaicPrefillImpl.kernel)


def _accepted(*, dtype: Sequence[str] = (), dims: Sequence[tuple] = ()) -> tuple:
    """Those of the dtypes, or of the widths, with which the kernel takes a prefill."""
    requirement = _requirement()
    if requirement is None:
        return (*dtype, *dims)
    device = DeviceInfo(platform="gpu", kind="any Hopper", sm=90, sms=1)

    def takes(dtype: str, widths: tuple[int, int, int]) -> bool:
        sizes = dict(zip(("nope", "rope", "v"), widths, strict=True))
        counts = dict(heads=16, tokens=1, keys=1, requests=1)
        given = dict(dtype=dtype, out=dtype, causal=True) | sizes | counts
        return not requirement.missing(Problem.of("dense_prefill", **given), device)

    return (
        *(d for d in dtype if any(takes(d, w) for w in WIDTHS)),
        *(w for w in dims if any(takes(d, w) for d in ACTIVATIONS)),
    )


@dataclass(frozen=True, kw_only=True)
class MosaicPrefillImpl(MLAPrefillImpl):
    """The Hopper kernel: nope keys and values side by side, the rotary key of one head."""

    requires_v_padding: ClassVar[bool] = False
    kernel: ClassVar[str] = "mosaic"  # backend of ``ops.mla_prefill``

    def attend(
        self,
        q: Float[Array, "tokens heads qk"],
        k: Float[Array, "keys heads qk"],
        v: Float[Array, "keys heads vpad"],
        meta: PrefillMetadata,
        *,
        causal: bool,
    ) -> AttnState:
        nope = self.dims.nope
        kv = jnp.concatenate([k[..., :nope], v], axis=-1)
        return ops.mla_prefill(
            q,
            kv,
            k[:, 0, nope:],
            meta,
            scale=self.scale,
            causal=causal,
            backend=self.kernel,
        )


class MosaicPrefillBackend(MLAPrefillBackend):
    """The Hopper kernel, for what the registry of operations says that it takes."""

    supported_dtypes: ClassVar[tuple[str, ...]] = _accepted(dtype=ACTIVATIONS)
    supported_majors: ClassVar[tuple[int, ...]] = (9,)
    supported_dims: ClassVar[tuple[tuple[int, int, int], ...]] = _accepted(dims=WIDTHS)
    supported_features: ClassVar[frozenset[str]] = frozenset({"deterministic"})

    @classmethod
    def get_name(cls) -> str:
        return "MOSAIC"

    @classmethod
    def get_prefill_impl_cls(cls) -> type[MLAPrefillImpl]:
        return MosaicPrefillImpl

    @classmethod
    def is_available(cls) -> bool:
        """Whether the kernel is registered."""
        return _requirement() is not None


PREFILL_BACKENDS = PrefillRegistry(
    order=(
        Priority(major=9, names=tuple(b.name.upper() for b in ops.REGISTRY.of("dense_prefill"))),
        Priority(names=("XLA",)),
    ),
    paths={
        "MOSAIC": f"{__name__}.{MosaicPrefillBackend.__name__}",
        "XLA": f"{__name__}.{XLAPrefillBackend.__name__}",
    },
)
