"""One process of several that serve a tiny model together (``-m tests.processes I N PORT FOLDER``).

Each has four devices, and prints a JSON object of findings; ``tests/test_processes.py`` judges.
"""

import json
import sys

import jax
import jax.numpy as jnp

from mla_jax.engine import Engine
from mla_jax.errors import ArgumentError
from mla_jax.placement import Placement
from tests import traffic

MIXES, KINDS = 6, 12


def main(folder: str) -> dict[str, object]:
    """What this process found."""
    mine, all_ = jax.local_devices(), jax.devices()
    others = [d for d in all_ if d not in mine]
    single = traffic.alone(traffic.engine(traffic.model(), devices=mine[0]))
    settings = {"page": traffic.PAGE, "max_requests": traffic.MOST, "prefill_chunk": 16}
    settings |= {"cache_format": "fp32", "dtype": jnp.float32, "ladder": traffic.LADDER}
    settings |= {"programs": f"{folder}/programs", "devices": all_}
    many = Engine.from_pretrained(folder, num_pages=traffic.PAGES, **settings)
    rungs = many.warm_up()
    tally = traffic.run(many, single, mixes=MIXES, kinds=KINDS)
    found: dict[str, object] = {"devices": [len(mine), many.placement.size]}
    found["wrong"], found["lost"] = tally.wrong, tally.lost_pages
    found["completed"], found["preemptions"] = tally.completed, tally.preemptions
    found["compiles"] = [rungs, many.stats().compiles]
    found["weights"] = sorted({held(leaf) for leaf in many._step.leaves})
    again = Engine.from_pretrained(folder, num_pages=traffic.PAGES, **settings)
    store = again._step._store
    store.save = lambda facts, program: found.setdefault("made", "anew")
    again.warm_up()
    found["stored"] = [again.stats().compiles, found.pop("made", "read")]
    (got,) = again.generate([[1, 2, 3]])
    (want,) = many.generate([[1, 2, 3]])
    found["again"] = got.token_ids == want.token_ids
    del settings["programs"]
    locked = Engine.from_pretrained(folder, num_pages=traffic.PAGES, **settings)
    locked._step._staging.page_locked = True  # as on GPUs: a buffer for each device of a process
    tally = traffic.run(locked, single, mixes=2, kinds=KINDS, seed=1)
    found["page_locked"] = [tally.wrong, tally.lost_pages, locked.stats().compiles]
    found["least"] = many.placement.least(10 + jax.process_index())
    found["refusals"] = []
    for devices in (others[:1], [*mine, others[0]][3:]):
        try:
            found["refusals"].append(f"none: {Placement.of(devices).processes}")
        except ArgumentError as error:
            found["refusals"].append(str(error))
    return found


def held(leaf: jax.Array) -> float:
    """Of a leaf, what this process's devices hold together."""
    return sum(shard.data.size for shard in leaf.addressable_shards) / leaf.size


if __name__ == "__main__":
    index, count, port = map(int, sys.argv[1:4])
    jax.distributed.initialize(f"localhost:{port}", count, index)
    print(json.dumps(main(sys.argv[4])))
