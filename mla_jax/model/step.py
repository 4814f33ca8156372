"""The one compiled function of serving: (weights, caches, batch, tokens) -> (tokens, caches).

It also carries the history of tokens that penalties read (``token_history``).

One program per rung: the static half of a batch's decision. The module is split once at load; a
program takes flat leaves, because flattening a module on every token costs milliseconds of host
time. Metadata is built inside the program, by the builder that decided the batch. A step can take
the tokens that the step before it drew, on the device, before the host has read them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from mla_jax.errors import ArgumentError, MetadataError
from mla_jax.metadata.builder import AttentionMetadataBuilder
from mla_jax.metadata.common import build_common
from mla_jax.metadata.packed import Layout, Packed, pack
from mla_jax.metadata.staging import Staging, fetched, received
from mla_jax.model.activations import quantising
from mla_jax.model.loops import nested
from mla_jax.model.program_store import ProgramStore, source_of
from mla_jax.model.sampling import Sampled, SamplingBatch, sample
from mla_jax.model.sharding import derived_sharding, divided, divides, named_leaves, sharding_of
from mla_jax.model.token_history import Fed, HistoryStore, TokenHistory, history_specs
from mla_jax.pallas.device import DeviceInfo
from mla_jax.peers import MOST_DEVICES, PeerMemory, Peers, reach_each_other
from mla_jax.placement import Placement, put
from mla_jax.types import Array, Float, Int

__all__ = [
    "GPU_OPTIONS",
    "IN_KERNELS",
    "LOOPS_IN_GRAPHS",
    "Step",
    "StepBatch",
    "StepOutput",
    "drawn_by",
    "empty_batch",
]

DONATED = (2, 3, 4)
"""Arguments of a program whose memory its results take: caches, history and tokens.

So a step writes them where the step before did. Until a result is written, XLA may keep numbers in
its memory that it computes early, such as lengths. If that memory were new in each step, XLA would
change every kernel of the CUDA graph that reads them; in a loop over layers, all that read weights.
"""

LOOPS_IN_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
"""``jax.jit(…, compiler_options=…)`` on a GPU: XLA's CUDA graphs hold whole loops too.

By itself XLA leaves loops out, and the host reads a loop's condition at every turn.
"""

GPU_OPTIONS: dict[str, bool | int | str] = LOOPS_IN_GRAPHS | {
    "xla_gpu_enable_dynamic_slice_fusion": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_disable_hlo_passes": "rematerialization",
}
"""Options of a step whose layers are scanned: no weight is copied out of its stack, no gaps.

Products by cuBLAS and custom calls read a layer's weights at their address in the stack. XLA's own
Triton products would have them copied first, and merging two products copies both weights. Kernels
that do not need each other's results run at the same time. XLA's rematerialization is off: where
weights and caches take more than 80 % of the memory, it computes products again and saves nothing.
"""

IN_KERNELS: dict[str, bool | int | str] = {
    "xla_disable_hlo_passes": f"{GPU_OPTIONS['xla_disable_hlo_passes']},"
    "host-memory-transfer-asyncifier"
}
"""Further options of a step on one device: its kernels read and write the host's memory.

By itself XLA begins and awaits copies of the step's words and tokens, on streams of their own. A
step is one CUDA graph without them, and kernels follow each other after 0.1 us instead of 0.5.
V2-Lite, 12 layers, H200: one request 1,047 -> 1,029 us, eight 2,584 -> 2,534. Over several devices
this was not tried.
"""

UNROLLED: dict[str, bool | int | str] = {"xla_gpu_command_buffer_unroll_loops": True}
"""Further options of a step that has decodes only: its CUDA graph has the kernels layer by layer.

A loop inside of a graph costs a turn's start and end for each layer. Of 27 layers one request's
step took 3.95 ms with neither option, 3.32 unrolled, 2.87 with both (H200, steps behind each
other). XLA of JAX 0.11 fails at the second run of a graph that was unrolled around another loop,
such as that over chunks of cached context. So a step whose layers have a loop of their own is not
unrolled; decode by the backend ``xla`` has one.
"""

IN_PLACE: dict[str, bool | int | str] = {
    "xla_disable_hlo_passes": f"{GPU_OPTIONS['xla_disable_hlo_passes']},"
    "dynamic-slice-copy-fusion-async-wrapper",
    "xla_gpu_disable_async_collectives": "ALLREDUCE,ALLGATHER",
}
"""Further options of a step that has decodes only, over several devices.

