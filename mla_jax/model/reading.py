"""Single tensors of a checkpoint folder, widened to float32, by their released names."""

from pathlib import Path

import numpy as np

from mla_jax.errors import WeightsError
from mla_jax.model.safetensors_io import Checkpoint
from mla_jax.model.weights import dequantise

__all__ = ["Tensors"]


class Tensors:
    """``tensors[name]`` is that tensor in float32; block-scaled e4m3 is multiplied out."""

    def __init__(self, folder: str | Path):
        """Raises WeightsError for a folder without safetensors."""
        self.folder = Path(folder)
        self._found = Checkpoint.open(folder).tensors

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> np.ndarray:
        q = self._read(name)
        return dequantise(q, self.scales(name)) if self.scaled(name) else q.astype(np.float32)

    def scaled(self, name: str) -> bool:
        """Whether the tensor is stored as codes and one scale for each block."""
        return name in self._found and self._found[name].dtype == "F8_E4M3"

    def scales(self, name: str) -> np.ndarray:
        """float32 multipliers of the blocks of 128 x 128."""
        return self._read(f"{name}_scale_inv").astype(np.float32)

    def codes(self, name: str) -> np.ndarray:
        """The stored values before any scale, float32."""
        return self._read(name).astype(np.float32)

    def expert(self, layer: str, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gate, up and down matrices ``[out, in]`` of one expert, in either layout."""
        owner = f"{layer}.mlp.experts"
        if f"{owner}.gate_up_proj" in self:
            both = self._found[f"{owner}.gate_up_proj"].read(number).astype(np.float32)
            down = self._found[f"{owner}.down_proj"].read(number).astype(np.float32)
            gate, up = np.split(both, 2)
            return gate, up, down
        names = (f"{owner}.{number}.{part}_proj.weight" for part in ("gate", "up", "down"))
        gate, up, down = (self[name] for name in names)
        return gate, up, down

    def _read(self, name: str) -> np.ndarray:
        if name not in self._found:
            raise WeightsError(str(self.folder), [f"missing: {name}"])
        return self._found[name].read()
