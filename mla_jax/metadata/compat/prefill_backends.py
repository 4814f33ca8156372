"""Prefill backends of the one registry of operations, in the shape that upstream gives them.

What a backend takes is asked of its requirement in ``ops.REGISTRY``, and nothing is said twice:
names, order of preference and reasons are the registry's.

``k`` of this interface has its rotary part expanded. Latent attention has one rotary key for all
heads, so a kernel that reads it once takes it from the first head.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from mla_jax import ops
from mla_jax.metadata.compat.prefill_backend import (
    DeviceCapability,
    MLAPrefillBackend,
    MLAPrefillImpl,
    MLAPrefillSelectorConfig,
)
from mla_jax.metadata.compat.prefill_selection import PrefillRegistry, Priority
from mla_jax.metadata.mla import PrefillMetadata
from mla_jax.pallas.arguments import ACTIVATIONS
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Backend, Problem
from mla_jax.types import Array, AttnState, Float

__all__ = [
    "PREFILL_BACKENDS",
    "MosaicPrefillBackend",
    "MosaicPrefillImpl",
    "RegisteredBackend",
    "XLAPrefillBackend",
    "XLAPrefillImpl",
]

OP = "mla_prefill"
"""The operation's name in the registry, its matrix, its refusals, and ours."""


class RegisteredBackend(MLAPrefillBackend):
    """A backend of the registry: its requirement says what it takes."""

    kernel: ClassVar[str]  # its name there

    @classmethod
    def get_name(cls) -> str:
        return cls.kernel

    @classmethod
    def is_available(cls) -> bool:
        """Whether it is registered."""
        return cls._registered() is not None

    @classmethod
    def _registered(cls) -> Backend | None:
        return next((b for b in ops.REGISTRY.of(OP) if b.name == cls.kernel), None)

    @classmethod
    def validate_configuration(
        cls, capability: DeviceCapability | None, config: MLAPrefillSelectorConfig
    ) -> list[str]:
        """What the registry says against it, and features that no backend of ours has."""
        reasons = []
        if config.dtype not in ACTIVATIONS:
            reasons.append(f"dtype={config.dtype} not in {{{', '.join(ACTIVATIONS)}}}")
        found = cls._registered()
        if found is None:
            names = ", ".join(b.name for b in ops.REGISTRY.of(OP)) or "none"
            reasons.append(f"no backend of this name (registered: {names})")
        else:
            said = found.requirement.missing(_problem(config), _device(capability))
            reasons += [r for r in said if not (reasons and r.startswith("dtype="))]
        return reasons + cls.missing_features(config)


def _problem(config: MLAPrefillSelectorConfig) -> Problem:
    """A prefill of such a model, of any size."""
    nope, rope, v = config.mla_dimensions
    return Problem.of(
        OP,
        dtype=config.dtype,
        out=config.dtype,
        heads=16,
        nope=nope,
        rope=rope,
        v=v,
        causal=True,
        tokens=1,
        keys=1,
        requests=1,
    )


def _device(capability: DeviceCapability | None) -> DeviceInfo:
    if capability is None:
        return DeviceInfo(platform="cpu", kind="unknown", sm=0)
    return DeviceInfo(
        platform="gpu", kind="any", sm=10 * capability.major + capability.minor, sms=1
    )


@dataclass(frozen=True, kw_only=True)
class XLAPrefillImpl(MLAPrefillImpl):
    """The reference: ``ops.mla_prefill`` with every key expanded, its rotary part included."""

    requires_v_padding: ClassVar[bool] = False

    def attend(
        self, q: Float[Array, "tokens heads qk"], k: Float[Array, "keys heads qk"],
        v: Float[Array, "keys heads vpad"], meta: PrefillMetadata, *, causal: bool,
    ) -> AttnState:  # fmt: skip
        kv = jnp.concatenate([k, v], axis=-1)
        shared = jnp.zeros((k.shape[0], 0), k.dtype)
        return ops.mla_prefill(q, kv, shared, meta, scale=self.scale, causal=causal, backend="xla")


class XLAPrefillBackend(RegisteredBackend):
    """Any device, any head widths."""

    kernel = "xla"

    @classmethod
    def get_prefill_impl_cls(cls) -> type[MLAPrefillImpl]:
        return XLAPrefillImpl


@dataclass(frozen=True, kw_only=True)
class MosaicPrefillImpl(MLAPrefillImpl):
    """The Hopper kernel: nope keys and values side by side, the rotary key of one head."""

    requires_v_padding: ClassVar[bool] = False
    kernel: ClassVar[str] = "mosaic"  # backend of ``ops.mla_prefill``

    def attend(
        self, q: Float[Array, "tokens heads qk"], k: Float[Array, "keys heads qk"],
        v: Float[Array, "keys heads vpad"], meta: PrefillMetadata, *, causal: bool,
    ) -> AttnState:  # fmt: skip
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


class MosaicPrefillBackend(RegisteredBackend):
    """The Hopper kernel."""

    kernel = MosaicPrefillImpl.kernel
    supported_features: ClassVar[frozenset[str]] = frozenset({"deterministic"})

    @classmethod
    def get_prefill_impl_cls(cls) -> type[MLAPrefillImpl]:
        return MosaicPrefillImpl


_CLASSES = (MosaicPrefillBackend, XLAPrefillBackend)

PREFILL_BACKENDS = PrefillRegistry(
    op=OP,
    order=(Priority(names=tuple(b.name for b in ops.REGISTRY.of(OP))),),
    paths={c.kernel: f"{__name__}.{c.__name__}" for c in _CLASSES},
)
