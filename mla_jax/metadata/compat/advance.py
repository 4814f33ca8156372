"""The next decode step's inputs from this one's, on the device: no host between the steps."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import slot_mapping
from mla_jax.metadata.mla import MLAMetadata
from mla_jax.types import PAD_SLOT, Array, Int

__all__ = ["DecodeInputs", "advance_mla", "advance_step"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """One token of every sequence; sequences past the queries are padding."""

    input_tokens: Int[Array, "requests"]
    input_positions: Int[Array, "requests"]
    seq_lens: Int[Array, "requests"]  # including the input token
    slot_mapping: Int[Array, "requests"]


def advance_step(
    inputs: DecodeInputs,
    sampled_token_ids: Int[Array, "requests"],
    block_tables: Int[Array, "requests pages"],
    num_queries: Int[Array, ""],
    *,
    block_size: int,
) -> DecodeInputs:
    """Feed back the sampled token: it sits at the old length, and the length grows by one.

    Padding gets token 0, position 0, slot -1 and keeps its length. A position outside the page
    table has slot -1: the host must have allocated pages for all steps it skips.
    """
    rows = jnp.arange(inputs.seq_lens.shape[0], dtype=jnp.int32)
    real = rows < num_queries
    positions = jnp.where(real, inputs.seq_lens, 0)
    return DecodeInputs(
        input_tokens=jnp.where(real, sampled_token_ids, 0),
        input_positions=positions,
        seq_lens=inputs.seq_lens + real.astype(jnp.int32),
        slot_mapping=slot_mapping(block_tables, rows, positions, real, page=block_size),
    )


def advance_mla(meta: MLAMetadata, *, page: int) -> MLAMetadata:
    """The same step forward for the metadata of a decode-only bucket; padding stays padding."""
    decode = meta.decode
    if decode is None or meta.prefill is not None or decode.max_query_len != 1:
        raise MetadataError(
            "bucket to advance", meta.bucket, "decodes of one token each, no prefills"
        )
    inputs = DecodeInputs(
        input_tokens=jnp.zeros_like(meta.positions),
        input_positions=meta.positions,
        seq_lens=decode.seq_lens,
        slot_mapping=jnp.full_like(meta.slots, PAD_SLOT),
    )
    step = advance_step(
        inputs, inputs.input_tokens, decode.page_table, meta.num_decode_tokens, block_size=page
    )
    return replace(
        meta,
        positions=step.input_positions,
        slots=step.slot_mapping,
        decode=replace(decode, seq_lens=step.seq_lens),
    )
