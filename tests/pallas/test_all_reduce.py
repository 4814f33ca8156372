"""Sums over devices: what each gives added up, the residual and the norm; the same on all."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mla_jax import ops, peers
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.model.sums import summed
from mla_jax.pallas.all_reduce import mosaic
from mla_jax.pallas.axes import AddNorm
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.grouped_matmul.ref import add_norm
from mla_jax.peers import PeerMemory, Peers
from mla_jax.placement import Placement
from tests import aot
from tests.pallas.exchange_machine import exchange

BACKENDS = [pytest.param("mosaic", marks=pytest.mark.gpu), "xla"]
EPS = 1e-6
AOT = aot.available()


@pytest.fixture
def mesh():
    """Of all devices."""
    count = len(jax.devices())
    if count < 2:
        pytest.skip(f"needs 2 devices; the backend here has {count}")
    return jax.make_mesh((count,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


class Program:
    """``run(x, residual, gain, peers)`` under ``shard_map``, the devices' results side by side.

    ``peers`` on GPUs alone: memory of its own for each program.
    """

    def __init__(self, mesh, run, outs=1):
        out = (P("d"),) * outs if outs > 1 else P("d")
        specs = P("d"), P(), P(), P("d")
        mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        self.jitted = jax.jit(mapped)
        placement = Placement.of(mesh)
        self.memory = PeerMemory.of(placement) if jax.default_backend() == "gpu" else None
        self.peers = None
        if self.memory is not None:
            table = np.asarray(self.memory.peers.table)
            self.peers = Peers(jax.device_put(table, NamedSharding(mesh, P("d"))))

    def __call__(self, *args):
        return self.jitted(*args, self.peers)


def given(rng, mesh, rows, hidden, dtype="bfloat16"):
    """Rows of each device, the residual and the gain; and the two sums in float64."""
    count = mesh.size
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    x, residual, gain = draw(count * rows, hidden), draw(rows, hidden), draw(hidden)
    x = jax.device_put(x, NamedSharding(mesh, P("d")))
    parts = np.asarray(x, np.float64).reshape(count, rows, hidden)
    return (x, residual, gain), parts


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 7168), (8, 7168), (3, 1024), (64, 5120)])
def test_the_sum(rng, mesh, kind, dtype, rows, hidden):
    args, parts = given(rng, mesh, rows, hidden, dtype)
    run = lambda x, r, g, p: ops.all_reduce(x, axis="d", peers=p, backend=kind)  # noqa: E731
    found = np.asarray(Program(mesh, run)(*args), np.float64).reshape(parts.shape)
    roundings = 1 if kind == "mosaic" else mesh.size
    bound = roundings * float(jnp.finfo(dtype).eps) * np.abs(parts).sum(0)
    assert (np.abs(found[0] - parts.sum(0)) <= bound).all()
    assert (found == found[0]).all(), "the same bits on all devices"


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 7168), (8, 2048), (64, 8192)])
def test_the_residual_and_its_norm(rng, mesh, kind, rows, hidden):
    """``h`` is rounded before it is normalised."""
    args, parts = given(rng, mesh, rows, hidden)

    def run(x, residual, gain, peers):
        then = AddNorm(residual=residual, gain=gain, eps=EPS)
        y = ops.all_reduce(x, axis="d", peers=peers, backend=kind)
        x, y = jax.lax.optimization_barrier((x, y))  # one sum after the other
        return y, *ops.all_reduce(x, axis="d", peers=peers, then=then, backend=kind)

    y, h, normed = (np.asarray(a, np.float64) for a in Program(mesh, run, outs=3)(*args))
    residual, gain = (np.asarray(a, np.float64) for a in args[1:])
    y, h, normed = (a.reshape(parts.shape) for a in (y, h, normed))
    assert (np.abs(h - residual - y) <= 2.0**-8 * np.abs(residual + y)).all()
    want = gain * h / np.sqrt((h**2).mean(-1, keepdims=True) + EPS)
    assert (np.abs(normed - want) <= 2.0**-7 * np.abs(want)).all()
    for found in (y, h, normed):
        assert (found == found[0]).all(), "the same bits on all devices"


@pytest.mark.parametrize("kind", BACKENDS)
def test_rows_are_apart(rng, mesh, kind):
    """NaN in one row stays there; a row's bits do not depend on the others, nor on their number."""
    (x, residual, gain), parts = given(rng, mesh, 8, 1024)
    run = lambda x, r, g, p: ops.all_reduce(  # noqa: E731
        x, axis="d", peers=p, then=AddNorm(residual=r, gain=g, eps=EPS), backend=kind
    )
    call = Program(mesh, run, outs=2)
    clean = [np.asarray(a, np.float32) for a in call(x, residual, gain)]
    poisoned = np.asarray(x).reshape(parts.shape).copy()
    poisoned[:, 5] = np.nan
    found = [np.asarray(a, np.float32) for a in call(poisoned.reshape(x.shape), residual, gain)]
    for a, b in zip(clean, found, strict=True):
        a, b = a.reshape(parts.shape), b.reshape(parts.shape)
        rest = np.arange(8) != 5
        assert (a[:, rest] == b[:, rest]).all() and np.isnan(b[:, 5]).all()
    alone = np.asarray(x).reshape(parts.shape)[:, 2:3].reshape(-1, x.shape[1])
    found = [np.asarray(a, np.float32) for a in call(alone, residual[2:3], gain)]
    for a, b in zip(clean, found, strict=True):
        assert (a.reshape(parts.shape)[:, 2] == b.reshape(mesh.size, -1)).all()


