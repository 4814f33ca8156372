"""Named model configurations, read from released ``config.json`` files in ``configs/``."""

import json
from importlib import resources

from mla_jax.config import ModelConfig
from mla_jax.config_v4 import AnyConfig, V4Config

__all__ = [
    "GLM_4_7_FLASH",
    "GLM_5",
    "KIMI_K2",
    "PRESETS",
    "V2",
    "V2_LITE",
    "V3",
    "V3_2",
    "V4_FLASH",
    "V4_PRO",
    "YOUTU_2B",
    "released",
]


def released(name: str) -> dict:
    """The ``config.json`` of a preset as published, by its name in lower case."""
    text = resources.files("mla_jax.model").joinpath("configs", f"{name.lower()}.json").read_text()
    return json.loads(text)


V2_LITE = ModelConfig.from_hf(released("v2_lite"))
V2 = ModelConfig.from_hf(released("v2"))
V3 = ModelConfig.from_hf(released("v3"))  # R1 is the same model
V3_2 = ModelConfig.from_hf(released("v3_2"))
KIMI_K2 = ModelConfig.from_hf(released("kimi_k2"))
GLM_4_7_FLASH = ModelConfig.from_hf(released("glm_4_7_flash"))
GLM_5 = ModelConfig.from_hf(released("glm_5"))
V4_FLASH = V4Config.from_hf(released("v4_flash"))
V4_PRO = V4Config.from_hf(released("v4_pro"))
YOUTU_2B = ModelConfig.from_hf(released("youtu_2b"))

PRESETS: dict[str, AnyConfig] = {
    "V2_LITE": V2_LITE,
    "V2": V2,
    "V3": V3,
    "V3_2": V3_2,
    "V4_FLASH": V4_FLASH,
    "V4_PRO": V4_PRO,
    "KIMI_K2": KIMI_K2,
    "GLM_4_7_FLASH": GLM_4_7_FLASH,
    "GLM_5": GLM_5,
    "YOUTU_2B": YOUTU_2B,
}
