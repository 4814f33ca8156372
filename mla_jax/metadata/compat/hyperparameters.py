"""Attention hyper-parameters of every layer, and whether one set serves them all."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from mla_jax.errors import MetadataError

__all__ = [
    "AttentionImpl",
    "GlobalHyperparameters",
    "PerLayerParameters",
    "get_per_layer_parameters",
    "infer_global_hyperparameters",
]


@runtime_checkable
class AttentionImpl(Protocol):
    """What a layer's attention says of itself.

    It may also have ``sliding_window`` (keys to the left and right of a query, or None),
    ``logits_soft_cap`` and ``has_sinks``: what it lacks, its layer has not.
    """

    scale: float


@dataclass(frozen=True, kw_only=True)
class PerLayerParameters:
    """The hyper-parameters that a plan for all layers must agree on."""

    window_left: int  # -1 = no sliding window
    logits_soft_cap: float | None  # None = no cap
    sm_scale: float
    has_sinks: bool = False


_PLANNED = ("window_left", "logits_soft_cap", "sm_scale")
"""What a plan depends on; sinks are applied per layer and are only reported."""


@dataclass(frozen=True, kw_only=True)
class GlobalHyperparameters:
    """The first layer's values, and which layers differ from it in what."""

    parameters: PerLayerParameters
    differing: Mapping[str, Mapping[str, object]]  # field → layer → its value

    @property
    def has_same_window_lefts(self) -> bool:
        """Whether one window serves all layers."""
        return "window_left" not in self.differing

    @property
    def has_same_all_params(self) -> bool:
        """Whether all layers agree on everything, sinks included."""
        return not self.differing


def get_per_layer_parameters(
    layers: Mapping[str, AttentionImpl], impl_class: type
) -> dict[str, PerLayerParameters]:
    """Parameters of every layer by name.

    Raises:
        MetadataError: a layer's implementation is not an ``impl_class``.
    """
    for name, impl in layers.items():
        if not isinstance(impl, impl_class):
            raise MetadataError(
                f"attention implementation of {name}",
                type(impl).__name__,
                f"{impl_class.__name__} or a class derived from it",
            )
    return {
        name: PerLayerParameters(
            window_left=(getattr(impl, "sliding_window", None) or (-1,))[0],
            logits_soft_cap=getattr(impl, "logits_soft_cap", None),
            sm_scale=impl.scale,
            has_sinks=getattr(impl, "has_sinks", False),
        )
        for name, impl in layers.items()
    }


def infer_global_hyperparameters(
    per_layer: Mapping[str, PerLayerParameters], *, require_same: bool = True
) -> GlobalHyperparameters:
    """One set for all layers.

    Raises:
        MetadataError: there is no layer; or ``require_same`` and two layers differ in window,
            soft cap or scale: the message names every such layer, the field and both values.
    """
    if not per_layer:
        raise MetadataError("attention layers", "none", "one or more")
    reference_name, reference = next(iter(per_layer.items()))
    differing = {
        f.name: layers
        for f in fields(PerLayerParameters)
        if (layers := _differing(per_layer, f.name, getattr(reference, f.name)))
    }
    planned = {name: differing[name] for name in _PLANNED if name in differing}
    if require_same and planned:
        given = "; ".join(
            f"{name}: {reference_name}={getattr(reference, name)}, "
            + ", ".join(f"{layer}={value}" for layer, value in layers.items())
            for name, layers in planned.items()
        )
        raise MetadataError(
            "attention hyper-parameters",
            given,
            "one value for all layers",
            "Plan each group of equal layers by itself, or pass require_same=False.",
        )
    return GlobalHyperparameters(parameters=reference, differing=differing)


def _differing(
    per_layer: Mapping[str, PerLayerParameters], name: str, value: object
) -> dict[str, object]:
    return {layer: getattr(p, name) for layer, p in per_layer.items() if getattr(p, name) != value}
