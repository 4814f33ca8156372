"""What ``mla-jax inspect`` prints of a model's configuration."""

from contextlib import suppress
from typing import Any

from mla_jax.cache import ELEMENT_FORMATS
from mla_jax.config import IndexerConfig, ModelConfig
from mla_jax.config_v4 import AnyConfig, V4Config
from mla_jax.errors import EngineError
from mla_jax.model.family import Serving, family_of
from mla_jax.model.memory import plan_memory
from mla_jax.model.weight_table import num_params

__all__ = ["facts_of"]


def facts_of(config: AnyConfig, dtype: str) -> dict[str, Any]:
    """Family, widths, parameters, bytes of weights in ``dtype`` and of cached tokens, programs."""
    plans = {}
    for name, form in ELEMENT_FORMATS.items():
        with suppress(EngineError):  # widths that the family's records do not have
            plans[name] = plan_memory(config, dtype=dtype, format=form)
    any_plan = next(iter(plans.values()))
    requests = {name: p.request for name, p in plans.items() if p.request}
    widths = _v4_widths(config) if isinstance(config, V4Config) else _latent_widths(config)
    return {
        "family": config.family,
        "layers": config.layers,
        "hidden": config.hidden,
        "vocab": config.vocab,
        **widths,
        "experts": config.moe.experts if config.moe else 0,
        "softmax_scale": config.scale,
        "max_positions": config.max_positions,
        "parameters": num_params(config),
        f"weight_bytes_{dtype}": {"weights": any_plan.weights, "absorbed": any_plan.absorbed},
        "cache_bytes_per_token": {name: p.token for name, p in plans.items()},
        **({"cache_bytes_per_request": requests} if requests else {}),
        "programs": [
            str(rung.bucket)
            for rung in family_of(config.family).builder(config, Serving.of(config)).rungs()
        ],
    }


def _latent_widths(config: ModelConfig) -> dict[str, Any]:
    d = config.dims
    return {
        "sparse_layers": sum(config.sparse_layers),
        "heads": d.heads,
        "dims": {"rank": d.rank, "rope": d.rope, "nope": d.nope, "v": d.v, "q_rank": d.q_rank or 0},
        **({"indexer": _indexer_facts(config.indexer)} if config.indexer else {}),
    }


def _v4_widths(config: V4Config) -> dict[str, Any]:
    ratios = (0, config.overlapping, config.disjoint)
    fours = config.layers_of(config.overlapping)
    return {
        "heads": config.heads,
        "dims": {"row": config.dim, "rope": config.rope_dim, "q_rank": config.q_rank},
        "window": config.window,
        "layers_by_ratio": {str(ratio): config.layers_of(ratio) for ratio in ratios},
        "indexer": {
            "heads": config.index_heads,
            "dim": config.index_dim,
            "topk": config.index_topk,
            "layers": fours,
        },
        "streams": config.streams.count,
    }


def _indexer_facts(indexer: IndexerConfig) -> dict[str, int]:
    layers = sum(indexer.full)
    return {"heads": indexer.heads, "dim": indexer.dim, "topk": indexer.topk, "layers": layers}
