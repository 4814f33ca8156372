"""The one compiled function of serving: (leaves, caches, batch) -> (tokens, caches).

One program per ``MLABucket``. The module is split once at load; a step takes its flat leaves,
because flattening a module on every token costs milliseconds of host time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from mla_jax.cache import LatentCache
from mla_jax.metadata.buckets import MLABucket
from mla_jax.metadata.mla import build_mla
from mla_jax.metadata.packed import Packed
from mla_jax.metadata.staging import StagedFunction, on_gpu, staged
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.sampling import SamplingBatch, sample
from mla_jax.types import Array, Float, Int

__all__ = ["LOOPS_IN_GRAPHS", "Step", "StepBatch", "StepOutput"]

LOOPS_IN_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
"""``jax.jit(…, compiler_options=…)`` on a GPU: XLA's CUDA graphs hold whole loops too.

By itself XLA leaves loops out, and the host reads a loop's condition at every turn.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What the host decides in one step; decodes first, padding last."""

    token_ids: Int[Array | np.ndarray, "tokens"]  # 0 on padding
    query_starts: Int[Array | np.ndarray, "starts"]  # exclusive sum of new tokens; tail repeats
    seq_lens: Int[Array | np.ndarray, "requests"]  # cached + new tokens; 0 on padding
    page_table: Int[Array | np.ndarray, "requests pages"]  # 0 (the null page) where there is none
    num_decodes: Int[Array | np.ndarray, ""]  # leading requests with one token each
    sampling: SamplingBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """One sampled token per request; rows of unfinished prompts and padding mean nothing."""

    drawn: Int[Array, "2 requests"]  # token ids; bits of their log-probabilities
    logits: Float[Array, "requests vocab"] | None  # only when asked for

    def read(self) -> tuple[Int[np.ndarray, "requests"], Float[np.ndarray, "requests"]]:
        """Token ids and their float32 log-probabilities, when the step is done.

        On a GPU the program itself leaves them in the host's memory: asking for two results
        afterwards takes as long again as a short step (0.8 ms).
        """
        token_ids, bits = np.asarray(self.drawn)
        return token_ids, bits.view(np.float32)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A model split into flat leaves, and its jitted step."""

    leaves: Sequence[Array] = field(repr=False)
    run: StagedFunction = field(repr=False)  # to ``(StepOutput, list[LatentCache])``

    @classmethod
    def of(cls, model: DeepseekV3, *, page: int, backend: str | None = None) -> "Step":
        """Split ``model`` and close over its structure only, never over its weights.

        ``run(leaves, caches, batch, bucket=…, want_logits=…)`` donates ``caches``; ``batch`` is
        a ``StepBatch`` of the device, or one of the host as ``pack`` lays it out.
        """
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        gpu = on_gpu()

        def run(
            leaves: Sequence[Array],
            caches: Sequence[LatentCache],
            given: StepBatch | Packed,
            *,
            bucket: MLABucket,
            want_logits: bool = False,
        ) -> tuple[StepOutput, list[LatentCache]]:
            batch: StepBatch = given.unpack() if isinstance(given, Packed) else given
            query_starts = jnp.asarray(batch.query_starts)
            model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
            meta = build_mla(
                query_starts,
                jnp.asarray(batch.seq_lens),
                jnp.asarray(batch.page_table),
                jnp.asarray(batch.num_decodes),
                bucket=bucket,
                page=page,
            )
            tokens = jnp.asarray(batch.token_ids)
            hidden, caches = model(tokens, meta, caches, backend=backend)
            last = jnp.maximum(query_starts[1:] - 1, 0)
            logits = model.logits(hidden[last])
            token_ids, logprobs = sample(logits, batch.sampling)
            drawn = jnp.stack([token_ids, lax.bitcast_convert_type(logprobs, jnp.int32)])
            if gpu:
                drawn = jax.device_put(drawn, jax.memory.Space.Host)
            return StepOutput(drawn=drawn, logits=logits if want_logits else None), caches

        options = LOOPS_IN_GRAPHS if gpu else None
        static = ("bucket", "want_logits")
        step = staged(
            run, at=2, static_argnames=static, donate_argnums=(1,), compiler_options=options
        )
        return cls(leaves=leaves, run=step)

    def compiled_programs(self) -> int:
        """Programs traced so far: one per bucket used (and per kind of output)."""
        return self.run.compiled_programs()
