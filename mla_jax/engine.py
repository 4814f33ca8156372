"""Serving: add requests, step, and collect tokens.

Host state (page pool, scheduler: plain Python) and device state (weights, caches) never mix:
a step moves one ``StepBatch`` to the device and reads only what was drawn.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from mla_jax import ops
from mla_jax.cache import LatentCache
from mla_jax.checks import checked_size
from mla_jax.config import ModelConfig
from mla_jax.errors import EngineError
from mla_jax.inputs import check_cache_fits, checked_params, checked_prompts, checked_wishes
from mla_jax.metadata.buckets import MLABucket, MLALadder
from mla_jax.metadata.packed import pack
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.prefill_crossover import PrefillCrossover
from mla_jax.model.sampling import SamplingBatch, SamplingParams
from mla_jax.model.step import Step, StepBatch
from mla_jax.model.weights import Progress, checked_config, load, place
from mla_jax.pages import PagePool
from mla_jax.scheduler import Completion, Event, Plan, Scheduler
from mla_jax.types import cdiv

__all__ = ["Engine", "Stats", "load_model"]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts since the engine was built, and what it holds now."""

    steps: int
    prompt_tokens: int  # fed in chunks, recomputed ones included
    new_tokens: int  # drawn
    live: int  # requests that have not ended
    pages: int  # that can be given
    pages_used: int
    pages_peak: int
    preemptions: int
    compiles: int  # programs compiled; equal to len(buckets)
    buckets: dict[MLABucket, int]  # steps run in each


def load_model(
    folder: str | Path, *, dtype: DTypeLike = jnp.bfloat16, progress: Progress | None = None
) -> tuple[DeepseekV3, ModelConfig]:
    """The model of a Hugging Face folder, ready to decode.

    Raises:
        ConfigError: config.json has a key that this library does not implement.
        WeightsError: the safetensors do not hold that model.
    """
    config = checked_config(folder)
    return _read_model(folder, config, dtype=dtype, progress=progress), config


def _read_model(
    folder: str | Path, config: ModelConfig, *, dtype: DTypeLike, progress: Progress | None
) -> DeepseekV3:
    dtype = jnp.dtype(dtype)
    model = nnx.eval_shape(lambda: DeepseekV3(config, dtype=dtype, rngs=nnx.Rngs(0)))
    place(model, load(folder, config, dtype=dtype, progress=progress))
    model.absorb()
    return model


