"""Golden checks of the batch functions and of the metadata common to all MLA layers.

Where a case carries the answers of two revisions (``out`` and ``out_doc``, or ``v0`` and
``v0_32``), both of our forms are checked where both exist. The one documented answer that is
not reproduced: ``split_decodes_and_prefills`` follows the later rule (see there).
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import (
    GroupSpec,
    HostBatch,
    build_common,
    slot_mapping,
    token_to_request,
)
from mla_jax.metadata.compat.advance import DecodeInputs, advance_step
from mla_jax.metadata.compat.chunked_context import (
    EqualChunks,
    PackedChunk,
    pack_chunks,
    plan_equal_chunks,
)
from mla_jax.metadata.compat.hyperparameters import (
    PerLayerParameters,
    get_per_layer_parameters,
    infer_global_hyperparameters,
)
from mla_jax.metadata.compat.legacy import MLACommonMetadata, to_decodes_first
from mla_jax.metadata.compat.legacy_builder import (
    CapturedShape,
    LegacyBuilder,
    SequenceGroup,
    SequenceStep,
    sequence_slots,
)
from mla_jax.metadata.compat.local_attention import (
    LocalAttentionBatch,
    build_local_attention,
    make_local_attention_virtual_batches,
)
from mla_jax.metadata.compat.reorder import (
    Reordering,
    reorder_batch_to_four_regions,
    reorder_batch_to_split_decodes_and_prefills,
)
from mla_jax.metadata.compat.workspace import (
    chunked_prefill_workspace_size,
    first_generation_workspace_size,
)
from mla_jax.metadata.context_parallel import ContextShard, dcp_local_seq_lens
from mla_jax.metadata.split import split_decodes_and_prefills
from tests.golden.common import REFUSALS, Case, Check, compare, judge

RAISES = {"raises": "refusal"}


_build_common = jax.jit(build_common, static_argnames=("bucket", "groups", "shard"))
_build_local = jax.jit(build_local_attention, static_argnames=("chunk", "page"))
_slot_mapping = jax.jit(slot_mapping, static_argnames=("page", "shard"))
_token_to_request = jax.jit(token_to_request, static_argnames="tokens")
_advance_step = jax.jit(advance_step, static_argnames="block_size")


@partial(jax.jit, static_argnames=("ranks", "interleave"))
def _local_lens(lens, rank, *, ranks: int, interleave: int):
    return dcp_local_seq_lens(lens, ContextShard(ranks=ranks, rank=rank, interleave=interleave))


def _rung(n: int) -> int:
    """A power of four, so that the cases of a file share programs and padding is exercised."""
    return max(16, 4 ** ((n - 1).bit_length() + 1 >> 1))


def _padded(array, *shape: int, mode: str = "constant"):
    """On the device as int32, grown to ``shape``."""
    array = np.asarray(array)
    width = [(0, n - have) for n, have in zip(shape, array.shape, strict=True)]
    return jnp.asarray(np.pad(array, width, mode=mode).astype(np.int32))


def _common(starts, lens, table, *, page: int):
    """The batch in a bucket that holds it; most of a file's cases fall into the smallest."""
    r, t, w = _rung(len(lens)), max(256, _rung(int(starts[-1]))), max(64, _rung(table.shape[1]))
    return _build_common(
        _padded(starts, r + 1, mode="edge"),
        _padded(lens, r),
        {"latent": _padded(table, r, w)},
        jnp.asarray(len(lens), jnp.int32),
        bucket=CommonBucket(requests=r, tokens=t, pages=(w,)),
        groups=(GroupSpec("latent", page),),
    )


def _first(*found: str | None) -> str | None:
    return next((f for f in found if f), None)


def _host(given: dict) -> HostBatch:
    starts = given["query_start_loc"]
    lens = np.diff(starts)
    return HostBatch(
        query_starts=starts,
        seq_lens=lens,
        exact=True,
        is_prefilling=given.get("is_prefilling"),
        num_requests=len(lens),
        num_tokens=given["num_actual_tokens"],
        max_query_len=given["max_query_len"],
        max_seq_len=given["max_query_len"],
    )


