"""``tools/sanitize.sh -m benchmarks.sanitize``: small cases of dense decode, for a sanitizer.

Plan, kernel and merge, each case compared with float32.
"""

import functools

import jax

from benchmarks import decode

SMALL = (  # requests, queries, heads, keys: pieces of one block and of several, idle tiles, chains
    (3, 1, 16, 700),
    (2, 2, 128, 1000),
    (1, 1, 8, 6000),
    (1, 1, 128, 3000),
    (140, 1, 64, 65),
)


def main() -> None:
    """Each case by both plans, once."""
    for sizes in SMALL:
        for changes in ((), (("batch_invariant", True), ("chunk", 3))):
            case = decode.Case(*sizes, tuning=changes)
            q, args = decode.inputs(case, *decode.random_arrays(case))
            plan = jax.jit(lambda *a, case=case: decode.plan_of(case, *a))(*args[4:])
            state = jax.jit(lambda *a, case=case: decode.attend(case, *a))(*args, plan)
            reference = jax.jit(functools.partial(decode.reference, case))
            error = decode.error_of(case, reference, q, args, state)
            print(f"{case.name}: error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
