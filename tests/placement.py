"""A tiny model on eight devices against one, in a process of its own (``-m tests.placement``).

Prints a JSON object of findings, which ``tests/test_placement.py`` judges.
"""

import json
import re
import tempfile
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from mla_jax import ops
from mla_jax.engine import Engine
from mla_jax.errors import ArgumentError
from mla_jax.metadata.packed import pack
from mla_jax.metadata.staging import staged
from mla_jax.model.sharding import divisible_axes, named_leaves
from mla_jax.model.step import empty_batch
from mla_jax.model.weights import save
from mla_jax.placement import Placement
from tests import traffic

MIXES, KINDS = 40, 20
SETTINGS = {"cache_format": "fp32", "dtype": jnp.float32, "ladder": traffic.LADDER}


def main() -> dict[str, object]:
    """What was found."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    mesh = jax.make_mesh((8,), ("x",))
    found: dict[str, object] = {"devices": len(jax.devices())}
    found["explicit"] = mesh.axis_types == (AxisType.Explicit,)
    model = traffic.model()
    one = traffic.engine(model, devices=jax.devices()[0])
    single = traffic.alone(one)
    with tempfile.TemporaryDirectory() as root:
        weights = named_leaves(nnx.state(model, nnx.Param))
        save(root, traffic.CONFIG, weights)

        def load(devices: object) -> Engine:
            return Engine.from_pretrained(
                root,
                devices=devices,
                num_pages=traffic.PAGES,
                page=traffic.PAGE,
                max_requests=traffic.MOST,
                prefill_chunk=16,
                programs=f"{root}/programs",
                **SETTINGS,
            )

        many = load(mesh)
        found["rungs"] = many.warm_up()
        tally = traffic.run(many, single, mixes=MIXES, kinds=KINDS)
        found["wrong"], found["lost"] = tally.wrong, tally.lost_pages
        found["completed"], found["preemptions"] = tally.completed, tally.preemptions
        found["compiles"] = many.stats().compiles
        found["leaves"] = leaves(many, weights)
        blocks = [block for stack in many._step.derived for block in stack]
        found["absorbed"] = [shares(x) for block in blocks for x in jax.tree.leaves(block.absorbed)]
        found["gains"] = [shares(block.after) for block in blocks]
        found["caches"] = [same_everywhere(leaf) for leaf in jax.tree.leaves(many._caches)]

        for leaf in jax.tree.leaves(many._caches):  # an error of the devices
            leaf.delete()
        try:
            many.generate([[1, 2, 3]])
        except RuntimeError as error:
            found["error"] = str(error)[:80]
        tally = traffic.run(many, single, mixes=3, kinds=KINDS, seed=1)
        found["after"] = [tally.wrong, many.stats().recoveries, many.stats().compiles]
        found["caches_after"] = [same_everywhere(leaf) for leaf in jax.tree.leaves(many._caches)]

        auto = jax.make_mesh((8,), ("y",), axis_types=(AxisType.Auto,))
        again = load(auto)  # from the folder of programs
        tally = traffic.run(again, single, mixes=3, kinds=KINDS, seed=2)
        found["auto"] = [tally.wrong, again.placement == many.placement, shares_of(again)]
        found["stored"] = [again.stats().compiles, len(list(Path(root, "programs").iterdir()))]
        with jax.set_mesh(mesh):  # whatever mesh its user works under
            inside = load(list(mesh.devices.flat))
            tally = traffic.run(inside, single, mixes=3, kinds=KINDS, seed=3)
            lone = traffic.engine(model, devices=jax.devices()[1])
            (got,) = lone.generate([[1, 2, 3]])
        found["inside"] = tally.wrong
        found["lone"] = got.token_ids == one.generate([[1, 2, 3]])[0].token_ids
        two = traffic.engine(model, devices=jax.devices()[:3])  # three divide nothing here
        locked = traffic.engine(model, devices=jax.devices())
        locked._step._staging.page_locked = True  # as on GPUs: a buffer for each device
        tally = traffic.run(locked, single, mixes=10, kinds=KINDS, seed=4)
        found["page_locked"] = [tally.wrong, tally.lost_pages, locked.stats().compiles]
        found["staged"] = staged_sums(locked.placement)
        with patch.object(ops, "in_one_kernel", lambda *_, **__: True):  # as on GPUs
            fused = traffic.engine(model, devices=jax.devices())
            tally = traffic.run(fused, single, mixes=3, kinds=KINDS, seed=5)
        found["appended"] = tally.wrong
        found["collected"] = {
            "wanted": collected(traffic.engine(model, devices=jax.devices(), want_logits=True)),
            "not": collected(locked),
        }
        found["three"] = [
            shares_of(two),
            [c.token_ids for c in two.generate([[1, 2, 3]])]
            == [c.token_ids for c in one.generate([[1, 2, 3]])],
        ]
    found["refusals"] = []
    for devices in (jax.make_mesh((4, 2), ("x", "y")), [*jax.devices(), jax.devices()[0]]):
        try:
            Placement.of(devices)
        except ArgumentError as error:
            found["refusals"].append(str(error))
    return found


def staged_sums(placement: Placement) -> list[int]:
    """Sums of words that a function takes through page-locked memory, and its programs."""
    run = staged(lambda packed, x: x + packed.unpack()[0].sum(), placement=placement)
    run._staging.page_locked = True
    x = jax.device_put(jnp.int32(0), placement.everywhere)
    for i in range(8):
        x = run(pack((np.full(5, i, np.int32),)), x)
    return [int(x), run.compiled_programs()]


def collected(engine: Engine) -> list[str]:
    """Dtypes of arrays of logits' sizes that a step of decodes collects from all devices."""
    step, decision = engine._step, engine.builder.rungs()[0]
    layout = pack(empty_batch(decision, [group.name for group in engine.groups])).layout
    text = step.compile(layout, engine._caches).as_text()
    found = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    return [kind for kind, sizes in found if str(traffic.CONFIG.vocab) in sizes.split(",")]


def shares(leaf: jax.Array) -> float:
    """Of a leaf, the part that each device holds, if all hold as much."""
    sizes = {shard.data.size for shard in leaf.addressable_shards}
    assert len(sizes) == 1, sizes
    return sizes.pop() / leaf.size


def shares_of(engine: Engine) -> list[float]:
    """The parts that devices hold of the leaves."""
    return sorted({shares(leaf) for leaf in engine._step.leaves})


def leaves(engine: Engine, weights: dict[str, jax.Array]) -> dict[str, list[object]]:
    """Of each leaf: whether its axis is one that is divided, its share, whether it is right."""
    state = jax.tree.unflatten(engine._step._tree, engine._step.leaves)
    found: dict[str, list[object]] = {}
    for name, leaf in named_leaves(state).items():
        same = np.array_equal(np.asarray(leaf), np.asarray(weights[name]))
        found[name] = [bool(divisible_axes(name, leaf.dtype)), shares(leaf), same]
    return found


def same_everywhere(leaf: jax.Array) -> list[object]:
    """On how many devices, what share each, and whether all hold the same."""
    parts = [np.asarray(shard.data) for shard in leaf.addressable_shards]
    equal = all(np.array_equal(parts[0], part) for part in parts[1:])
    return [len(parts), shares(leaf), equal]


if __name__ == "__main__":
    print(json.dumps(main()))