def split(case: Case) -> str | None:
    """The later rule throughout: of a mixed uniform batch it ignores zero-length requests, and
    unordered batches end at the first prefill. ``out_doc`` is what the older rule gave."""
    given = case["in"]

    def run():
        return split_decodes_and_prefills(
            _host(given),
            given["decode_threshold"],
            require_uniform=given["require_uniform"],
            treat_short_extends_as_decodes=given.get("treat_short_extends_as_decodes", True),
        )._asdict()

    return judge(case["out"], run)


def _reordering(r: Reordering) -> dict:
    return {"order": r.order, "modified": r.modified, "swaps": r.swaps}


def reorder(case: Case) -> str | None:
    """Four regions against ``out``; two regions against ``out_doc``, or ``out`` when both agree."""
    given = case["in"]
    scheduled, threshold = given["num_scheduled_tokens"], given["decode_threshold"]
    four = reorder_batch_to_four_regions(
        scheduled, given["num_computed_tokens"], given["num_prompt_tokens"], threshold
    )
    two = reorder_batch_to_split_decodes_and_prefills(scheduled, threshold)
    want_two = case.get("out_doc")
    if want_two is None:
        want_two = {k: case["out"][k] for k in ("order", "modified")}
    front = sum(s <= threshold for s in scheduled)
    return _first(
        compare(case["out"], _reordering(four)),
        compare(want_two, _reordering(two) | {"num_front": front}, where="out_doc"),
    )


def local_attention(case: Case) -> str | None:
    """The host form, and the device form in the bucket of the batch, cut to the real items."""
    given = case["in"]
    starts, lens, table = given["query_start_loc"], given["seq_lens"], given["block_table"]
    chunk, page = given["attn_chunk_size"], given["block_size"]

    def on_host():
        return make_local_attention_virtual_batches(chunk, starts, lens, table, page)

    def on_device():
        # the table's last page stands in every column that padding adds: clipping lands there
        columns = max(64, _rung(table.shape[1]))
        wide = np.pad(table, ((0, 0), (0, columns - table.shape[1])), mode="edge")
        # virtual requests do not depend on slots, so one page size serves all cases
        return _build_local(_common(starts, lens, wide, page=1), chunk=chunk, page=page)

    def entries(b: LocalAttentionBatch) -> dict:
        b = jax.tree.map(np.asarray, b)
        n = int(b.num_virtual)
        return {
            "seqlens_q_local": b.query_lens[:n],
            "cu_seqlens_q_local": b.query_starts[: n + 1],
            "seqlens_k_local": b.seq_lens[:n],
            "block_table_local": b.page_table[:n],
            "max_query_len": int(b.query_lens.max()),
            "max_seq_len": int(b.seq_lens.max()),
            "num_virtual_batches": n,
        }

    return _first(
        judge(case["out"], lambda: entries(on_host())),
        judge(case["out"], lambda: entries(on_device()), where="out (device)"),
    )


def slots(case: Case) -> str | None:
    given = case["in"]
    tokens, starts, table = given["max_num_tokens"], given["query_start_loc"], given["block_table"]

    def run():
        shard = ContextShard(
            ranks=given["cp_world_size"], rank=given["cp_rank"], interleave=given["cp_interleave"]
        )
        r, t = max(_rung(len(starts)), len(table) + 1), _rung(tokens)
        request, real = _token_to_request(_padded(starts, r, mode="edge"), tokens=t)
        got = _slot_mapping(
            _padded(table, r - 1, _rung(table.shape[1])),
            request,
            _padded(given["positions"][:tokens], t),
            real,
            page=given["block_size"],
            shard=shard,
        )
        return {"slot_mapping": np.asarray(got)[:tokens]}

    return judge(case["out"], run)


def slots_v0(case: Case) -> str | None:
    return judge(case["out"], lambda: {"slot_mapping": sequence_slots(**case["in"])})


class _A(SimpleNamespace):
    """The implementation asked for."""


