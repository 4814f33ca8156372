"""A family of models as data: what the engine, the loader and the command line know of one.

A family says which ``model_type`` it reads, what it caches, who builds its metadata and which
module computes it. Serving, loading and inspecting a model ask its family alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from mla_jax import ops
from mla_jax.cache import (
    ELEMENT_FORMATS,
    FORMATS,
    RECORD_FORMATS,
    LatentCache,
    RecordCache,
)
from mla_jax.checks import check_choice, check_flags, checked_size
from mla_jax.config import ModelConfig
from mla_jax.config_v4 import V4Config
from mla_jax.errors import ConfigError, EngineError
from mla_jax.formats import CacheFormat, RecordFormat
from mla_jax.metadata.buckets import (
    CONTEXT_ROWS,
    Ladder,
    MLALadder,
    StepLadder,
    default_steps,
    powers_of_two,
)
from mla_jax.metadata.builder import AttentionMetadataBuilder, MLAMetadataBuilder
from mla_jax.metadata.common import GroupSpec
from mla_jax.metadata.deepseek_v4 import Pools, V4MetadataBuilder
from mla_jax.metadata.deepseek_v32 import V32MetadataBuilder
from mla_jax.metadata.indexer import Indexer
from mla_jax.metadata.window import Windows
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.deepseek_v4 import DeepseekV4
from mla_jax.model.deepseek_v32 import DeepseekV32
from mla_jax.model.prefill_crossover import PrefillCrossover
from mla_jax.pallas import fp8_matmul
from mla_jax.pallas.device import DeviceInfo
from mla_jax.placement import Placement
from mla_jax.types import cdiv

__all__ = [
    "FAMILIES",
    "CacheGroup",
    "Family",
    "ServedConfig",
    "Serving",
    "Settings",
    "checked_dtype",
    "family_of",
]

GPU_CHUNK, CPU_CHUNK = 2048, 512
"""Prompt tokens of a step by default.

Every step reads the weights of all experts. On a GPU that takes longer than the products of 512
tokens. With 2,048 each of V3's experts has 64 rows, which products with e4m3 rows need.
"""

_DTYPES = ("float32", "bfloat16", "float16")  # of weights


class ServedConfig(Protocol):
    """What an engine reads of a configuration, whatever the family."""

    @property
    def family(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def eos(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers whose caches have the same pages, as one stack ``[layers, pages, …]``."""

    name: str
    layers: int
    page: int  # rows of a page
    ratio: int = 1  # tokens that a row stands for
    rank: int = 0  # of a format of elements; a record has its own widths
    rope: int = 0
    format: str | CacheFormat | RecordFormat  # a key of FORMATS, or what is there
    window: int | None = None  # tokens that a query sees; pages of older ones are given back
    ring: bool = False  # one page for each request, whatever its length: ``GroupSpec``

    @property
    def tokens(self) -> int:
        """Tokens that a page covers."""
        return self.spec.tokens

    @property
    def grows(self) -> bool:
        """Whether a longer request takes more of it."""
        return self.window is None and not self.ring

    @property
    def token_bytes(self) -> float:
        """Bytes that each further token of a request takes; 0 of a window and of a ring."""
        return self.page_bytes / self.tokens if self.grows else 0.0

    @property
    def request_bytes(self) -> int:
        """Bytes that a request takes whatever its length: of a ring, or of a window's tokens."""
        if self.ring:
            return self.page_bytes
        return 0 if self.window is None else self.window * self.page_bytes // self.page

    def pages_for(self, tokens: int, *, requests: int, chunk: int) -> int:
        """Pages for ``requests`` that have ``tokens`` together, ``chunk`` of them in one step."""
        whole = cdiv(tokens, self.tokens)
        if self.ring:
            return requests
        if self.window is None:
            return whole
        each = cdiv(self.window - 1, self.tokens) + 3  # cut at both ends, and one to grow
        return min(whole, requests * each + cdiv(chunk, self.tokens))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        form = self._format
        if isinstance(form, RecordFormat):
            return self.layers * form.page_bytes(self.page)
        return self.layers * self.page * form.row_bytes(self.rank, self.rope)

    @property
    def spec(self) -> GroupSpec:
        """The group as metadata sees it."""
        return GroupSpec(name=self.name, page=self.page, ratio=self.ratio, ring=self.ring)

    @property
    def _format(self) -> CacheFormat | RecordFormat:
        return FORMATS[self.format] if isinstance(self.format, str) else self.format

    def alloc(self, num_pages: int, placement: Placement) -> LatentCache | RecordCache:
        """Zeroed pages of all layers, on every device of a placement."""
        form = self._format
        sizes = {"num_pages": num_pages, "page": self.page, "layers": self.layers}

        def make() -> LatentCache | RecordCache:
            if isinstance(form, RecordFormat):
                return RecordCache.alloc(**sizes, format=form)
            return LatentCache.alloc(**sizes, rank=self.rank, rope=self.rope, format=form)

        with placement.working():
            if placement.size > 1:
                return jax.jit(make, out_shardings=placement.everywhere)()
            return jax.device_put(make(), placement.everywhere)  # without a copy