@pytest.mark.parametrize("kind", BACKENDS)
def test_one_after_the_other(rng, mesh, kind):
    """What a device gave may be overwritten as soon as it has its sum: 200 in a row, ten times."""
    args, _ = given(rng, mesh, 8, 2048)

    def run(x, residual, gain, peers):
        def turn(_, x):
            then = AddNorm(residual=residual, gain=gain, eps=EPS)
            h, normed = ops.all_reduce(x, axis="d", peers=peers, then=then, backend=kind)
            mine = 1 + jax.lax.axis_index("d").astype(x.dtype)
            return normed * mine - h * jnp.asarray(0.25, x.dtype)

        return jax.lax.fori_loop(0, 200, turn, x)

    call = Program(mesh, run)
    first = np.asarray(call(*args), np.float32)
    assert np.isfinite(first).all()
    for _ in range(10):
        assert (np.asarray(call(*args), np.float32) == first).all()


@pytest.mark.parametrize(
    ("peer", "error", "expected"), [(1, 0, True), (0, 0, False), (1, 999, False)]
)
def test_devices_that_cannot_reach_each_other(peer, error, expected, monkeypatch):
    """Then XLA adds up. Devices that are not here have no number: programs are only compiled."""
    asked = []

    class Driver:
        def cuDeviceGet(self, to, number):
            to._obj.value = 10 + number
            return 0

        def cuDeviceCanAccessPeer(self, to, one, other):
            asked.append((one.value, other.value))
            to._obj.value = peer
            return error

    devices = [SimpleNamespace(local_hardware_id=i) for i in range(3)]
    monkeypatch.setattr(peers.ctypes, "CDLL", lambda _: Driver())
    assert peers.reach_each_other(devices) is expected
    pairs = {(a, b) for a in (10, 11, 12) for b in (10, 11, 12) if a != b}
    assert set(asked) == pairs if expected else asked

    assert peers.reach_each_other([SimpleNamespace(local_hardware_id=None)] * 2)


@pytest.mark.parametrize(("devices", "row"), [(2, 0), (3, 5), (4, 127)])
def test_the_exchange_in_any_order(rng, devices, row):
    """Each device gets what all have of each sum, however far the others are ahead or behind."""
    rows = rng.integers(0, 2**32, (12, devices, 128, 4), dtype=np.uint32)
    found = exchange(rows, row, rng)
    for device in range(devices):
        assert (found[:, device] == rows).all()


def test_layers_add_up(rng, mesh):
    """A product whose channels the devices divide, onto the residual: as one device has it."""
    n = mesh.size
    x, w, residual, gain = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((3, 8 * n), (8 * n, 32), (3, 32), (32,))
    )
    then = AddNorm(residual=residual, gain=gain, eps=EPS)
    product = functools.partial(jnp.matmul, precision="highest")
    on_all = summed(product, Placement.of(mesh), given=(1, 0), then=then)
    for found, want in zip(jax.jit(on_all)(x, w), add_norm(product(x, w), then), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_refusals(mesh):
    x = jnp.ones((2 * mesh.size, 1024), jnp.bfloat16)
    with pytest.raises(ArgumentError, match=r"all_reduce: axis.*shard_map"):
        ops.all_reduce(x, axis="d")
    then = AddNorm(residual=x, gain=x[0], eps=EPS)
    wrong = Program(mesh, lambda x, *_: ops.all_reduce(x, axis="d", then=then))
    with pytest.raises(ArgumentError, match="residual"):
        wrong(x, x, x)
    alone = Program(mesh, lambda x, *_: ops.all_reduce(x, axis="d", backend="mosaic"))
    with pytest.raises(UnsupportedError, match="peers=False"):  # no memory of all devices
        alone(x, x, x)


@pytest.mark.skipif(bool(AOT), reason=AOT or "available")
@pytest.mark.parametrize("hidden", [1024, 7168])
@pytest.mark.parametrize("devices", [2, 8])
def test_compiles_for_sm90(devices, hidden, monkeypatch):
    """One kernel, which no sum of XLA's is beside."""
    monkeypatch.setattr(DeviceInfo, "current", lambda: aot.H200)
    mesh = jax.sharding.Mesh(np.array(aot.h200s(devices)), ("d",))

    def run(x, residual, gain, peers):
        then = AddNorm(residual=residual, gain=gain, eps=EPS)
        return mosaic.all_reduce(x, axis="d", peers=peers, then=then)

    def spec(*shape, of=()):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*of)))

    lowered = Program(mesh, run, outs=2).jitted.lower(
        spec(8 * devices, hidden, of=("d",)), spec(8, hidden), spec(hidden),
        PeerMemory.spec(Placement.of(list(mesh.devices.flat))),
    )  # fmt: skip
    text = lowered.compile().as_text()
    assert text.count("mosaic_gpu") and "all-reduce" not in text