class Engine:
    """One model, its cache and its queue. Not thread-safe.

    Args:
        model: with weights loaded and decode weights absorbed; or a function that makes it, called
            once every setting was accepted and the cache allocated.
        num_pages: pages of each layer's cache; page 0 is never given to a request.
        page: tokens in a page.
        max_requests: requests running at once; others queue.
        prefill_chunk: prompt tokens of one step, over all requests.
        max_model_len: prompt and new tokens of one request; the model's own limit by default.
        cache_format: how a token is stored, a key of ``cache.FORMATS``.
        ladder: static sizes of a step; powers of two by default.
        context_rows: workspace rows for cached context of prefills, at most 4096 by default.
        absorb_prefills: let steps of short prefills on long contexts run over their pages where
            the device's measured rates say that this is faster (docs/chunked_context.md).
        want_logits: keep every step's logits in ``Completion.logits`` (for tests and parity).
    """

    def __init__(
        self,
        model: DeepseekV3 | Callable[[], DeepseekV3],
        config: ModelConfig,
        *,
        num_pages: int,
        page: int = 64,
        max_requests: int = 32,
        prefill_chunk: int = 512,
        max_model_len: int | None = None,
        cache_format: str = "bf16",
        ladder: MLALadder | None = None,
        context_rows: int | None = None,
        backend: str | None = None,
        absorb_prefills: bool = True,
        want_logits: bool = False,
    ):
        length = config.max_positions
        if max_model_len is not None:
            allowed = f"at most {config.max_positions} positions"
            length = checked_size("max_model_len", max_model_len, high=length, allowed=allowed)
        if context_rows is not None:
            checked_size("context_rows", context_rows)
        names = ops.REGISTRY.names
        if backend is not None and backend not in names:
            raise EngineError("backend", backend, f"{' or '.join(names)}, or None: the best")
        self.config = config
        self.want_logits = want_logits
        self.pool = PagePool(num_pages)
        self.scheduler = Scheduler(
            pool=self.pool,
            page=page,
            max_requests=max_requests,
            max_prefill_tokens=prefill_chunk,
            max_model_len=length,
            vocab=config.vocab,
            eos=config.eos,
        )
        self.ladder = ladder or MLALadder.default(
            max_requests=max_requests,
            max_prefill_tokens=prefill_chunk,
            max_pages=cdiv(length, page),
            context_rows=min(length, 4096) if context_rows is None else context_rows,
        )
        device = jax.devices()[0]
        check_cache_fits(
            config, num_pages=num_pages, page=page, cache_format=cache_format, device=device
        )
        caches = [
            LatentCache.alloc(
                num_pages=num_pages,
                page=page,
                rank=config.dims.rank,
                rope=config.dims.rope,
                format=cache_format,
            )
            for _ in range(config.layers)
        ]
        self._caches = jax.device_put(caches, device)  # without a copy; see ``staged``
        if not isinstance(model, DeepseekV3):
            model = model()
        self._step = Step.of(model, page=page, backend=backend)
        self._crossover = None
        if absorb_prefills:
            self._crossover = PrefillCrossover.for_cache(
                config.dims,
                dtype=model.embed.embedding[...].dtype,
                format=self._caches[0].format,
                page=page,
                backend=backend,
            )
        self._ids = itertools.count()
        self._unread: list[Event] = []  # for the next ``step``
        self._claimed: dict[str, list[Event]] = {}  # for ``generate`` and ``stream``
        self._logits: dict[str, list[np.ndarray]] = {}
        self._buckets: Counter[MLABucket] = Counter()
        self._prompt_tokens = self._new_tokens = 0

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        progress: Progress | None = None,
        ignore_keys: Collection[str] = (),
        **settings: Any,
    ) -> "Engine":
        """An engine for a Hugging Face folder; ``settings`` are those of the constructor.

        ``ignore_keys`` names keys of config.json to pass over, as in ``ModelConfig.from_hf``.

        Raises:
            ConfigError: config.json has a key that this library does not implement.
            WeightsError: the safetensors do not hold that model.
        """
        config = checked_config(folder, ignore_keys=ignore_keys)
        read = partial(_read_model, folder, config, dtype=dtype, progress=progress)
        return cls(read, config, **settings)

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        Raises:
            EngineError: it could never be served. The engine is as it was.
        """
        if id is None:
            id = next(name for n in self._ids if (name := f"request-{n}") not in self.scheduler)
        return self.scheduler.add(id, prompt_ids, checked_params(params)).id

    def cancel(self, id: str) -> bool:
        """End a request now; its last event is delivered with the next step's. False if unknown."""
        event = self.scheduler.cancel(id)
        if event is not None:
            self._deliver(event)
        return event is not None

    def step(self) -> list[Event]:
        """Run one step and return what happened to requests made by ``add``.

        Events of a ``generate`` or ``stream`` in progress go to their own readers.
        """
        self._advance()
        events, self._unread = self._unread, []
        return events

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[Event], None] | None = None,
    ) -> list[Completion]:
        """Serve all prompts together; completions in the order of the prompts.

        ``params`` is one for all or one each; ``on_progress`` sees every event of these prompts.
        If one of them is refused, or the call is interrupted, none of them stays behind.
        """
        prompts = checked_prompts(prompts)
        each = checked_wishes(params, len(prompts))
        ids: list[str] = []
        inbox: list[Event] = []
        done: dict[str, Completion] = {}
        try:
            for prompt, wish in zip(prompts, each, strict=True):
                ids.append(self._claim(prompt, wish, inbox))
            while len(done) < len(ids):
                self._advance()
                for event in inbox:
                    if event.completion is not None:
                        done[event.id] = event.completion
                    if on_progress is not None:
                        on_progress(event)
                inbox.clear()
        finally:
            self._drop(ids)
        return [done[id] for id in ids]

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[Event]:
        """Yield a request's events as they come; the last one carries the completion.

        The request is queued when the first event is asked for, and cancelled when the iterator
        is closed early. Other live requests advance with it.
        """
        inbox: list[Event] = []
        id = self._claim(prompt_ids, params, inbox)
        try:
            while True:
                self._advance()
                while inbox:
                    event = inbox.pop(0)
                    yield event
                    if event.completion is not None:
                        return
        finally:
            self._drop([id])

    def stats(self) -> Stats:
        """Counts, read without touching the device."""
        return Stats(
            steps=self._buckets.total(),
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            live=len(self.scheduler),
            pages=self.pool.capacity,
            pages_used=self.pool.used,
            pages_peak=self.pool.peak,
            preemptions=self.scheduler.preemptions,
            compiles=self._step.compiled_programs(),
            buckets=dict(self._buckets),
        )

    def _advance(self) -> None:
        """Schedule, run, commit, deliver. Nothing to run is no error."""
        plan = self.scheduler.schedule()
        if not plan.work:
            return
        bucket = self._bucket(plan)
        batch = pack(arrays(plan, bucket))
        out, self._caches = self._step.run(
            self._step.leaves,
            self._caches,
            batch,
            bucket=bucket,
            want_logits=self.want_logits,
        )
        token_ids, logprobs = out.read()
        logits = jax.device_get(out.logits)
        self._buckets[bucket] += 1
        self._prompt_tokens += sum(w.length for w in plan.work[plan.num_decodes :])
        if self.want_logits:
            for i, work in enumerate(plan.work):
                if work.samples and work.request.finish_reason is None:
                    self._logits.setdefault(work.request.id, []).append(logits[i])
        n = len(plan.work)
        for event in self.scheduler.commit(plan, token_ids[:n].tolist(), logprobs[:n].tolist()):
            self._new_tokens += event.token_id is not None
            self._deliver(event)

    def _bucket(self, plan: Plan) -> MLABucket:
        chunks = plan.work[plan.num_decodes :]
        longest = max(work.start + work.length for work in plan.work)
        absorb = 0
        if self._crossover is not None:
            lens = [work.length for work in chunks], [work.start for work in chunks]
            absorb = self._crossover.absorb(*lens)
        return self.ladder.bucket(
            decodes=plan.num_decodes,
            prefills=len(chunks),
            prefill_tokens=sum(work.length for work in chunks),
            pages=cdiv(longest, self.scheduler.page),
            context=any(work.start for work in chunks),
            absorb=absorb,
        )

    def _claim(
        self, prompt: Sequence[int], params: SamplingParams | None, inbox: list[Event]
    ) -> str:
        id = self.add(prompt, params)
        self._claimed[id] = inbox
        return id

    def _deliver(self, event: Event) -> None:
        if event.completion is not None and self.want_logits:
            rows = self._logits.pop(event.id, [])[: len(event.completion.token_ids)]
            stacked = np.stack(rows) if rows else np.zeros((0, self.config.vocab), np.float32)
            event = replace(event, completion=replace(event.completion, logits=stacked))
        self._claimed.get(event.id, self._unread).append(event)

    def _drop(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.cancel(id)
            del self._claimed[id]


def arrays(plan: Plan, bucket: MLABucket) -> StepBatch:
    """A plan as host arrays of the bucket's sizes, padding last."""
    n, work = len(plan.work), plan.work
    token_ids = np.zeros(bucket.tokens, np.int32)
    query_starts = np.zeros(bucket.requests + 1, np.int32)
    seq_lens = np.zeros(bucket.requests, np.int32)
    page_table = np.zeros((bucket.requests, bucket.pages), np.int32)
    fed: list[int] = []
    for i, w in enumerate(work):
        fed += w.request.tokens[w.start : w.start + w.length]
        query_starts[i + 1] = len(fed)
        seq_lens[i] = w.start + w.length
        pages = w.request.pages[: bucket.pages]
        page_table[i, : len(pages)] = pages
    token_ids[: len(fed)] = fed
    query_starts[n + 1 :] = len(fed)

    def column(name: str, dtype: type, pad: int = 0) -> np.ndarray:
        a = np.full(bucket.requests, pad, dtype)
        a[:n] = [getattr(w.request.params, name) for w in work]
        return a

    return StepBatch(
        token_ids=token_ids,
        query_starts=query_starts,
        seq_lens=seq_lens,
        page_table=page_table,
        num_decodes=np.asarray(plan.num_decodes, np.int32),
        sampling=SamplingBatch(
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32, pad=1),
            seed=column("seed", np.uint32),
            position=seq_lens,
        ),
    )
