"""Find seeds whose decisions are far from flipping: ``python -m tests.parity.scan [NAME ...]``."""

import sys

from tests.parity import reference
from tests.parity.families import FAMILIES, VARIATIONS

ROUTER_GAP = 2e-5
GREEDY_GAP = 1e-3


def main(names: list[str]) -> None:
    for case in FAMILIES + VARIATIONS:
        if names and case.name not in names:
            continue
        for seed in range(case.seed, case.seed + 40):
            tried = case.reseed(seed)
            ref = reference.greedy(reference.build(tried), reference.prompts(tried))
            good = ref.router_gap >= ROUTER_GAP and ref.greedy_gap >= GREEDY_GAP
            if good or seed == case.seed:
                print(
                    f"{case.name:20s} seed {seed:3d}  router {ref.router_gap:.1e}  "
                    f"greedy {ref.greedy_gap:.1e}",
                    flush=True,
                )
            if good:
                break


if __name__ == "__main__":
    main(sys.argv[1:])