class _B(_A):
    """Derived from it."""


class _C(SimpleNamespace):
    """Unrelated."""


def _layers(layers: list[dict]) -> dict:
    classes = {"A": _A, "B": _B, "C": _C}
    return {
        layer["name"]: classes[layer["impl_class"]](
            **{k: v for k, v in layer.items() if k not in ("name", "impl_class")}
        )
        for layer in layers
    }


def _parameters(p: PerLayerParameters) -> dict:
    return {
        "window_left": p.window_left,
        "logits_soft_cap": p.logits_soft_cap,
        "sm_scale": p.sm_scale,
    }


def hyperparameters(case: Case) -> str | None:
    """Flags against ``out``; the refusing form must refuse exactly where ``out_doc`` does."""
    want, layers = case["out"], _layers(case["in"]["layers"])

    def run():
        per_layer = get_per_layer_parameters(layers, _A)
        got = {"per_layer": {name: _parameters(p) for name, p in per_layer.items()}}
        try:
            found = infer_global_hyperparameters(per_layer, require_same=False)
        except REFUSALS:
            return got | {"global": RAISES}
        return got | {
            "global": _parameters(found.parameters),
            "has_same_window_lefts": found.has_same_window_lefts,
            "has_same_all_params": found.has_same_all_params,
        }

    def refusing():
        found = infer_global_hyperparameters(get_per_layer_parameters(layers, _A))
        return _parameters(found.parameters)

    if "raises" in want:
        return judge(want, run)
    if len(want["per_layer"]) != len(layers):
        return f"out.per_layer: {len(layers)} layers given, expected {len(want['per_layer'])}"
    if "raises" in want["global"]:
        want = want | {"global": RAISES}
    strict = case.get("out_doc", want["global"])
    return _first(judge(want, run), judge(strict, refusing, where="out_doc"))


def dcp(case: Case) -> str | None:
    """On the device, for one rank or for all."""
    given = case["in"]
    ranks, interleave = given["dcp_size"], given["interleave"]
    asked = given["dcp_rank"]

    def run():
        n = len(given["seq_lens"])
        lens = _padded(given["seq_lens"], _rung(n))
        each = [
            np.asarray(_local_lens(lens, jnp.int32(k), ranks=ranks, interleave=interleave))[:n]
            for k in (range(ranks) if asked is None else [asked])
        ]
        return {"local_seq_lens": np.stack(each, axis=1) if asked is None else each[0]}

    return judge(case["out"], run)


def token_to_req(case: Case) -> str | None:
    given = case["in"]

    def run():
        tokens = given["num_tokens"]
        starts = np.minimum(given["query_start_loc"], given["num_mapped_tokens"])
        padded = _padded(starts, _rung(len(starts)), mode="edge")
        request, _ = _token_to_request(padded, tokens=_rung(tokens))
        return {"token_to_req_indices": np.asarray(request)[:tokens]}

    return judge(case["out"], run)


def _legacy_for_advance(given: dict) -> MLACommonMetadata:
    lens = given["seq_lens_tensor"]
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    return MLACommonMetadata(
        num_prefills=given["num_prefills"],
        num_prefill_tokens=given["num_prefill_tokens"],
        num_decode_tokens=given["num_decode_tokens"],
        use_cuda_graph=given["num_seqs"] > given["num_queries"],
        slot_mapping=given["slot_mapping"],
        seq_lens=tuple(given["seq_lens"]),
        seq_lens_tensor=lens,
        context_lens_tensor=lens[: given["num_queries"]] - 1,
        block_tables=given["block_tables"],
        query_start_loc=np.arange(given["num_queries"] + 1, dtype=np.int32),
        seq_start_loc=starts,
        max_query_len=given["max_query_len"],
        max_decode_query_len=1,
        max_prefill_seq_len=given["max_prefill_seq_len"],
        max_decode_seq_len=given["max_decode_seq_len"],
        context_chunks=None,
    )


