"""Golden checks of the FlashMLA work plans."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.metadata.compat.plan import balanced_plan, dense_sm_parts, sparse_row_lens
from tests.golden.common import Case, compare


@partial(jax.jit, static_argnames=("parts", "overhead", "block"))
def _plan(lens, *, parts, overhead, block):
    return balanced_plan(lens, parts=parts, overhead=overhead, block=block)


def _row_lens(given: dict):
    if "seqlens_k" in given:
        return jnp.asarray(given["seqlens_k"])

    def lens(name):
        if f"{name}_length" in given:
            return jnp.asarray(given[f"{name}_length"])
        return jnp.full((given["batch"],), given[name], jnp.int32) if name in given else None

    return sparse_row_lens(lens("topk"), lens("extra_topk"))


def flashmla_sched_meta(case: Case) -> str | None:
    given, want = case["in"], case["out"]
    parts = given["num_sm_parts"]
    if "config" in given:
        c = given["config"]
        ours = dense_sm_parts(c["num_sms"], queries=c["s_q"], heads=c["h_q"], kv_heads=c["h_kv"])
        if ours != parts:
            return f"{ours} SM parts, expected {parts}"
    plan = _plan(
        _row_lens(given),
        parts=parts,
        overhead=given["fixed_overhead_num_blocks"],
        block=given["block_size_n"],
    )
    table = np.asarray(plan.tile_scheduler_metadata)
    batch = plan.num_splits.shape[0] - 1
    got = {
        "sched_meta": table[:, :7],
        "num_splits": plan.num_splits,
        "idle_parts": np.flatnonzero(table[:, 0] >= batch).tolist(),
    }
    return compare(want, got)


CHECKS = {"flashmla_sched_meta": flashmla_sched_meta}