class Settings(TypedDict, total=False):
    """What ``Serving.of`` takes, and an engine passes on to it."""

    page: int
    max_requests: int
    prefill_chunk: int | None
    max_model_len: int | None
    cache_format: str | None
    ladder: MLALadder | None
    context_rows: int | None
    backend: str | None
    absorb_prefills: bool
    fp8_activations: bool | None


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
    fp8_activations: bool | None
    ladder: MLALadder | None
    placement: Placement

    @classmethod
    def of(
        cls,
        config: ServedConfig,
        *,
        page: int = 64,
        max_requests: int = 32,
        prefill_chunk: int | None = None,
        max_model_len: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        cache_format: str | None = None,
        ladder: MLALadder | None = None,
        context_rows: int | None = None,
        backend: str | None = None,
        absorb_prefills: bool = True,
        fp8_activations: bool | None = None,
        placement: Placement | None = None,
    ) -> "Serving":
        """Settings as ``Engine`` takes them, checked, with what follows where they are None.

        Raises:
            EngineError: a setting that can never be served.
        """
        most = config.max_positions
        length = most
        if max_model_len is not None:
            allowed = f"1 or more, at most {most} positions"
            length = checked_size("max_model_len", max_model_len, high=most, allowed=allowed)
        if context_rows is not None:
            checked_size("context_rows", context_rows)
        names = ops.REGISTRY.names
        if backend is not None and not (isinstance(backend, str) and backend in names):
            raise EngineError("backend", backend, f"{' or '.join(names)}, or None: the best")
        if ladder is not None and not is_dataclass(ladder):
            allowed = "a ladder, such as MLALadder.default makes, or None: the family's own"
            raise EngineError("ladder", type(ladder).__name__, allowed)
        check_flags(absorb_prefills=absorb_prefills)
        check_choice("fp8_activations", fp8_activations)
        dtype, placement = checked_dtype(dtype), Placement.of(placement)
        if prefill_chunk is None:
            prefill_chunk = GPU_CHUNK if placement.on_gpu else CPU_CHUNK
            if isinstance(ladder, StepLadder):
                prefill_chunk = min(prefill_chunk, ladder.prefill_tokens.largest)
        if fp8_activations is None and not _rounding_is_faster(placement, dtype, backend):
            fp8_activations = False
        return cls(
            page=checked_size("page", page),
            max_requests=checked_size("max_requests", max_requests),
            prefill_chunk=checked_size("prefill_chunk", prefill_chunk),
            max_model_len=length,
            context_rows=min(length, CONTEXT_ROWS) if context_rows is None else context_rows,
            cache_format=_checked_format(cache_format, dtype),
            dtype=dtype,
            backend=backend,
            absorb_prefills=absorb_prefills,
            fp8_activations=fp8_activations,
            ladder=ladder,
            placement=placement,
        )


