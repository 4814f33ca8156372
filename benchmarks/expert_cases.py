"""Shapes of the experts' benchmarks. Imports nothing, so that vLLM's process can read them too."""

from dataclasses import dataclass

__all__ = ["CASES", "MODELS", "Model"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Shapes of one layer's routed experts."""

    experts: int
    hidden: int
    width: int
    topk: int


MODELS = {
    "v2_lite": Model(experts=64, hidden=2048, width=1408, topk=6),
    "v3": Model(experts=256, hidden=7168, width=2048, topk=8),
}
TOKENS = {"v2_lite": (1, 8, 32, 128, 512, 8192), "v3": (1, 32, 128, 8192)}
CASES = {f"{m}_t{t}": (MODELS[m], t) for m in MODELS for t in TOKENS[m]}
