"""Which prefill backend serves a model on a device: a registry, orders as data, a pure choice.

An explicit name means that backend or an error with every reason. Without a name the first
backend of the order without a reason against it is taken; if there is none, the error lists all.
The first generation fell back (to its flash-attention backend: on an invalid name, an unknown
capability, or when nothing qualified); that is not adopted.
"""

import importlib
from dataclasses import dataclass, field

from mla_jax.errors import ArgumentError, PrefillBackendError
from mla_jax.metadata.compat.prefill_backend import (
    DeviceCapability,
    MLAPrefillBackend,
    MLAPrefillSelectorConfig,
)

__all__ = ["CUSTOM", "LATER_ORDER", "SEED_ORDER", "PrefillRegistry", "Priority"]

CUSTOM = "CUSTOM"
"""A name without a class until one is registered."""


@dataclass(frozen=True, kw_only=True)
class Priority:
    """Names in order of preference, for devices and widths that match; None = any."""

    names: tuple[str, ...]
    major: int | None = None
    mla_dimensions: tuple[int, int, int] | None = None

    def matches(
        self, capability: DeviceCapability | None, config: MLAPrefillSelectorConfig
    ) -> bool:
        major = None if capability is None else capability.major
        return self.major in (None, major) and self.mla_dimensions in (None, config.mla_dimensions)


type Order = tuple[Priority, ...]
"""The first priority that matches counts."""

SEED_ORDER: Order = (
    Priority(major=10, names=("TRTLLM_RAGGED", "FLASHINFER", "CUDNN", "FLASH_ATTN")),
    Priority(names=("FLASH_ATTN",)),
)
"""The original's first order. Its backends are not ours: unregistered names count as refused."""

LATER_ORDER: Order = (
    Priority(
        major=10,
        mla_dimensions=(192, 64, 256),
        names=("TRTLLM_RAGGED", "FLASH_ATTN", "FLASHINFER", "TOKENSPEED_MLA"),
    ),
    Priority(major=10, names=("FLASH_ATTN", "TRTLLM_RAGGED", "FLASHINFER", "TOKENSPEED_MLA")),
    Priority(names=("FLASH_ATTN",)),
)
"""The original's order since."""


@dataclass(kw_only=True)
class PrefillRegistry:
    """Backends by name, as import paths ``package.module.Class``, imported when asked for."""

    op: str  # the operation's name in refusals
    order: Order
    paths: dict[str, str]
    overrides: dict[str, str] = field(default_factory=dict)
    _chosen: dict[tuple, type[MLAPrefillBackend]] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        """Valid names, ``CUSTOM`` included."""
        return (*self.paths, *(() if CUSTOM in self.paths else (CUSTOM,)))

    def register(self, name: str, path: str) -> None:
        """Add a backend under a new name, or give ``CUSTOM`` its class."""
        if not name.isidentifier():
            raise ArgumentError("name of a prefill backend", repr(name), "an identifier")
        if name in self.paths:
            hint = "Replace its class with override."
            raise ArgumentError("name of a prefill backend", name, "a name not yet taken", hint)
        self._chosen.clear()
        self.paths[name] = path

    def override(self, name: str, path: str) -> None:
        """Use another class under a known name until ``clear_overrides``."""
        self._known(name)
        self._chosen.clear()
        self.overrides[name] = path

    def clear_overrides(self) -> None:
        """Back to the registered classes."""
        self._chosen.clear()
        self.overrides.clear()

    def path(self, name: str) -> str:
        """Import path of a backend's class."""
        self._known(name)
        path = self.overrides.get(name, self.paths.get(name))
        if path is None:
            hint = "Call register or override with its import path first."
            raise ArgumentError("prefill backend", name, "a backend with a class", hint)
        return path

    def get(self, name: str) -> type[MLAPrefillBackend]:
        """The class of a backend.

        Raises:
            ArgumentError: the name is unknown or has no class.
            ImportError: its module or class does not exist.
        """
        path = self.path(name)
        module, _, attribute = path.rpartition(".")
        found = getattr(importlib.import_module(module), attribute, None)
        if found is None:
            raise ImportError(f"{module} has no {attribute}")
        return found

    def reasons(
        self,
        name: str,
        capability: DeviceCapability | None,
        config: MLAPrefillSelectorConfig,
    ) -> list[str]:
        """Why a backend cannot serve; empty if it can. A failed import is a reason."""
        if name not in self.names() or (name == CUSTOM and not self._has_custom()):
            return ["not registered"]
        try:
            backend = self.get(name)
        except Exception as error:  # whatever a module does when it is imported is a reason
            return [f"import of {self.path(name)} failed: {error}"]
        return backend.validate_configuration(capability, config)

    def ordered(
        self, capability: DeviceCapability | None, config: MLAPrefillSelectorConfig
    ) -> tuple[str, ...]:
        """Names to try, best first."""
        matching = (p.names for p in self.order if p.matches(capability, config))
        return next(matching, ())

    def select(
        self,
        capability: DeviceCapability | None,
        config: MLAPrefillSelectorConfig,
        backend: str | None = None,
    ) -> type[MLAPrefillBackend]:
        """The named backend, or the first of the order that qualifies.

        Raises:
            ArgumentError: the name is unknown or has no class.
            PrefillBackendError: the named backend, or every one, has reasons against it.
        """
        if backend is not None:
            self.path(backend)
            if why := self.reasons(backend, capability, config):
                accept = [
                    n
                    for n in self.ordered(capability, config)
                    if not self.reasons(n, capability, config)
                ]
                raise PrefillBackendError(self.op, backend, why, accept)
            return self.get(backend)
        key = (capability, config)
        if key not in self._chosen:
            self._chosen[key] = self._first(capability, config)
        return self._chosen[key]

    def _first(
        self, capability: DeviceCapability | None, config: MLAPrefillSelectorConfig
    ) -> type[MLAPrefillBackend]:
        refused = []
        for name in self.ordered(capability, config):
            why = self.reasons(name, capability, config)
            if not why:
                return self.get(name)
            refused.append(f"{name}: {', '.join(why)}")
        raise PrefillBackendError(self.op, None, refused or ["no backend in the order"])

    def _has_custom(self) -> bool:
        return CUSTOM in self.paths or CUSTOM in self.overrides

    def _known(self, name: str) -> None:
        if name not in self.names():
            raise ArgumentError("prefill backend", name, ", ".join(self.names()))