def advance(case: Case) -> str | None:
    """Counters by the host half, tokens, positions, lengths and slots by the device half."""
    given = case["in"]

    def run():
        seqs, queries = given["num_seqs"], given["num_queries"]
        meta = _legacy_for_advance(given).advance(
            num_seqs=seqs,
            num_queries=queries,
            turn_prefills_into_decodes=given["turn_prefills_into_decodes"],
        )
        arrays = {k: given[k] for k in ("input_tokens", "input_positions")}
        arrays |= {"seq_lens": given["seq_lens_tensor"], "slot_mapping": given["slot_mapping"]}
        rows, table = _rung(seqs), given["block_tables"]
        step = _advance_step(
            DecodeInputs(**{k: _padded(a[:seqs], rows) for k, a in arrays.items()}),
            _padded(given["sampled_token_ids"], rows),
            _padded(table, rows, _rung(table.shape[1])),
            jnp.asarray(queries, jnp.int32),
            block_size=given["block_size"],
        )
        step = jax.tree.map(lambda a: np.asarray(a)[:seqs], step)
        if not np.array_equal(step.seq_lens, meta.seq_lens_tensor):
            return {"seq_lens_tensor": f"host {meta.seq_lens_tensor}, device {step.seq_lens}"}
        return {
            "input_tokens": step.input_tokens,
            "input_positions": step.input_positions,
            "seq_lens_tensor": step.seq_lens,
            "slot_mapping": step.slot_mapping,
        } | {k: getattr(meta, k) for k in _ADVANCED}

    return judge(case["out"], run)


_ADVANCED = (
    "seq_lens",
    "max_decode_seq_len",
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "max_prefill_seq_len",
    "max_query_len",
)


def _equal_chunks(plan: EqualChunks | None) -> dict:
    names = ("starts", "cu_seq_lens", "seq_tot", "max_seq_lens")
    return {f"context_chunk_{n}": None if plan is None else getattr(plan, n) for n in names}


def chunks_v0(case: Case) -> str | None:
    given = case["in"]

    def run():
        plan = plan_equal_chunks(
            np.array(given["context_lens"], np.int32),
            given["num_prefills"],
            given["context_chunk_workspace_size"],
            given["page_size"],
        )
        if plan is None:
            return None
        sizes = {"max_context_chunk": plan.share, "num_chunks": len(plan.seq_tot)}
        return _equal_chunks(plan) | sizes

    return judge(case["out"], run)


def _packed_chunk(c: PackedChunk) -> dict:
    same = (
        "request_slice",
        "token_slice",
        "continuation_token_end",
        "is_continuation",
        "num_context_tokens",
        "query_start_loc",
        "cu_seq_lens",
        "seq_lens",
        "all_rows_active",
        "padded_local_seq_lens",
        "padded_local_cu_seq_lens",
        "num_local_context_tokens",
        "local_starts",
    )
    return {name: getattr(c, name) for name in same} | {
        "starts": c.local_starts,
        "max_query_len": int(np.diff(c.query_start_loc).max()),
        "max_seq_len": int(c.seq_lens.max()),
        "local_context_lens_allranks": c.local_context_lens,
    }


def chunks_v1(case: Case) -> str | None:
    given = case["in"]

    def run():
        if not given["align_chunk_to_block"]:
            raise NotImplementedError("chunks always end at pages here")
        plan = pack_chunks(
            np.array(given["context_lens"], np.int32),
            given["query_start_loc"],
            given["workspace_size"],
            given["block_size"],
            ContextShard(ranks=given["dcp_size"], rank=0, interleave=given["dcp_interleave"]),
        )
        if plan is None:
            return None
        return {
            "chunks": [_packed_chunk(c) for c in plan.chunks],
            "empty_token_slices": plan.empty_token_slices,
        }

    return judge(case["out"], run)


def _groups(groups: list[dict]) -> list[SequenceGroup]:
    return [
        SequenceGroup(
            is_prompt=g["is_prompt"],
            prefix_cache_hit=g["prefix_cache_hit"],
            block_tables=g["block_tables"]
            and {int(seq): table for seq, table in g["block_tables"].items()},
            seqs=[SequenceStep(**s) for s in g["seqs"]],
        )
        for g in groups
    ]


