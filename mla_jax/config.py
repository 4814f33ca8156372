"""Frozen facts about a model: widths, rotation, routing. No arrays.

``ModelConfig.from_hf`` reads a Hugging Face ``config.json``; every key is consumed, known to
be inert, or refused by name.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mla_jax.checks import is_int, is_real
from mla_jax.errors import ConfigError, shown
from mla_jax.hf_config import read, write
from mla_jax.hf_keys import config_object

__all__ = [
    "IndexerConfig",
    "LayerKind",
    "MLADims",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "YarnConfig",
]


@dataclass(frozen=True, kw_only=True)
class MLADims:
    """Widths of multi-head latent attention (``H, rq, r, dn, dr, dv`` of the papers)."""

    heads: int
    rank: int  # latent width that the cache stores, kv_lora_rank
    nope: int  # per-head query/key width without rotation
    rope: int  # per-head rotary width, shared by all heads on the key side
    v: int  # per-head value width
    q_rank: int | None  # query latent width; None = queries straight from the input

    def __post_init__(self) -> None:
        check_positive(self, "heads", "rank", "nope", "v")
        if self.q_rank is not None:
            check_positive(self, "q_rank")
        if not is_int(self.rope) or self.rope < 0 or self.rope % 2:
            raise ConfigError("MLADims.rope", self.rope, "an even number >= 0")

    @property
    def qk(self) -> int:
        """Per-head query/key width of the expanded form."""
        return self.nope + self.rope

    @property
    def row(self) -> int:
        """Elements of one cache row."""
        return self.rank + self.rope


def check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not is_int(value) or value < 1:
            raise ConfigError(f"{type(config).__name__}.{name}", value, "a positive integer")


def check_written(config: object, again: object, prefix: str = "") -> None:
    """Refuse a configuration that, written and read ``again``, is another one.

    Raises:
        ConfigError: naming the first fact that differs.
    """
    for one in fields(config):  # pyright: ignore[reportArgumentType]
        mine, read = getattr(config, one.name), getattr(again, one.name)
        if mine == read:
            continue
        if type(mine) is type(read) and is_dataclass(mine):
            check_written(mine, read, f"{prefix}{one.name}.")
        what = f"to_hf: {prefix}{one.name}"
        hint = "The keys of this family cannot say it."
        raise ConfigError(what, mine, f"{shown(read)}, as config.json would be read", hint)


def _within(config: object, low: float, high: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (is_real(value) and low <= value <= high):
            allowed = f"a number >= {low:g}, at most {high:g}"
            raise ConfigError(f"{type(config).__name__}.{name}", value, allowed)


def _mscale(factor: float, weight: float) -> float:
    """YaRN magnitude correction ``0.1 * weight * ln(factor) + 1`` (1 when not stretched)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN context extension: ``factor`` from ``original`` positions."""

    factor: float
    original: int  # original_max_position_embeddings
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0  # 0 = absent
    mscale_all_dim: float = 0.0  # 0 = absent
    attention_factor: float | None = None  # overrides the cos/sin factor
    truncate: bool = True  # round the ramp's edges to whole channels

    def __post_init__(self) -> None:
        # Far beyond every published value; within, everything derived is finite in float32.
        _within(self, 1, 1e9, "factor")
        _within(self, 1, 2**31 - 1, "original")
        _within(self, 1e-9, 1e9, "beta_fast", "beta_slow")
        _within(self, 0, 1e6, "mscale", "mscale_all_dim")
        if self.attention_factor is not None:
            _within(self, 1e-6, 1e6, "attention_factor")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of ``dim`` channels with base ``theta``."""

    dim: int
    theta: float
    interleaved: bool = True  # pairs (2i, 2i+1); False = halves (i, i + dim/2)
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        if not (is_real(self.theta) and self.theta > 1):
            raise ConfigError("RopeConfig.theta", self.theta, "a number > 1")
        _within(self, 1 + 1e-6, 1e30, "theta")

    def inv_freq(self) -> np.ndarray:
        """Angles per position, float32 ``[dim / 2]``: ``theta^(-2i/dim)``, YaRN-blended.

        Source: spec "Frequencies and scale"; YaRN, arXiv:2309.00071.
        """
        i = np.arange(0, self.dim, 2, dtype=np.float32)
        base = np.float32(self.theta) ** (i / np.float32(self.dim))
        extra = np.float32(1.0) / base
        y = self.yarn
        if y is None or self.dim == 0:
            return extra

        def edge(beta: float) -> float:
            turns = math.log(y.original / (beta * 2 * math.pi))
            return self.dim * turns / (2 * math.log(self.theta))

        lo, hi = edge(y.beta_fast), edge(y.beta_slow)
        if y.truncate:
            lo, hi = math.floor(lo), math.ceil(hi)
        lo, hi = max(lo, 0), min(hi, self.dim - 1)
        if lo == hi:
            hi += 0.001
        n = np.arange(self.dim // 2, dtype=np.float32)
        ramp = np.clip((n - np.float32(lo)) / np.float32(hi - lo), 0, 1)
        inter = np.float32(1.0) / (np.float32(y.factor) * base)
        keep = 1 - ramp.astype(np.float32)
        return (inter * (1 - keep) + extra * keep).astype(np.float32)

    @property
    def cos_sin_factor(self) -> float:
        """What multiplies cos and sin: 1 for every DeepSeek checkpoint."""
        y = self.yarn
        if y is None:
            return 1.0
        if y.attention_factor is not None:
            return y.attention_factor
        if y.mscale and y.mscale_all_dim:
            return _mscale(y.factor, y.mscale) / _mscale(y.factor, y.mscale_all_dim)
        return _mscale(y.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """What multiplies the softmax scale: ``m^2`` with ``m = _mscale(F, all_dim)``."""
        y = self.yarn
        if y is None or not y.mscale_all_dim:
            return 1.0
        return _mscale(y.factor, y.mscale_all_dim) ** 2


_ROUTING = "greedy", "group_limited_greedy", "noaux_tc", "sqrtsoftplus"


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed experts beside one shared SwiGLU."""

    experts: int
    topk: int
    width: int  # of one expert
    shared: int  # shared experts, stored as one SwiGLU of width shared * width; 0 = none
    method: str  # one of greedy, group_limited_greedy, noaux_tc, sqrtsoftplus
    groups: int = 1
    topk_groups: int = 1
    normalise: bool = False  # divide the chosen weights by their sum
    scale: float = 1.0  # routed_scaling_factor

    def __post_init__(self) -> None:
        check_positive(self, "experts", "topk", "width", "groups", "topk_groups")
        if not is_int(self.shared) or self.shared < 0:
            raise ConfigError("MoEConfig.shared", self.shared, "an integer, 0 or more")
        if not isinstance(self.method, str) or self.method not in _ROUTING:
            raise ConfigError("MoEConfig.method", self.method, ", ".join(_ROUTING))
        if not is_real(self.scale):
            raise ConfigError("MoEConfig.scale", self.scale, "a finite number")
        if self.experts % self.groups:
            raise ConfigError(
                "MoEConfig.groups", self.groups, f"a divisor of {self.experts} experts"
            )
        if self.topk_groups > self.groups:
            raise ConfigError("MoEConfig.topk_groups", self.topk_groups, f"at most {self.groups}")
        each = self.experts // self.groups
        if self.method == "noaux_tc" and each < 2:
            hint = "noaux_tc scores a group by its two best experts, so it needs two."
            raise ConfigError("MoEConfig.groups", self.groups, f"at most {self.experts // 2}", hint)
        if self.topk > self.topk_groups * each:
            allowed = f"at most {self.topk_groups * each}, the experts of the kept groups"
            raise ConfigError("MoEConfig.topk", self.topk, allowed)

    @property
    def biased(self) -> bool:
        """Whether the choice of experts has a bias of its own."""
        return self.method in ("noaux_tc", "sqrtsoftplus")


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The lightning indexer of V3.2 and GLM-5: which past tokens a query attends to."""

    heads: int
    dim: int  # of a query head, and of the one key of a token
    topk: int  # tokens that a query attends to, at most
    full: tuple[bool, ...]  # layer i selects; others take the selection of the last that does
    interleaved: bool = False  # rotation of its first ``rope`` channels; False = halves
    hadamard: bool = False  # queries and keys times the Walsh-Hadamard matrix: spreads outliers

    def __post_init__(self) -> None:
        check_positive(self, "heads", "dim", "topk")
        if not (isinstance(self.full, tuple) and self.full and self.full[0]):
            allowed = "the first layer true: it has no selection before it to take"
            raise ConfigError("IndexerConfig.full", self.full, allowed)
        if self.hadamard and self.dim & (self.dim - 1):
            raise ConfigError("IndexerConfig.dim with hadamard", self.dim, "a power of two")


class LayerKind(NamedTuple):
    """What a layer is made of; layers of one kind are one program text."""

    sparse: bool  # routes to experts
    selects: bool = False  # has an indexer


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole decoder of latent attention: V2, V3, V3.2, R1, Kimi-K2, GLM and Youtu are values."""

    family: str  # Hugging Face model_type
    vocab: int
    hidden: int
    layers: int
    dims: MLADims
    rope: RopeConfig
    mlp: int  # width of a dense feed-forward
    moe: MoEConfig | None  # None = every layer dense
    sparse_layers: tuple[bool, ...]  # layer i routes to experts
    eps: float  # of the block norms and the final norm
    latent_eps: float = 1e-6  # of the query- and key/value-latent norms
    tied: bool = False  # the head is the embedding
    attention_bias: bool = False
    mlp_bias: bool = False
    max_positions: int
    fp8_block: int | None = None  # 128: weights are e4m3 with one scale per block
    bos: int | None = None
    eos: tuple[int, ...] = ()
    ignored_layers: int = 0  # MTP layers in the checkpoint that the main model does not use
    indexer: IndexerConfig | None = None  # None = dense attention

    def __post_init__(self) -> None:
        check_positive(self, "vocab", "hidden", "layers", "mlp", "max_positions")
        if len(self.sparse_layers) != self.layers:
            given = f"{len(self.sparse_layers)} entries"
            raise ConfigError("ModelConfig.sparse_layers", given, f"{self.layers}, one per layer")
        if any(self.sparse_layers) != (self.moe is not None):
            raise ConfigError("ModelConfig.moe", self.moe, "given exactly when a layer is sparse")
        if self.indexer is not None:
            self._check_indexer(self.indexer)

    def _check_indexer(self, indexer: IndexerConfig) -> None:
        if len(indexer.full) != self.layers:
            given = f"{len(indexer.full)} entries"
            raise ConfigError("IndexerConfig.full", given, f"{self.layers}, one per layer")
        if indexer.dim < self.dims.rope:
            allowed = f"at least rope={self.dims.rope}, which it rotates"
            raise ConfigError("IndexerConfig.dim", indexer.dim, allowed)
        if self.dims.q_rank is None:
            hint = "Index queries are projected from the query latent."
            raise ConfigError(
                "MLADims.q_rank with an indexer", None, "a query latent's width", hint
            )

    @property
    def selector(self) -> IndexerConfig:
        """The indexer, of a family whose attention is sparse.

        Raises:
            ConfigError: there is none.
        """
        if self.indexer is None:
            hint = "Without one the same model is of family deepseek_v3."
            what = f"ModelConfig.indexer of family {self.family}"
            raise ConfigError(what, None, "an IndexerConfig", hint)
        return self.indexer

    @classmethod
    def from_hf(
        cls, source: Mapping | str | Path, *, ignore_keys: Collection[str] = ()
    ) -> "ModelConfig":
        """The model of a Hugging Face ``config.json``: its content, its path or its folder.

        ``ignore_keys`` names keys that are unknown here and, as you know, change nothing that is
        computed (inside an object ``"rope_scaling.name"``). Keys that only say who wrote the file
        are passed over with a warning.
        Raises ConfigError for a key that is unknown, missing, inconsistent or not implemented.
        """
        data, where = config_object(source, ignore_keys)
        try:
            facts = read(data, where, ignored=ignore_keys)
        except RecursionError:
            raise ConfigError(where, "lists in lists without end", "a flat JSON object") from None
        yarn = facts["rope"]["yarn"]
        facts["rope"]["yarn"] = yarn and YarnConfig(**yarn)
        facts["rope"] = RopeConfig(**facts["rope"])
        facts["dims"] = MLADims(**facts["dims"])
        facts["moe"] = facts["moe"] and MoEConfig(**facts["moe"])
        facts["indexer"] = facts["indexer"] and IndexerConfig(**facts["indexer"])
        return cls(**facts)

    def to_hf(self) -> dict:
        """The released key dialect: ``ModelConfig.from_hf(config.to_hf()) == config``.

        Raises:
            ConfigError: a fact that these keys cannot say, of this family.
        """
        data = write(asdict(self))
        check_written(self, ModelConfig.from_hf(data))
        return data

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is made of."""
        full = self.indexer.full if self.indexer else (False,) * self.layers
        return tuple(map(LayerKind, self.sparse_layers, full))

    @property
    def scale(self) -> float:
        """Softmax scale ``(nope + rope)^-1/2 * m^2``, the same for both attention paths."""
        return self.dims.qk**-0.5 * self.rope.score_factor