def _rounding_is_faster(placement: Placement, dtype: jnp.dtype, backend: str | None) -> bool:
    """Whether kernels here multiply rows of e4m3; a backend named for all operations may not."""
    known = placement.on_gpu and dtype.itemsize == 2 and backend is None
    return known and not fp8_matmul.MANY_ROWS.missing_here(DeviceInfo.of(placement.device))


def checked_dtype(dtype: object) -> jnp.dtype:
    """A dtype that weights are computed with.

    Raises:
        EngineError: it is none of them.
    """
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # pyright: ignore
    except (TypeError, ValueError):
        found = None
    if found is None or found.name not in _DTYPES:
        given = repr(dtype) if found is None else found.name
        raise EngineError("dtype", given, ", ".join(_DTYPES))
    return found


def _checked_format(name: str | None, dtype: jnp.dtype) -> str:
    """A key of ``ELEMENT_FORMATS``; by default the plain one that stores the dtype."""
    plain = {f.dtype: f.name for f in ELEMENT_FORMATS.values() if not f.quantised}
    if name is None:
        name = plain.get(dtype.name, "bf16")
    if not isinstance(name, str) or name not in ELEMENT_FORMATS:
        raise EngineError("cache_format", repr(name), ", ".join(ELEMENT_FORMATS))
    return name


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models."""

    name: str
    model_types: tuple[str, ...]  # of config.json
    groups: Callable[[Any, Serving], tuple[CacheGroup, ...]]  # of a config and settings
    builder: Callable[[Any, Serving], AttentionMetadataBuilder]
    module: Callable[..., nnx.Module]  # (config, dtype=…, rngs=…)
    fp8: bool = False  # the module takes fp8=True: products with block-scaled e4m3 weights

    def abstract(self, config: Any, dtype: jnp.dtype, *, fp8: bool = False) -> nnx.Module:
        """The module without memory for its weights."""
        more = {"fp8": True} if fp8 else {}
        return nnx.eval_shape(lambda: self.module(config, dtype=dtype, rngs=nnx.Rngs(0), **more))


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
        with serving.placement.working():
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
    """``MLALadder.default``, with more widths where ``xla`` attends: it reads padded pages too."""
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


_RECORDS = "ds_mla", "index_key"
"""What V3.2 stores in 8 bits: latents with their rotary keys, index keys."""

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu"),
    groups=_dense_groups,
    builder=_dense_builder,
    module=DeepseekV3,
    fp8=True,
)


def _v32_groups(config: ModelConfig, serving: Serving) -> tuple[CacheGroup, ...]:
    """Latents and, of the layers that select, index keys; equal pages.

    Both are records where 8 bits are asked for, else elements of the same format.
    """
    indexer, dims = config.selector, config.dims
    latent = CacheGroup(
        name="latent",
        layers=config.layers,
        page=serving.page,
        rank=dims.rank,
        rope=dims.rope,
        format=serving.cache_format,
    )
    keys = replace(latent, name="index_keys", layers=sum(indexer.full), rank=indexer.dim, rope=0)
    if not ELEMENT_FORMATS[serving.cache_format].quantised:
        return latent, keys
    _check_widths(serving, _RECORDS, (dims.rank, dims.rope, indexer.dim))
    groups = zip((latent, keys), _RECORDS, strict=True)
    latent, keys = (replace(g, rank=0, rope=0, format=name) for g, name in groups)
    return latent, keys


def _v32_builder(config: ModelConfig, serving: Serving) -> V32MetadataBuilder:
    """Dense up to the selection's length, but for prefills that rates say are faster absorbed."""
    latent, keys = (group.spec for group in _v32_groups(config, serving))
    crossover = None
    if serving.absorb_prefills:
        with serving.placement.working():
            crossover = PrefillCrossover.of(config.dims, DeviceInfo.current())
    return V32MetadataBuilder(
        ladder=_sparse_ladder(serving),
        latent=latent,
        indexer=Indexer(group=keys),
        topk=config.selector.topk,
        context_rows=serving.context_rows,
        absorb=crossover and crossover.absorb,
    )


