"""A model's configuration by the name of a preset, by its folder or by its hub id."""

import os
from collections.abc import Collection
from pathlib import Path

from mla_jax.config_v4 import AnyConfig, read_config
from mla_jax.errors import ConfigError
from mla_jax.hub import folder_of
from mla_jax.model.presets import PRESETS

__all__ = ["model_of"]


def model_of(name: str, *, ignore_keys: Collection[str] = ()) -> AnyConfig:
    """``V3_2``, ``v3.2`` and ``v3-2`` are a preset; else a folder, a config.json or a hub id.

    Of a hub id no weights are downloaded.

    Raises:
        ConfigError: neither a preset nor a path that is there, or a config.json that is refused.
        EngineError: a hub id that cannot be downloaded.
    """
    preset = PRESETS.get(name.upper().replace("-", "_").replace(".", "_"))
    if preset is not None:
        return preset
    path = Path(name) if os.path.isfile(name) else folder_of(name, weights=False)
    if not path.exists():
        presets = ", ".join(PRESETS)
        raise ConfigError(
            "model", name, f"a folder with config.json, a hub id, or one of {presets}"
        )
    return read_config(path, ignore_keys=ignore_keys)
