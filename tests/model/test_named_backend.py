"""A backend that an engine names runs every operation that has one of that name, and no other."""

from collections.abc import Callable
from typing import Any

import pytest

from mla_jax import dispatch
from mla_jax.metadata.packed import pack
from mla_jax.model.step import empty_batch
from mla_jax.pallas.registry import Backend, Registry
from tests import traffic
from tests.model import sparse

CONFIG = sparse.config("glm_moe_dsa")
ENGINES: dict[str, Callable[..., Any]] = {
    "v3": lambda **more: traffic.V3.engine(traffic.V3.model(), **more),
    "v32": lambda **more: sparse.engine(
        sparse.model(CONFIG), CONFIG, ladder=sparse.ladder(), num_pages=12, **more
    ),
    "v4": lambda **more: traffic.V4.engine(traffic.V4.model(), **more),
}


def registered(name: str, ran: list[tuple[str, str]]) -> Registry:
    """Every backend ``name``, and every ``xla``, computes as ``xla`` does and says that it ran.

    Beside ``xla`` all others qualify too, and come first.
    """

    def told(backend: Backend, run: Callable[..., Any]) -> Backend:
        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append((backend.op, backend.name))
            return run(*args, **{k: v for k, v in kwargs.items() if k not in ("tuning", "plan")})

        return Backend(backend.op, backend.name, call)

    plain = {b.op: b for b in dispatch.REGISTRY.backends if b.name == "xla"}
    kept = [b for b in dispatch.REGISTRY.backends if name == "xla" or b.name in (name, "xla")]
    kept = [b for b in kept if b.op in plain]
    return Registry(tuple(told(b, plain[b.op].run) for b in kept))


@pytest.mark.parametrize("name", ["triton", "mosaic", "xla"])
@pytest.mark.parametrize("family", ENGINES)
def test_a_named_backend_runs_every_operation_that_has_it(family, name, monkeypatch):
    """Of all programs of the family, traced: decodes, prefills on cached context, both."""
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(dispatch, "REGISTRY", registered(name, ran))
    engine = ENGINES[family](backend=name)
    ran.clear()
    for rung in engine.builder.rungs():
        layout = pack(empty_batch(rung, [group.name for group in engine.groups])).layout
        engine._step.trace(layout, engine._caches)
    has = {b.op for b in dispatch.REGISTRY.backends if b.name == name}
    assert {op for op, used in ran if used != name} & has == set()
    assert {op for op, used in ran if used == name}, "some operation has a backend of that name"
