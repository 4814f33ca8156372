"""Prefill backends of this library, by name. A new one is a class here and a row below."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from mla_jax import ops
from mla_jax.metadata.mla import PrefillMetadata
from mla_jax.metadata.prefill_backend import MLAPrefillBackend, MLAPrefillImpl
from mla_jax.metadata.prefill_selection import PrefillRegistry, Priority
from mla_jax.types import Array, AttnState, Float

__all__ = ["PREFILL_BACKENDS", "XLAPrefillBackend", "XLAPrefillImpl"]


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


PREFILL_BACKENDS = PrefillRegistry(
    order=(Priority(names=("XLA",)),),
    paths={"XLA": f"{__name__}.{XLAPrefillBackend.__name__}"},
)
