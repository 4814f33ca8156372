"""Choice and refusal, with backends that only exist here."""

import jax
import pytest

from mla_jax import ops
from mla_jax.errors import ArgumentError, UnsupportedError
from mla_jax.pallas.device import DeviceInfo
from mla_jax.pallas.registry import Backend, OneOf, Problem, Registry, Requirement, Within

CPU = DeviceInfo(platform="cpu", kind="cpu")
A100 = DeviceInfo(platform="gpu", kind="A100", sm=80, sms=108)
H200 = DeviceInfo(platform="gpu", kind="H200", sm=90, sms=132)


def backend(name, **requirement):
    return Backend(
        op="mla_decode", name=name, function=print, requirement=Requirement(**requirement)
    )


REGISTRY = Registry(
    (
        backend("mosaic", features={"page": OneOf(64, 128)}, sm=OneOf(90)),
        backend(
            "triton", features={"rank": Within(low=16, high=512, multiple=16)}, sm=Within(low=80)
        ),
        backend("missing", packages=("no_such_package",)),
        backend("xla"),
    )
)


def problem(**features):
    return Problem.of("mla_decode", **({"page": 64, "rank": 512} | features))


@pytest.mark.parametrize(
    ("device", "features", "name"),
    [
        (H200, {}, "mosaic"),
        (H200, {"page": 16}, "triton"),
        (H200, {"page": 16, "rank": 520}, "xla"),
        (A100, {}, "triton"),
        (CPU, {}, "xla"),
    ],
)
def test_the_first_that_qualifies(device, features, name):
    assert REGISTRY.choose(problem(**features), device).name == name


@pytest.mark.parametrize(
    ("name", "device", "features", "text"),
    [
        (
            "mosaic", A100, {"page": 16},
            "mla_decode[mosaic]: page=16 not in {64, 128}; device sm80, needs sm90. "
            "Would accept: triton, xla.",
        ),
        (
            "triton", CPU, {"rank": 520},
            "mla_decode[triton]: rank=520 not in [16, 512] multiples of 16; "
            "device cpu, needs sm80 or newer. Would accept: xla.",
        ),
        (
            "missing", CPU, {},
            "mla_decode[missing]: package no_such_package is not installed. Would accept: xla.",
        ),
        (
            "mosiac", CPU, {},
            "mla_decode[mosiac]: no backend of this name (registered: mosaic, triton, missing, "
            "xla). Would accept: xla.",
        ),
    ],
)  # fmt: skip
def test_a_name_means_that_one_or_an_error(name, device, features, text):
    with pytest.raises(UnsupportedError) as refusal:
        REGISTRY.choose(problem(**features), device, name)
    assert str(refusal.value) == text


def test_a_device_of_unknown_size_is_refused_where_that_matters():
    unknown = DeviceInfo(platform="gpu", kind="NVIDIA H999", sm=90)
    sizes = Registry((backend("mosaic", sm=OneOf(90), workers=True), backend("xla")))
    assert sizes.choose(problem(), unknown).name == "xla"
    with pytest.raises(UnsupportedError, match="H999: the number of its multiprocessors is unk"):
        sizes.choose(problem(), unknown, "mosaic")
    assert sizes.choose(problem(), H200).name == "mosaic"
    for op in ("mla_decode", "mla_prefill"):
        (kernel,) = [b for b in ops.REGISTRY.of(op) if b.name == "mosaic"]
        assert kernel.requirement.workers


def test_none_qualifies():
    only = Registry(REGISTRY.backends[:1])
    with pytest.raises(UnsupportedError, match=r"mla_decode: mosaic: device cpu, needs sm90\."):
        only.choose(problem(), CPU)
    with pytest.raises(UnsupportedError, match="sparse: no such operation"):
        only.choose(Problem.of("sparse"), CPU)


def test_a_feature_the_problem_lacks_is_refused():
    with pytest.raises(UnsupportedError, match="page=None not in"):
        REGISTRY.choose(Problem.of("mla_decode", rank=512), H200, "mosaic")


def test_explain_and_matrix():
    text = REGISTRY.explain(problem(page=16), A100)
    assert text.splitlines() == [
        "mla_decode(page=16, rank=512) on sm80 (A100)",
        "  mosaic: refused: page=16 not in {64, 128}; device sm80, needs sm90",
        "  triton: accepted",
        "  missing: refused: package no_such_package is not installed",
        "  xla: accepted",
        "runs triton",
    ]
    assert "refused: mla_decode[mosaic]" in REGISTRY.explain(problem(), CPU, "mosaic")
    rows = REGISTRY.support_matrix().splitlines()
    assert rows[2] == "| `mla_decode` | `mosaic` | sm90 | page in {64, 128} | none |"
    assert len(rows) == 2 + len(REGISTRY.backends)


def test_problems_are_keys():
    assert problem() == problem() and hash(problem()) == hash(problem())
    assert problem()["page"] == 64 and problem() != problem(page=16)


def test_a_backend_is_registered_once():
    with pytest.raises(ArgumentError, match="twice"):
        Registry((backend("xla"), backend("xla")))


def test_every_operation_runs_everywhere():
    for op in {b.op for b in ops.REGISTRY.backends}:
        assert ops.REGISTRY.choose(Problem.of(op), CPU).name == "xla"


def test_devices():
    here = DeviceInfo.current()
    assert here == DeviceInfo.of(jax.local_devices()[0]) and hash(here)
    assert (CPU.name, H200.name) == ("cpu", "sm90")
    h200 = DeviceInfo.of(jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu"))
    assert (h200.sm, h200.sms, h200.shared_memory) == (90, 132, 232448)
    for kind, sms in (("NVIDIA H20", 78), ("NVIDIA H100 PCIe", 114)):
        device = jax.sharding.AbstractDevice(kind, None, "gpu")
        assert (DeviceInfo.of(device).sm, DeviceInfo.of(device).sms) == (90, sms)
    part = DeviceInfo.of(jax.sharding.AbstractDevice("NVIDIA H200", 60, "gpu"))
    assert part.sms == 60, "what a device says goes before the table"
    with jax.default_device(jax.local_devices()[0]):
        assert DeviceInfo.current() == here
