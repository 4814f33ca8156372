"""Loops of a step's program, as XLA's CUDA graphs need them.

With a condition that is merely carried, batches of 32 decodes crashed on a GPU
(docs/log/step_graphs.md).
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl

from mla_jax import dispatch
from mla_jax.cache import LatentCache
from mla_jax.config import MLADims, RopeConfig
from mla_jax.metadata.packed import pack
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.loops import carried_conditions, nested
from mla_jax.model.step import GPU_OPTIONS, IN_KERNELS, UNROLLED, Step, empty_batch
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Registry
from mla_jax.placement import Placement
from tests import aot
from tests.model import sparse, tiny, v4
from tests.model.test_step import DECODE, MIXED, PAGE

X = jnp.zeros(4)


def twice(x):
    return lax.fori_loop(0, 2, lambda _, y: 2 * y, x)


def kernel(x):
    def double(x_ref, out_ref):
        out_ref[...] = twice(x_ref[...])

    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct((4,), jnp.float32))(x)


def scanned(body):
    return lambda x: lax.scan(lambda carry, _: (body(carry), None), x, length=3)[0]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (twice, False),
        (lambda x: twice(twice(x)), False),
        (lambda x: lax.while_loop(lambda y: y[0] < 9, twice, x), False),  # XLA does not unroll it
        (scanned(jnp.sin), False),
        (scanned(kernel), False),  # a kernel's loops are its own
        (scanned(twice), True),
        (scanned(jax.jit(twice)), True),
        (scanned(lambda x: lax.cond(x[0] > 0, twice, jnp.sin, x)), True),
        (jax.jit(scanned(jax.checkpoint(twice))), True),
    ],
)
def test_a_loop_inside_of_a_loop(program, expected):
    assert nested(jax.jit(program).trace(X).jaxpr) == expected


def counted(x):
    return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, 2 * s[1]), (x[0], x))[1]


def carried(x):
    return lax.while_loop(lambda s: s[0], lambda s: (~s[0], 2 * s[1]), (x[0] > 0, x))[1]


@pytest.mark.parametrize(
    ("program", "expected"),
    [(counted, 0), (carried, 1), (scanned(carried), 1), (lambda x: carried(carried(x)), 2)],
)
def test_conditions_that_are_merely_carried(program, expected):
    assert carried_conditions(jax.jit(program).trace(X).jaxpr) == expected


def programs_of(room, config):
    """Of every rung of an engine."""
    engine = room.engine(room.model(config), config)
    names = [group.name for group in engine.groups]
    layouts = [pack(empty_batch(decision, names)).layout for decision in engine.builder.rungs()]
    return [engine._step.trace(layout, engine._caches) for layout in layouts]


def programs_of_v3(config):
    """Decodes alone; decodes and prefills."""
    step = tiny.step(tiny.model(config), page=PAGE, vocab=config.vocab)
    caches = tiny.caches(config, num_pages=8, page=PAGE)
    return [step.trace(pack(tiny.batch(b, [], [])).layout, caches) for b in (DECODE, MIXED)]


@pytest.mark.parametrize("family", ["v3", "v32", "glm", "v4"])
def test_every_condition_of_a_step_is_computed(family):
    found = {
        "v3": lambda: programs_of_v3(tiny.config()),
        "v32": lambda: programs_of(sparse, sparse.config()),
        "glm": lambda: programs_of(sparse, sparse.config("glm_moe_dsa")),
        "v4": lambda: programs_of(v4, v4.config()),
    }[family]()
    assert len(found) > 1
    assert not any(carried_conditions(program.jaxpr) for program in found)


def test_layers_with_loops_are_not_unrolled(monkeypatch):
    """A step of decodes on a GPU: ``xla`` loops over the pages in every layer."""
    asked = []

    class Traced:
        def __init__(self, traced):
            self.jaxpr = traced.jaxpr

        def lower(self):
            return self

        def compile(self, options):
            asked.append(options)
            raise InterruptedError

    config = tiny.config()
    step = tiny.step(tiny.model(config), page=PAGE)
    caches = tiny.caches(config, num_pages=8, page=PAGE)
    layout = pack(tiny.batch(DECODE, [], [])).layout
    trace = Step.trace
    monkeypatch.setattr(Step, "trace", lambda *args: Traced(trace(*args)))
    monkeypatch.setattr(Placement, "on_gpu", True)
    for loops in (True, False):
        if not loops:
            monkeypatch.setattr("mla_jax.model.step.nested", lambda program: False)
        with pytest.raises(InterruptedError):
            step.compile(layout, caches)
    one = GPU_OPTIONS | IN_KERNELS
    assert asked == [one, one | UNROLLED]


def test_kernels_leave_no_loop_in_a_layer(monkeypatch):
    """With an H200's kernels a step of decodes may be unrolled; Triton's are not needed here."""
    backends = tuple(b for b in dispatch.REGISTRY.backends if b.name != "triton")
    monkeypatch.setattr(dispatch, "REGISTRY", Registry(backends))
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: aot.H200))
    config = tiny.config(
        dims=MLADims(heads=16, rank=512, nope=128, rope=64, v=128, q_rank=None),
        rope=RopeConfig(dim=64, theta=10000.0),
        layers=4,
        sparse_layers=(False, True, True, True),
    )
    module = nnx.eval_shape(
        lambda: DeepseekV3(config, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
    )
    step = tiny.step(module, page=64, vocab=config.vocab)
    cache = LatentCache.alloc(num_pages=8, page=64, rank=512, rope=64, layers=4, format="bf16")
    decode, mixed = (pack(tiny.batch(bucket, [], [])).layout for bucket in (DECODE, MIXED))
    assert not nested(step.trace(decode, {"latent": cache}).jaxpr)
    assert nested(step.trace(mixed, {"latent": cache}).jaxpr)  # chunks of cached context