XLA puts no sum over the devices into a CUDA graph. By itself it begins copies of small arrays
before a sum and awaits them behind it, and then leaves the kernels between out of graphs too: the
host makes 37 calls for a layer of V3. With these options copies and sums are made where the step
waits for them, and a layer is three graphs and two sums; one graph with all others where the
devices add up by ``PeerMemory``.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What the host decides in one step; decodes first, padding last."""

    token_ids: Int[Array | np.ndarray, "tokens"]  # or ``drawn_by(row)``; 0 on padding
    query_starts: Int[Array | np.ndarray, "starts"]  # exclusive sum of new tokens; tail repeats
    seq_lens: Int[Array | np.ndarray, "requests"]  # cached + new tokens; 0 on padding
    num_requests: Int[Array | np.ndarray, ""]  # real ones
    page_tables: dict[str, Int[Array | np.ndarray, "requests _"]]  # of each group; 0 = none
    decision: Any  # of the metadata builder; its static half is the program's
    sampling: SamplingBatch


def drawn_by(row: int) -> int:
    """In place of a token id: the token that the step before drew in this row of its requests."""
    return -1 - row


def empty_batch(decision: Any, groups: Sequence[str]) -> StepBatch:
    """A batch of nothing, in numpy: what a rung is compiled with."""
    bucket = decision.common_bucket
    n = bucket.requests
    return StepBatch(
        token_ids=np.zeros(bucket.tokens, np.int32),
        query_starts=np.zeros(n + 1, np.int32),
        seq_lens=np.zeros(n, np.int32),
        num_requests=np.zeros((), np.int32),
        page_tables={
            name: np.zeros((n, width), np.int32)
            for name, width in zip(groups, bucket.pages, strict=True)
        },
        decision=decision,
        sampling=SamplingBatch.nothing(n),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """One sampled token per request; rows of unfinished prompts and padding mean nothing."""

    drawn: Int[Array, "rows requests"]  # ids; bits of log-probabilities; the same of the likeliest
    tokens: Int[Array, "most_requests"]  # the same ids on the device; the next step takes them
    logits: Float[Array, "requests vocab"] | None  # only when asked for

    def read(self) -> tuple[Int[np.ndarray, "requests"], Float[np.ndarray, "requests"]]:
        """Token ids and their float32 log-probabilities, when the step is done.

        On a GPU the program itself leaves them in the host's memory: asking for two results
        afterwards takes as long again as a short step (0.8 ms).
        """
        token_ids, bits = fetched(self.drawn)[:2]
        return token_ids, bits.view(np.float32)

    def likeliest(self) -> tuple[Int[np.ndarray, "most _"], Float[np.ndarray, "most _"]]:
        """The likeliest tokens, as many as a request of the step wanted, and log-probabilities."""
        ids, bits = np.split(fetched(self.drawn)[2:], 2)
        return ids, bits.view(np.float32)


class Step:
    """A model split into flat leaves, and its programs.

    Args:
        model: called as ``model(tokens, meta, caches, derived=…, backend=…, placement=…)``, with
            ``logits(hidden)`` and ``derive()``.
        builder: of the family's metadata.
        placement: where weights, caches and batches are.
        backend: name of the backend of every operation that has one of that name.
        fp8_activations: products of many rows with e4m3 weights round rows to e4m3 too; None: if
            any weight is e4m3.
        want_logits: programs also return float32 logits.
        store: a folder of compiled programs, with what the model follows from.
        most_requests: of one step; those of the builder's largest rung by default.
        vocab: tokens that penalties and logit bias can change; None: no request may ask for them.
        history_rows: requests that may ask for them at once; as many as a step has by default.
    """

    def __init__(
        self,
        model: Any,
        builder: AttentionMetadataBuilder,
        *,
        placement: Placement | None = None,
        backend: str | None = None,
        fp8_activations: bool | None = False,
        want_logits: bool = False,
        store: tuple[str | Path, Sequence[object]] | None = None,
        most_requests: int | None = None,
        vocab: int | None = None,
        history_rows: int | None = None,
    ):
        self.placement = Placement.of(placement)
        self.builder, self.want_logits, self._backend = builder, want_logits, backend
        self._fp8_activations = fp8_activations
        self._staging = Staging(self.placement)
        largest = (rung.common_bucket.requests for rung in builder.rungs())
        self._most_requests = max(largest) if most_requests is None else most_requests
        self._vocab = vocab or 0
        self._history_rows = self._most_requests if history_rows is None else history_rows
        self._programs: dict[Layout, Callable[..., tuple[Array, Any]]] = {}
        self._store, self._facts = None, ()
        if store is not None:
            self._store = ProgramStore(store[0], self.placement)
            self._facts = (*store[1], source_of(type(model)), source_of(type(builder)))
        self._workspaces: dict[Layout, int] = {}  # bytes, of each program
        self._python = threading.Lock()
        self.memory: PeerMemory | None = None
        self.take(model)

    def take(self, model: Any) -> None:
        """Serve the weights that ``model`` has now, with everything derived from them anew.

        A model without memory for its weights (``Family.abstract``) can be compiled, not run.
        Interrupted, it goes on with those that it had.
        """
        graph, state = nnx.split(model)
        if self._fp8_activations is not False:
            quantised, parts = quantising(graph, state)
            graph = quantised if parts else graph
            if self._fp8_activations and not parts:
                allowed = "None or False: no weight is e4m3"
                hint = "Of a checkpoint in e4m3 from_pretrained(fp8_weights=True) keeps it so."
                raise ArgumentError("fp8_activations", True, allowed, hint)
        leaves, tree = jax.tree.flatten(state)
        paths = [*named_leaves(state)]
        shardings = [
            sharding_of(path, leaf.shape, leaf.dtype, self.placement)
            for path, leaf in zip(paths, leaves, strict=True)
        ]

        def derive(leaves: Sequence[Array]) -> Any:
            merged: Any = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
            return merged.derive()

        if (old := getattr(self, "leaves", None)) is not None:
            _check_same(paths, leaves, old)
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        if abstract:
            leaves = [_placed(x, s) for x, s in zip(leaves, shardings, strict=True)]
        else:
            leaves = put(leaves, shardings)
        with self.placement.working():
            derived = jax.eval_shape(derive, leaves)
            homes = jax.tree.map(lambda x: derived_sharding(x.shape, self.placement), derived)
            if abstract:
                derived = jax.tree.map(_placed, derived, homes)
            else:
                derived = jax.jit(derive, out_shardings=homes)(leaves)
        if self._shares_memory and not abstract and self.memory is None:
            self.memory = PeerMemory.of(self.placement)
        taken = graph, tree, leaves, derived
        self._graph, self._tree, self.leaves, self.derived = taken

    def forget_sums(self) -> None:
        """After a step that failed: devices may have made more or fewer sums than others."""
        if self.memory is not None:
            self.memory = PeerMemory.of(self.placement)

    @property
    def _peers(self) -> Peers | None:
        """What programs take of the devices' common memory."""
        if self.memory is not None:
            return self.memory.peers
        return PeerMemory.spec(self.placement) if self._shares_memory else None

    @cached_property
    def _shares_memory(self) -> bool:
        """Whether the devices add up by memory that all of them write.

        The sum of embeddings, and collecting logits, stay XLA's: before a program's first run it
        brings all devices together, so none waits inside of a kernel while another is made ready.
        """
        return _has_peers(self.placement) and divides(self.placement, self._vocab or 1)

    def _merged(self, leaves: Sequence[Array]) -> Any:
        """The module with these leaves."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))

    def no_tokens(self) -> Int[Array, "most_requests"]:
        """What a step takes that takes no token of the step before."""
        return put(np.zeros(self._most_requests, np.int32), self.placement.everywhere)

    @cached_property
    def _no_history(self) -> HistoryStore:
        """Of requests without penalties; its arrays have the same shapes as all others."""
        return self.new_history()

    def _history_specs(self) -> TokenHistory:
        return history_specs(self._history_rows, self._vocab, self.placement)

    def new_history(self) -> HistoryStore:
        """Room for the tokens of ``history_rows`` requests."""
        return HistoryStore(self._history_rows, self._vocab, self.placement)

    def run(
        self,
        caches: Mapping[str, Any],
        given: StepBatch | Packed,
        tokens: Int[Array, "most_requests"] | None = None,
        history: HistoryStore | None = None,
    ) -> tuple[StepOutput, dict[str, Any]]:
        """One step; ``caches`` and ``tokens`` are donated. ``given`` is of the host, packed or not.

        ``tokens`` are those of the step before, of which a batch takes what it has as ``drawn_by``.
        ``history`` is changed in place; it is needed where a request has a penalty or a bias.
        A rung that was not compiled before is compiled now. The call returns before the step is
        done.
        """
        packed = given if isinstance(given, Packed) else pack(given)
        program = self._programs.get(packed.layout)
        if program is None:
            program = self.compile(packed.layout, caches)
        tokens = self.no_tokens() if tokens is None else tokens
        history = self._no_history if history is None else history
        arguments = self.leaves, (self.derived, self._peers), caches, history.now, tokens
        words = np.asarray(packed.words)
        found = self._staging.run(lambda words: program(*arguments, words), words)
        drawn, (new_tokens, logits, new_caches, history.now) = found
        return StepOutput(drawn=drawn, tokens=new_tokens, logits=logits), new_caches

    def compile(self, layout: Layout, caches: Mapping[str, Any]) -> Callable[..., Any]:
        """The program of batches laid out so, from the folder if it is there.

        Several threads may compile different layouts at once.
        """
        if found := self._programs.get(layout):
            return found
        arguments = self._arguments(layout, caches)
        facts = (
            *self._facts,
            layout,
            self._backend,
            self._fp8_activations,
            self.want_logits,
            jax.tree.map(str, arguments),
            self._options(layout),  # ``_compiled`` may leave one out, by what it traces
        )
        program = None
        if self._store is not None:
            trees = self._trees(layout, arguments)
            program = self._store.load(facts, *trees)
        if program is None:
            program = self._compiled(layout, caches)
            if self._store is not None:
                self._store.save(facts, program)
        if memory := program.memory_analysis():
            self._workspaces[layout] = memory.temp_size_in_bytes
        self._programs[layout] = program
        return program

    @property
    def compiled(self) -> int:
        """Programs made ready."""
        return len(self._programs)

    @property
    def workspace_bytes(self) -> int:
        """The most that a program needs beside its arguments and results while it runs."""
        return max(self._workspaces.values(), default=0)

    def _options(self, layout: Layout) -> dict[str, bool | int | str] | None:
        """Of the compiler, for batches laid out so."""
        if not self.placement.on_gpu:
            return None
        decision = jax.tree.unflatten(layout.tree, layout.shapes).decision
        one = self.placement.size == 1
        options = GPU_OPTIONS | (IN_KERNELS if one else {})
        if not getattr(decision, "decodes_only", False):
            return options
        return options | UNROLLED | ({} if one else IN_PLACE)

    def _trees(self, layout: Layout, arguments: Any) -> tuple[Any, Any]:
        """Structure of a program's arguments and results, without tracing it."""
        _, _, caches, history, *_ = arguments
        out = 0, (0, 0 if self.want_logits else None, caches, history)
        return jax.tree.structure((arguments, {})), jax.tree.structure(out)

    def _compiled(self, layout: Layout, caches: Mapping[str, Any]) -> jax.stages.Compiled:
        """The program; a loop around another one is not unrolled, for XLA fails at that.

        Tracing and lowering are Python, which threads do not shorten: one program at a time, while
        XLA compiles those before it.
        """
        options = self._options(layout)
        with self._python:
            traced = self.trace(layout, caches)
            if options is not None and nested(traced.jaxpr):
                options = {k: v for k, v in options.items() if k not in UNROLLED}
            with self.placement.working():
                lowered = traced.lower()
        return lowered.compile(options)

    def _arguments(self, layout: Layout, caches: Mapping[str, Any]) -> Any:
        """Shapes and places of what the program of these batches takes."""
        words = jax.ShapeDtypeStruct((layout.size,), np.int32, sharding=self._staging.sharding)
        tokens = jax.ShapeDtypeStruct(
            (self._most_requests,), np.int32, sharding=self.placement.everywhere
        )
        carried = self.leaves, (self.derived, self._peers), dict(caches), self._history_specs()
        return *jax.tree.map(_spec, carried), tokens, words

    def trace(self, layout: Layout, caches: Mapping[str, Any]) -> jax.stages.Traced:
        """The program of batches laid out so, before XLA sees it."""
        arguments = self._arguments(layout, caches)

        def run(
            leaves: Sequence[Array],
            given: tuple[Any, Peers | None],
            caches: dict[str, Any],
            history: TokenHistory,
            tokens: Array,
            words: Array,
        ) -> tuple[Array, tuple[Array, Array | None, dict[str, Any], TokenHistory]]:
            batch: StepBatch = Packed(layout=layout, words=received(words)).unpack()
            return self._body(self._merged(leaves), given, caches, history, tokens, batch)

        if self._store is not None:
            run.__name__ = self._store.new_name()
        everywhere = self.placement.everywhere
        drawn = self.placement.page_locked if self._staging.page_locked else everywhere
        kept = jax.tree.map(lambda leaf: leaf.sharding, arguments[2:4])
        results = drawn, (everywhere, everywhere, *kept)
        jitted = jax.jit(run, donate_argnums=DONATED, out_shardings=results)
        with self.placement.working():
            return jitted.trace(*arguments)

    def _body(
        self,
        model: Any,
        given: tuple[Any, Peers | None],
        caches: dict[str, Any],
        history: TokenHistory,
        tokens: Int[Array, "most_requests"],
        batch: StepBatch,
    ) -> tuple[
        Int[Array, "rows requests"],
        tuple[
            Int[Array, "most_requests"],
            Float[Array, "requests vocab"] | None,
            dict[str, Any],
            TokenHistory,
        ],
    ]:
        """One step inside a program: metadata, layers, logits, draws."""
        query_starts = jnp.asarray(batch.query_starts)
        common = build_common(
            query_starts,
            jnp.asarray(batch.seq_lens),
            {name: jnp.asarray(table) for name, table in batch.page_tables.items()},
            jnp.asarray(batch.num_requests),
            bucket=batch.decision.common_bucket,
            groups=self.builder.groups,
        )
        meta = self.builder.build(common, batch.decision)
        ids = _fed(jnp.asarray(batch.token_ids), tokens)
        derived, peers = given
        hidden, caches = model(
            ids,
            meta,
            caches,
            derived=derived,
            backend=self._backend,
            placement=replace(self.placement, peers=peers),
        )
        # The barrier has XLA compute this early, beside other kernels: it reads the host's memory.
        last = lax.optimization_barrier(jnp.maximum(query_starts[1:] - 1, 0))
        logits = self._whole(model.logits(hidden[last]))
        fed = Fed(ids=ids, positions=common.positions, requests=common.requests, real=common.real)
        seen = history if self._vocab else None
        found = self._drawn(logits, batch.sampling, seen, fed)
        token_ids = found.token
        bits = (found.logprob[None], found.best_logprob)
        bits = [lax.bitcast_convert_type(x, jnp.int32) for x in bits]
        drawn = jnp.concatenate([token_ids[None], bits[0], found.best, bits[1]])
        if self._staging.page_locked:
            drawn = jax.device_put(drawn, jax.memory.Space.Host)
        if len(token_ids) > self._most_requests:
            raise MetadataError("Step: requests", len(token_ids), f"at most {self._most_requests}")
        tokens = jnp.pad(token_ids, (0, self._most_requests - len(token_ids)))
        history = history if found.history is None else found.history
        return drawn, (tokens, logits if self.want_logits else None, caches, history)

    def _drawn(
        self,
        logits: Float[Array, "requests vocab"],
        batch: SamplingBatch,
        history: TokenHistory | None,
        fed: Fed,
    ) -> Sampled:
        """``sample``; each of several devices draws all tokens, from all logits.

        Sums over the devices within its loops would keep these out of CUDA graphs. Then the host
        waits for the device at each turn, and sends no step ahead.
        """
        on_each = divided(sample, self.placement, given=None, returned=None)
        return on_each(logits, batch, history, fed)

    def _whole(self, logits: Float[Array, "requests vocab"]) -> Float[Array, "requests vocab"]:
        """All of them on every device."""
        if divides(self.placement, logits.shape[1]):
            # First where they are made, or XLA collects the weights of the output head instead.
            logits = lax.with_sharding_constraint(logits, self.placement.divided(1))
            logits = lax.with_sharding_constraint(logits, self.placement.everywhere)
        return logits


def _has_peers(placement: Placement) -> bool:
    """Whether the devices may write into each other's memory."""
    one = placement.processes == 1 and 2 <= placement.size <= MOST_DEVICES
    if not (one and placement.on_gpu and DeviceInfo.of(placement.device).sm == 90):
        return False
    return reach_each_other([*placement.mesh.devices.flat])


def _fed(ids: Int[Array, "tokens"], drawn: Int[Array, "most_requests"]) -> Int[Array, "tokens"]:
    """Token ids, those of the step before in their places: see ``drawn_by``."""
    return jnp.where(ids < 0, drawn.at[-1 - ids].get(mode="clip"), ids)


def _check_same(paths: Sequence[str], new: Sequence[Any], old: Sequence[Any]) -> None:
    """Refuse weights that programs which are compiled already cannot take."""

    def kind(leaf: Any) -> str:
        return f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"

    if len(new) != len(old):
        raise ArgumentError("take: model", f"{len(new)} weights", f"{len(old)}, as before")
    for path, a, b in zip(paths, new, old, strict=True):
        if kind(a) != kind(b):
            hint = "Another model needs another engine."
            raise ArgumentError(f"take: {path}", kind(a), f"{kind(b)}, as before", hint)


def _placed(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _spec(leaf: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
