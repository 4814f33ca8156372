"""Frozen facts about a DeepSeek V4: window, compressed states, streams, routing. No arrays."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from mla_jax.checks import is_int, is_real
from mla_jax.config import (
    ModelConfig,
    MoEConfig,
    RopeConfig,
    YarnConfig,
    check_positive,
    check_written,
)
from mla_jax.errors import ConfigError
from mla_jax.hf_config_v4 import MODEL_TYPE, read, write
from mla_jax.hf_keys import config_object

__all__ = ["AnyConfig", "StreamConfig", "V4Config", "V4Kind", "read_config"]


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """The residual as parallel streams, mixed around every sub-block (hyper-connections, mHC)."""

    count: int = 4
    rounds: int = 20  # of Sinkhorn's normalisation
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("count", "rounds"):
            if not is_int(size := getattr(self, name)) or not 1 <= size <= 1000:
                raise ConfigError(f"StreamConfig.{name}", size, "an integer from 1 to 1000")
        if not (is_real(self.eps) and 0 <= self.eps <= 1):
            raise ConfigError("StreamConfig.eps", self.eps, "a number from 0 to 1")


class V4Kind(NamedTuple):
    """What a layer is made of; layers of one kind are one program text."""

    ratio: int  # tokens that a compressed state stands for; 0 = window only
    hashed: bool  # experts follow from the token id, by a table


_MOE = MoEConfig(
    experts=256, topk=6, width=2048, shared=1, method="sqrtsoftplus", normalise=True, scale=1.5
)
_YARN = YarnConfig(factor=16.0, original=65536, attention_factor=1.0)
_STREAMS = StreamConfig()


@dataclass(frozen=True, kw_only=True)
class V4Config:
    """A whole DeepSeek V4; the defaults are those of V4-Flash.

    A layer of ratio 0 attends to the last ``window`` tokens. One of ratio ``overlapping`` (C4) or
    ``disjoint`` (C128) also attends to compressed states, one for each so many tokens: C4 to the
    ``index_topk`` that its indexer selects, C128 to all.
    """

    family: str = MODEL_TYPE
    vocab: int = 129280
    hidden: int = 4096
    heads: int = 64
    dim: int = 512  # of a head, and of the one row of a token that is key and value
    rope_dim: int = 64  # its last channels, which are rotated
    q_rank: int = 1024
    out_groups: int = 8  # contiguous heads share an output projection
    out_rank: int = 1024  # of each group
    window: int = 128  # tokens, the query's own among them
    compress_ratios: tuple[int, ...] = (0, 0, *(4, 128) * 20, 4)  # of each layer; 0 = window only
    overlapping: int = 4  # the ratio whose states overlap, and are selected
    disjoint: int = 128  # the ratio whose states are disjoint, and all seen
    hash_layers: int = 3  # leading layers whose experts follow from the token id
    moe: MoEConfig = _MOE
    swiglu_limit: float = 10.0
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 512
    streams: StreamConfig = _STREAMS
    eps: float = 1e-6  # of every norm
    theta: float = 1e4  # rotation of window-only layers
    compressed_theta: float = 1.6e5  # of all others, with ``yarn``
    yarn: YarnConfig | None = _YARN
    max_positions: int = 1048576
    fp8_block: int | None = None  # 128: weights are e4m3 with one scale per block
    bos: int | None = 0
    eos: tuple[int, ...] = (1,)
    ignored_layers: int = 0  # MTP blocks in the checkpoint that the main model does not use

    def __post_init__(self) -> None:
        sizes = ("vocab", "hidden", "heads", "dim", "q_rank", "out_groups", "out_rank", "window")
        sizes += ("index_heads", "index_dim", "index_topk", "max_positions")
        check_positive(self, *sizes)
        most = min(self.dim - 1, self.index_dim)  # a row has channels that are not rotated
        if not is_int(self.rope_dim) or not 0 < self.rope_dim <= most or self.rope_dim % 2:
            allowed = f"even, from 2 to {most}"
            raise ConfigError("V4Config.rope_dim", self.rope_dim, allowed)
        if self.heads % self.out_groups:
            raise ConfigError(
                "V4Config.out_groups", self.out_groups, f"a divisor of {self.heads} heads"
            )
        ratios = self.overlapping, self.disjoint
        if not all(map(is_int, ratios)) or not 1 < self.overlapping < self.disjoint:
            given = f"{self.overlapping} and {self.disjoint}"
            raise ConfigError("overlapping and disjoint ratio", given, "1 < overlapping < disjoint")
        known = {0, self.overlapping, self.disjoint}
        given = self.compress_ratios
        if not (isinstance(given, tuple) and given and all(ratio in known for ratio in given)):
            given = (
                sorted(set(given))
                if isinstance(given, tuple) and all(map(is_int, given))
                else given
            )
            raise ConfigError("compress_ratios", given, f"one of {sorted(known)} for each layer")

    @property
    def layers(self) -> int:
        """Layers of the decoder."""
        return len(self.compress_ratios)

    @property
    def kinds(self) -> tuple[V4Kind, ...]:
        """What each layer is made of."""
        return tuple(V4Kind(r, i < self.hash_layers) for i, r in enumerate(self.compress_ratios))

    @property
    def scale(self) -> float:
        """Softmax scale ``dim^-1/2``."""
        return self.dim**-0.5

    def rope(self, ratio: int) -> RopeConfig:
        """Rotation of everything in a layer of this ratio, pairs ``(2i, 2i + 1)``."""
        theta, yarn = (self.compressed_theta, self.yarn) if ratio else (self.theta, None)
        return RopeConfig(dim=self.rope_dim, theta=theta, yarn=yarn)

    def layers_of(self, ratio: int) -> int:
        """How many layers have this ratio."""
        return self.compress_ratios.count(ratio)

    @classmethod
    def from_hf(
        cls, source: Mapping | str | Path, *, ignore_keys: Collection[str] = ()
    ) -> "V4Config":
        """The model of a ``config.json``, in the published keys or in those of transformers.

        As ``ModelConfig.from_hf``.
        Raises ConfigError for a key that is unknown, missing, inconsistent or not implemented.
        """
        data, where = config_object(source, ignore_keys)
        facts = read(data, where, ignored=ignore_keys)
        facts["yarn"] = facts["yarn"] and YarnConfig(**facts["yarn"])
        facts["moe"] = MoEConfig(**facts["moe"])
        facts["streams"] = StreamConfig(**facts["streams"])
        return cls(**facts)

    def to_hf(self) -> dict:
        """Keys of transformers: ``V4Config.from_hf(config.to_hf()) == config``.

        As ``ModelConfig.to_hf``.
        """
        data = write(asdict(self))
        check_written(self, V4Config.from_hf(data))
        return data


type AnyConfig = ModelConfig | V4Config
"""Of any family of this library."""


def read_config(source: Mapping | str | Path, *, ignore_keys: Collection[str] = ()) -> AnyConfig:
    """The model of a Hugging Face ``config.json``, of whichever family.

    As ``ModelConfig.from_hf``, which reads all families but DeepSeek V4.
    Raises ConfigError for a key that is unknown, missing, inconsistent or not implemented.
    """
    data, _ = config_object(source, ignore_keys)
    is_v4 = isinstance(data, Mapping) and data.get("model_type") == MODEL_TYPE
    return (V4Config if is_v4 else ModelConfig).from_hf(source, ignore_keys=ignore_keys)