def _legacy_entries(meta: MLACommonMetadata | None) -> dict | None:
    if meta is None:
        return None
    entries = {k: v for k, v in vars(meta).items() if not isinstance(v, MLACommonMetadata)}
    return entries | _equal_chunks(meta.context_chunks)


def metadata_v0(case: Case) -> str | None:
    """The object and its views; then the same step, decodes first, derived on the device."""
    given = case["in"]
    pad = given["cuda_graph_pad_size"]

    def build() -> MLACommonMetadata:
        builder = LegacyBuilder(
            block_size=given["block_size"],
            workspace_rows=given["workspace"],
            chunked_prefill=given["chunked_prefill"],
            prefix_caching=given["prefix_caching"],
            sliding_window=given["sliding_window"],
        )
        return builder.build(
            _groups(given["groups"]),
            given["seq_lens"],
            given["query_lens"],
            captured=None
            if pad == -1
            else CapturedShape(tokens=given["batch_size"], pad=pad, pages=given["graph_shape"][1]),
        )

    def run():
        meta = build()
        return _legacy_entries(meta) | {
            "prefill_metadata": _legacy_entries(meta.prefill_metadata),
            "decode_metadata": _legacy_entries(meta.decode_metadata),
        }

    found = judge(case["out"], run)
    return found or ("raises" not in case["out"] and _device_slots(case, build())) or None


def _device_slots(case: Case, meta: MLACommonMetadata) -> str | None:
    """Slots of the converted step, back in the old order, where the table holds the pages.

    The old table lacks the pages of prompts that see only themselves, and the old slots lack
    positions outside a window, or the pages before its blocks; a captured table may be cut.
    """
    page = case["in"]["block_size"]
    host, table, order = to_decodes_first(meta)
    common = _common(host.query_starts, host.seq_lens, table, page=page)
    back = order.inverse()
    real = len(order.tokens)
    got, positions, request = (
        back.per_token(np.asarray(a)[:real])
        for a in (common.slots["latent"], common.positions, common.requests)
    )
    want = np.asarray(case["out"]["slot_mapping"])[:real]
    held = positions < table.shape[1] * page
    held &= table.any(axis=1)[request] if table.size else False
    groups = case["in"]["groups"]
    if not any(g["prefix_cache_hit"] for g in groups):  # with a hit every row is whole
        cut = np.array([s["curr_sliding_window_block"] > 0 for g in groups for s in g["seqs"]])
        held &= ~order.per_request(cut)[request]
    held &= want >= 0
    return compare(want[held], got[held], where="converted.slot_mapping")


def workspace(case: Case) -> str | None:
    """Both generations; context parallelism exists in the later one only."""
    given = case["in"]
    sizes = {k: given[k] for k in ("max_model_len", "max_num_seqs")} | {"page": given["block_size"]}
    shard = ContextShard(ranks=given["dcp_size"], rank=0, interleave=given["dcp_interleave"])
    runs = {
        "v0": lambda: first_generation_workspace_size(**sizes),
        "v0_32": lambda: chunked_prefill_workspace_size(**sizes, shard=shard),
    }
    found = (judge(w, runs[k], where=f"out.{k}") for k, w in case["out"].items())
    return _first(*found)


CHECKS: dict[str, Check] = {
    "advance_step": advance,
    "chunked_prefill_workspace_size": workspace,
    "dcp_local_seq_lens": dcp,
    "hyperparameters": hyperparameters,
    "make_local_attention_virtual_batches": local_attention,
    "mla_chunked_context_v0": chunks_v0,
    "mla_chunked_context_v1": chunks_v1,
    "mla_metadata_build_v0": metadata_v0,
    "reorder_batch_to_split_decodes_and_prefills": reorder,
    "slot_mapping": slots,
    "slot_mapping_v0": slots_v0,
    "split_decodes_and_prefills": split,
    "token_to_req_indices": token_to_req,
}
