"""A model by the name of a preset or by its folder."""

from collections.abc import Collection
from pathlib import Path

from mla_jax.config_v4 import AnyConfig, read_config
from mla_jax.errors import ConfigError
from mla_jax.model.presets import PRESETS

__all__ = ["model_of"]


def model_of(name: str, *, ignore_keys: Collection[str] = ()) -> AnyConfig:
    """``V3_2``, ``v3.2`` and ``v3-2`` are a preset; anything else is a folder or a config.json.

    Raises:
        ConfigError: neither a preset nor a path that is there, or a config.json that is refused.
    """
    preset = PRESETS.get(name.upper().replace("-", "_").replace(".", "_"))
    if preset is not None:
        return preset
    if not Path(name).exists():
        presets = ", ".join(PRESETS)
        raise ConfigError("model", name, f"a folder with config.json, or one of {presets}")
    return read_config(name, ignore_keys=ignore_keys)