def _v4_groups(config: V4Config, serving: Serving) -> tuple[CacheGroup, ...]:
    """Window of all layers; states, index keys and open groups of those that have them.

    A page of states covers as many tokens as ``overlapping`` pages of the window, or one state's
    where that is more. Rows and index keys are records where 8 bits are asked for; what waits in
    open groups is float32.
    """
    page, near, far = serving.page, config.overlapping, config.disjoint
    fours, others = config.layers_of(near), config.layers_of(far)
    rest, rope, key = config.dim - config.rope_dim, config.rope_dim, config.index_dim
    form = {"row": serving.cache_format, "key": serving.cache_format}
    if ELEMENT_FORMATS[serving.cache_format].quantised:
        form = {"row": "v4", "key": "index_key"}
        _check_widths(serving, tuple(form.values()), (rest, rope, key))
        rest = rope = key = 0
    window = CacheGroup(
        name="window",
        layers=config.layers,
        page=page,
        rank=rest,
        rope=rope,
        format=form["row"],
        window=config.window,
    )
    states = replace(window, name=f"states_{near}", layers=fours, ratio=near, window=None)
    rows = max(1, near * page // far)
    every = replace(states, name=f"states_{far}", layers=others, ratio=far, page=rows)
    keys = replace(states, name="index_keys", rank=key, rope=0, format=form["key"])
    width = 4 * (config.dim + config.index_dim)  # two halves, of a value and of a gate
    opened = CacheGroup(
        name=f"open_{near}", layers=fours, page=2 * near, rank=width, format="fp32", ring=True
    )
    waiting = replace(opened, name=f"open_{far}", layers=others, page=far, rank=2 * config.dim)
    groups = window, states, every, keys, opened, waiting
    return tuple(group for group in groups if group.layers)


def _v4_builder(config: V4Config, serving: Serving) -> V4MetadataBuilder:
    specs = {group.name: group.spec for group in _v4_groups(config, serving)}
    windows = Windows(
        group=specs["window"],
        window=config.window,
        compress_ratios=config.compress_ratios,
        max_model_len=serving.max_model_len,
        max_batched_tokens=serving.prefill_chunk,
        overlapping=config.overlapping,
        disjoint=config.disjoint,
    )
    ratios = [r for r in (config.overlapping, config.disjoint) if config.layers_of(r)]
    pools = (Pools(states=specs[f"states_{r}"], ring=specs[f"open_{r}"]) for r in ratios)
    keys = specs.get("index_keys")
    return V4MetadataBuilder(
        ladder=_sparse_ladder(serving),
        windows=windows,
        compressed=tuple(specs[f"states_{r}"] for r in ratios),
        indexer=None if keys is None else Indexer(group=keys),
        pools=tuple(pools),
    )


def _check_widths(serving: Serving, records: Sequence[str], given: Sequence[int]) -> None:
    """Refuse widths that these byte records do not have."""
    fields = [f for name in records for f in RECORD_FORMATS[name].values]
    stored = [f.count for f in fields]
    if list(given) != stored:
        names = [f.name for f in fields]
        hint = "Another cache_format stores any widths."
        what = f"cache_format {serving.cache_format}: widths"
        have, want = (dict(zip(names, x, strict=True)) for x in (given, stored))
        raise EngineError(what, have, want, hint)


def _sparse_ladder(serving: Serving) -> StepLadder:
    return serving.ladder or default_steps(
        max_requests=serving.max_requests,
        max_prefill_tokens=serving.prefill_chunk,
        max_pages=cdiv(serving.max_model_len, serving.page),
    )


DEEPSEEK_V32 = Family(
    name="deepseek_v32",
    model_types=("deepseek_v32", "glm_moe_dsa"),
    groups=_v32_groups,
    builder=_v32_builder,
    module=DeepseekV32,
    fp8=True,
)

DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    groups=_v4_groups,
    builder=_v4_builder,
    module=DeepseekV4,
    fp8=True,
)

FAMILIES: tuple[Family, ...] = (DEEPSEEK_V3, DEEPSEEK_V32, DEEPSEEK_V4)


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
