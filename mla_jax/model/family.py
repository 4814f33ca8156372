"""A family of models as data: what the engine, the loader and the command line know of one.

A family says which ``model_type`` it reads, what it caches, who builds its metadata and which
module computes it. Whoever serves, loads or inspects a model asks its family and nobody else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.cache import ELEMENT_FORMATS, LatentCache
from mla_jax.config import ModelConfig
from mla_jax.errors import ConfigError
from mla_jax.formats import CacheFormat
from mla_jax.metadata.buckets import Ladder, MLALadder, powers_of_two
from mla_jax.metadata.builder import AttentionMetadataBuilder, MLAMetadataBuilder
from mla_jax.metadata.common import GroupSpec
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.prefill_crossover import PrefillCrossover
from mla_jax.placement import Placement
from mla_jax.types import cdiv

__all__ = ["FAMILIES", "CacheGroup", "Family", "ServedConfig", "Serving", "family_of"]


class ServedConfig(Protocol):
    """What an engine reads of a configuration, whatever the family."""

    @property
    def vocab(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def eos(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose caches have the same pages: one array ``[layers, pages, page, row]``."""

    name: str
    layers: int
    page: int  # rows of a page
    ratio: int = 1  # tokens that a row stands for
    rank: int
    rope: int
    format: str | CacheFormat

    @property
    def tokens(self) -> int:
        """Tokens that a page covers."""
        return self.page * self.ratio

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        form = ELEMENT_FORMATS[self.format] if isinstance(self.format, str) else self.format
        return self.layers * self.page * form.row_bytes(self.rank, self.rope)

    @property
    def spec(self) -> GroupSpec:
        """The group as metadata sees it."""
        return GroupSpec(name=self.name, page=self.page, ratio=self.ratio)

    def alloc(self, num_pages: int, placement: Placement) -> LatentCache:
        """Zeroed pages of all layers, on every device of a placement."""
        with jax.default_device(placement.device):
            cache = LatentCache.alloc(
                num_pages=num_pages,
                page=self.page,
                rank=self.rank,
                rope=self.rope,
                format=self.format,
                layers=self.layers,
            )
        return jax.device_put(cache, placement.everywhere)  # without a copy on one device


@dataclass(frozen=True, kw_only=True)
class Serving:
    """An engine's settings, as far as a family's groups and builder follow from them."""

    page: int
    max_requests: int
    prefill_chunk: int
    max_model_len: int
    context_rows: int
    cache_format: str
    dtype: jnp.dtype
    backend: str | None
    absorb_prefills: bool
    ladder: MLALadder | None
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. ``module`` is None where its metadata exists before its model does."""

    name: str
    model_types: tuple[str, ...]  # of config.json
    groups: Callable[[Any, Serving], tuple[CacheGroup, ...]]  # of a config and settings
    builder: Callable[[Any, Serving], AttentionMetadataBuilder]
    module: Callable[..., nnx.Module] | None  # (config, dtype=…, rngs=…)

    def abstract(self, config: Any, dtype: jnp.dtype) -> nnx.Module:
        """The module without memory for its weights.

        Raises:
            ConfigError: the family has no module yet.
        """
        make = self.module
        if make is None:
            allowed = ", ".join(t for f in FAMILIES if f.module for t in f.model_types)
            raise ConfigError(f"model_type of family {self.name}", self.model_types, allowed)
        return nnx.eval_shape(lambda: make(config, dtype=dtype, rngs=nnx.Rngs(0)))


def _dense_groups(config: ModelConfig, serving: Serving) -> tuple[CacheGroup, ...]:
    return (
        CacheGroup(
            name="latent",
            layers=config.layers,
            page=serving.page,
            rank=config.dims.rank,
            rope=config.dims.rope,
            format=serving.cache_format,
        ),
    )


def _dense_builder(config: ModelConfig, serving: Serving) -> MLAMetadataBuilder:
    (group,) = _dense_groups(config, serving)
    crossover = None
    if serving.absorb_prefills:
        with jax.default_device(serving.placement.device):
            crossover = PrefillCrossover.for_cache(
                config.dims,
                dtype=serving.dtype,
                format=ELEMENT_FORMATS[serving.cache_format],
                page=serving.page,
                backend=serving.backend,
            )
    return MLAMetadataBuilder(
        ladder=serving.ladder or _dense_ladder(serving),
        group=group.spec,
        absorb=crossover and crossover.absorb,
        absorb_run=crossover.run if crossover else 0,
    )


def _dense_ladder(serving: Serving) -> MLALadder:
    """``MLALadder.default``; the reference reads padded pages too, so it gets more widths."""
    pages = cdiv(serving.max_model_len, serving.page)
    ladder = MLALadder.default(
        max_requests=serving.max_requests,
        max_prefill_tokens=serving.prefill_chunk,
        max_pages=pages,
        context_rows=serving.context_rows,
    )
    if serving.placement.on_gpu and serving.backend != "xla":
        return ladder
    widths = powers_of_two(pages, smallest=min(16, pages))[::-2][::-1]
    return replace(ladder, pages=Ladder("pages of one request", widths))


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu"),
    groups=_dense_groups,
    builder=_dense_builder,
    module=DeepseekV3,
)

FAMILIES: tuple[Family, ...] = (DEEPSEEK_V3,)


def family_of(model_type: str, families: Sequence[Family] = FAMILIES) -> Family:
    """The family that reads this ``model_type``.

    Raises:
        ConfigError: none does.
    """
    for family in families:
        if model_type in family.model_types:
            return family
    allowed = ", ".join(t for f in families for t in f.model_types)
    raise ConfigError("model_type", repr(model_type), allowed)
