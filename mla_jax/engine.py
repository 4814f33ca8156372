"""Serving: add requests, step, and collect tokens.

Host state (page pools, scheduler: plain Python) and device state (weights, caches) never mix:
a step moves one ``StepBatch`` to the device and reads only what was drawn. What a model is, its
``Family`` says; nothing here knows one.

The engine runs ahead: it sends the next step before it reads the tokens of the last one, so that
the device need not wait for the host. Tokens that are not read yet reach the next step on the
device (``step.drawn_by``). Where a request turns out to have ended, the step that was sent for it
in vain changes nothing: its rows lie in pages that their next owner writes before it reads them.
"""

import inspect
import itertools
import secrets
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from mla_jax.cache_sizes import (
    bytes_of,
    check_cache_fits,
    check_histories_fit,
    page_counts,
    pages_that_fit,
    room_beside,
)
from mla_jax.chat_template import is_chat
from mla_jax.checks import check_choice, check_flags, checked_size
from mla_jax.errors import EngineError, described
from mla_jax.generation_config import GenerationDefaults
from mla_jax.history_rows import HistoryRows
from mla_jax.hub import folder_of
from mla_jax.inputs import (
    NEEDS_TOKENIZER,
    Names,
    check_callback,
    check_config,
    check_parts,
    checked_params,
    checked_prompt,
    checked_prompts,
    params_of_prompts,
)
from mla_jax.metadata.common import HostBatch
from mla_jax.metadata.packed import pack
from mla_jax.model.family import Family, Serving, Settings, checked_dtype, family_of
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.sharding import sharding_of
from mla_jax.model.step import Step, StepBatch, StepOutput, drawn_by, empty_batch
from mla_jax.model.token_history import TokenHistory
from mla_jax.model.weights import Progress, checked_config, keeps_fp8, load, place
from mla_jax.pages import PageGroup, PagePool
from mla_jax.placement import Placement
from mla_jax.scheduler import (
    Completion,
    Event,
    Likeliest,
    Outcome,
    Plan,
    Request,
    Scheduler,
    Work,
)
from mla_jax.text import TextProcessor

__all__ = ["Engine", "Prompt", "Stats", "WarmUp", "load_model"]

type Prompt = Sequence[int] | str | Sequence[Mapping[str, Any]]
"""Token ids, a text, or the messages of a chat."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts since the engine was built, and what it holds now."""

    steps: int
    prompt_tokens: int  # of prompts, recomputed tokens included
    new_tokens: int  # drawn
    live: int  # requests that have not ended
    pages: int  # that can be given, of all cache groups
    pages_used: int
    pages_peak: int
    preemptions: int
    recoveries: int  # steps that were interrupted or failed, after which caches were made anew
    compiles: int  # programs made ready: compiled, or read from the folder of programs
    weight_bytes: int  # weights and what is derived from them, on each device
    cache_bytes: int  # caches, on each device
    workspace_bytes: int  # the most that a program made ready needs beside them while it runs
    buckets: dict[Any, int]  # steps run in each


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """How far ``Engine.warm_up`` is."""

    done: int  # programs ready
    total: int
    bucket: Any  # of the last one
    seconds: float  # since the start

    @property
    def remaining(self) -> float:
        """Seconds still to go, if the other programs take as long as those before."""
        return self.seconds / max(self.done, 1) * (self.total - self.done)


def load_model(
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    progress: Progress | None = None,
    ignore_keys: Collection[str] = (),
) -> tuple[Any, Any]:
    """The model of a Hugging Face folder or hub id, an ``nnx.Module``, and its configuration.

    e4m3 weights are widened to ``dtype`` (``Engine.from_pretrained`` can keep them).

    ``dtype``: of weights and activations, on a CPU too. ``progress(bytes read, bytes in all)`` is
    called while weights are read. ``ignore_keys`` names keys of config.json to pass over.

    Raises:
        ConfigError: config.json has a key that this library does not implement.
        EngineError: a hub id that cannot be downloaded, or a dtype that is not one of weights.
        WeightsError: the safetensors do not hold that model.
    """
    check_callback("load_model: progress", progress)
    dtype = checked_dtype(dtype)
    folder = folder_of(folder)
    config = checked_config(folder, ignore_keys=ignore_keys)
    family, here = family_of(config.family), Placement.of(None)
    return _read_model(folder, config, family, here, dtype=dtype, progress=progress), config


def _read_model(
    folder: str | Path,
    config: Any,
    family: Family,
    placement: Placement,
    *,
    dtype: DTypeLike,
    progress: Progress | None,
    fp8: bool = False,
) -> nnx.Module:
    model = family.abstract(config, jnp.dtype(dtype), fp8=fp8)
    sharding = partial(sharding_of, placement=placement)
    with placement.working():
        facts = {"progress": progress, "sharding": sharding, "fp8": fp8}
        place(model, load(folder, config, dtype=jnp.dtype(dtype), **facts))
    return model


class Engine:
    """One model, its caches and its queue.

    A call from a second thread, while another is in one, is refused.

    After an interruption or an exception inside a step the engine goes on: the next call makes
    the caches anew and running requests are computed again; no token is lost or told twice.

    Args:
        model: with weights loaded; or a function that makes it, called once every setting was
            accepted and, with ``num_pages``, the caches allocated.
        config: the model's, as ``read_config`` gives it.
        dtype: of activations and derived weights; None: that of the model's weights, or bfloat16
            of a function that makes the model.
        num_pages: pages of each layer that hold the tokens of all requests in the first cache group
            (other groups hold as many tokens, windows only what is seen of them); page 0 is never
            given to a request. None: what fits beside the weights in 90 % of the memory that JAX
            takes of a GPU (25 % of a CPU's), at most what ``max_requests`` full requests need.
        page: tokens in a page.
        max_requests: requests running at once; others queue.
        prefill_chunk: prompt tokens of one step, over all requests; None: 2048 on a GPU, else 512,
            or what a given ladder holds.
        max_model_len: prompt and new tokens of one request; the model's own limit by default.
        cache_format: how a token is stored, of ``cache.ELEMENT_FORMATS``; None: as the model's
            dtype.
        ladder: static sizes of a step; the family's own by default.
        context_rows: workspace rows for cached context of prefills, at most 4096 by default.
        backend: name of the backend of every operation that has one of that name.
        absorb_prefills: let steps of short prefills on long contexts run over their pages where
            the device's measured rates say that this is faster (docs/chunked_context.md).
        fp8_activations: products of many rows with e4m3 weights round activations to e4m3 too, with
            a scale for each 128 channels: as DeepSeek-V3 was trained and its configuration says
            (``activation_scheme``), faster prompts, less exact. From 512 tokens of a step on, and
            64 rows of an expert. None: on Hopper with a 16-bit ``dtype``, unless a ``backend`` is
            named.
        run_ahead: send a step before the tokens of the one before are read. False gives the same
            tokens, more slowly.
        want_logits: keep every step's logits in ``Completion.logits`` (for tests and parity).
        family: what the model is; by default the one that reads the configuration's model type.
        devices: one device or several of a kind, a mesh of one axis, or a ``Placement``; None is
            JAX's default device. Over several, weights are divided (``model.sharding``). Devices of
            several processes: each makes the same calls (docs/sharding.md).
        programs: a folder that keeps compiled programs from one process to the next; it must be
            yours, for loading a program runs it. None keeps none.
        text: the model's tokenizer and chat template; None: prompts are token ids, and
            completions have no text.
        defaults: sampling of requests that give no ``params``, and the model's end tokens; None:
            greedy, and the configuration's end tokens.

    Raises:
        ConfigError: no family reads the configuration.
        EngineError: a setting that cannot be served, or a device without room.
        MetadataError: a ladder that cannot hold the largest step.
    """

    def __init__(
        self,
        model: nnx.Module | Callable[[], nnx.Module],
        config: Any,
        *,
        num_pages: int | None = None,
        dtype: DTypeLike | None = None,
        run_ahead: bool = True,
        want_logits: bool = False,
        family: Family | None = None,
        devices: Any = None,
        programs: str | Path | None = None,
        text: TextProcessor | None = None,
        defaults: GenerationDefaults | None = None,
        **settings: Unpack[Settings],
    ):
        defaults = GenerationDefaults() if defaults is None else defaults
        check_parts(model, config, family=family, text=text, defaults=defaults)
        check_flags(run_ahead=run_ahead, want_logits=want_logits)
        self.text, self.default_params = text, defaults.params
        self.config, self.want_logits = config, want_logits
        self.family = family_of(config.family) if family is None else family
        self.placement = Placement.of(devices)
        if dtype is None:
            loaded = isinstance(model, nnx.Module)
            dtype = _dtype_of(model) if loaded else jnp.dtype(jnp.bfloat16)
        if unknown := sorted(set(settings) - set(Settings.__annotations__)):
            own = [*inspect.signature(Engine).parameters][2:-1]
            allowed = ", ".join([*own, *Settings.__annotations__])
            raise EngineError("settings", ", ".join(unknown), allowed)
        serving = Serving.of(config, dtype=dtype, placement=self.placement, **settings)
        self.builder = self.family.builder(config, serving)
        self.groups = self.family.groups(config, serving)
        device = self.placement.device
        history = serving.max_requests * TokenHistory.row_bytes(config.vocab)
        check_histories_fit(serving.max_requests, history, device)
        self._check_largest_step(serving)

        def make_step() -> Step:
            return Step(
                model if isinstance(model, nnx.Module) else model(),
                self.builder,
                placement=self.placement,
                backend=serving.backend,
                fp8_activations=serving.fp8_activations,
                want_logits=want_logits,
                store=None if programs is None else (programs, (self.family.name, config, serving)),
                vocab=config.vocab,
                history_rows=serving.max_requests,
            )

        step = None
        if num_pages is None:
            step = make_step()
            room = room_beside((step.leaves, step.derived), device, later=history)
            num_pages = self.placement.least(pages_that_fit(self.groups, serving, room))
        self._pages = page_counts(self.groups, num_pages, serving)
        self.scheduler = Scheduler(
            groups=[
                PageGroup(name=g.name, pool=PagePool(n), tokens=g.tokens, window=g.window)
                for g, n in zip(self.groups, self._pages, strict=True)
            ],
            max_requests=serving.max_requests,
            max_prefill_tokens=serving.prefill_chunk,
            max_model_len=serving.max_model_len,
            vocab=config.vocab,
            eos=_end_tokens(config, defaults),
        )
        check_cache_fits(self.groups, self._pages, device)
        self._caches: dict[str, Any] = {}
        self._alloc()
        self._step = make_step() if step is None else step
        self._history = self._step.new_history()  # of requests with a penalty or a bias
        self._history_rows: HistoryRows[Request] = HistoryRows(self._history.rows)
        self._most_flights = 2 if run_ahead else 1
        self._flights: deque[_Flight] = deque()  # steps sent and not read, the oldest first
        self._tokens = self._step.no_tokens()  # of the last step that was sent, on the device
        self._ids = itertools.count()
        self._unread: list[Event] = []  # for the next ``step``
        self._claimed: dict[str, list[Event]] = {}  # for ``generate`` and ``stream``
        self._abandoned: set[str] = set()  # their readers are gone: to be cancelled
        self._inside: _Call | None = None  # what changes host state
        self._entered = False  # meanwhile something in that thread called the engine
        self._broken = False  # something was interrupted: host state may be half changed
        self._outcomes: Sequence[Outcome] = ()  # of the step that is being concluded
        self._logits: dict[str, list[np.ndarray]] = {}
        self._buckets: Counter[Any] = Counter()
        self._prompt_tokens = self._new_tokens = self._recoveries = 0

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        progress: Progress | None = None,
        ignore_keys: Collection[str] = (),
        fp8_weights: bool | None = None,
        **settings: Any,
    ) -> "Engine":
        """An engine for a Hugging Face folder; ``settings`` are those of the constructor.

        ``folder`` may be a hub id (``"deepseek-ai/DeepSeek-V2-Lite"``) where ``huggingface_hub``
        is installed. The folder's tokenizer, chat template and generation_config.json are used
        where they are there and ``text`` and ``defaults`` are not given.
        ``dtype``: of weights and activations, bfloat16 on a CPU too. ``progress(bytes read, bytes
        in all)`` is called while weights are read.
        ``ignore_keys`` names keys of config.json to pass over, as in ``ModelConfig.from_hf``.
        ``fp8_weights``: whether e4m3 weights stay e4m3 on the device, which halves what they take
        and what a step reads; False widens them to ``dtype``. None: they stay on GPUs with a 16-bit
        ``dtype``, if all products of the layers are e4m3; packed experts of V4 become e4m3 then.

        Raises:
            ConfigError: config.json has a key that this library does not implement.
            EngineError: a hub id that cannot be downloaded, a dtype that is not one of weights, or
                a tokenizer, template or generation_config.json that cannot be used.
            WeightsError: the safetensors do not hold that model.
        """
        check_callback("Engine.from_pretrained: progress", progress)
        dtype = checked_dtype(dtype)
        folder = folder_of(folder)
        config = checked_config(folder, ignore_keys=ignore_keys)
        facts = {"vocab": config.vocab, "family": config.family}
        if "text" not in settings:
            settings["text"] = TextProcessor.open(folder, **facts)
        if "defaults" not in settings:
            settings["defaults"] = GenerationDefaults.open(folder)
        settings["devices"] = placement = Placement.of(settings.get("devices"))
        parts = {name: settings.get(name) for name in ("family", "text")}
        defaults = settings["defaults"] or GenerationDefaults()
        check_parts(_read_model, config, defaults=defaults, **parts)
        family = settings.get("family") or family_of(config.family)
        fp8 = _keep_fp8(folder, config, family, placement, dtype, fp8_weights)
        read = partial(
            _read_model, folder, config, family, placement, dtype=dtype, progress=progress, fp8=fp8
        )
        return cls(read, config, dtype=dtype, **settings)

    def take(self, model: nnx.Module) -> None:
        """Serve the weights that ``model`` has now; whatever follows from them is derived anew.

        Running requests go on with what they have in the caches. Tokens that were drawn before
        are told with the next step's.
        """
        if not isinstance(model, nnx.Module):
            raise EngineError("take: model", type(model).__name__, "a Flax NNX module")
        given, hint = getattr(model, "config", None), "Another model needs another engine."
        check_config(given, self.config, "take: model's config", "the engine's", hint)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(model))):
            raise EngineError("take: model", "weights without memory", "weights to serve")
        with self._exclusive():
            while self._flights:
                self._land()
        self._step.take(model)

    def warm_up(
        self, *, progress: Callable[[WarmUp], None] | None = None, threads: int = 16
    ) -> int:
        """Make the programs of all rungs ready, several at a time; how many there are.

        Those of most tokens come first, for they take longest. After it no step compiles. Rungs are
        printed by ``explain``.
        """
        check_callback("warm_up: progress", progress)
        start, threads = time.perf_counter(), checked_size("warm_up: threads", threads)
        with self._exclusive():
            self._history.begin(self._history.rows, ())  # of no request: its program is made
        tokens = attrgetter("common_bucket.tokens")
        rungs = sorted(self.builder.rungs(), key=tokens, reverse=True)
        caches = self._caches
        names = [group.name for group in self.groups]

        def ready(decision: Any) -> Any:
            self._step.compile(pack(empty_batch(decision, names)).layout, caches)
            return decision.bucket

        with ThreadPoolExecutor(min(threads, len(rungs))) as pool:
            waiting = [pool.submit(ready, decision) for decision in rungs]
            try:
                for done, future in enumerate(as_completed(waiting), 1):
                    state = WarmUp(
                        done=done,
                        total=len(rungs),
                        bucket=future.result(),
                        seconds=time.perf_counter() - start,
                    )
                    if progress is not None:
                        progress(state)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return len(rungs)

    def explain(self) -> str:
        """The engine's cache groups and rungs: one compiled program each."""
        rungs = self.builder.rungs()
        lines = [f"{self.config.family} on {self.placement.size} x {self.placement.device}"]
        for group, pages in zip(self.groups, self._pages, strict=True):
            holds = "the open group of a request" if group.ring else f"{group.tokens} tokens"
            lines.append(
                f"cache group {group.name}: {group.layers} layers, {pages} pages of {holds}"
            )
        lines.append(f"{len(rungs)} rungs, a program each:")
        return "\n".join([*lines, *(f"  {rung.bucket}" for rung in rungs)])

    def encode(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        special_tokens: bool = True,
        **chat: Any,
    ) -> list[int]:
        """Token ids of a text, or of a list of messages by the model's chat template.

        ``special_tokens``: whether a text begins with the tokens that every text begins with.
        ``chat``: ``tools``, ``add_generation_prompt``, and whatever else the template reads.

        Raises:
            EngineError: the model has no tokenizer, or no template, or they refuse it.
        """
        text = self.text
        if text is None:
            allowed = "nothing: this engine has no tokenizer"
            raise EngineError("encode", described(prompt), allowed, NEEDS_TOKENIZER)
        if not (isinstance(prompt, str) or is_chat(prompt)):
            raise EngineError("encode", described(prompt), "a text, or a list of messages")
        if isinstance(prompt, str):
            if chat:
                raise EngineError("encode: a text", f"with {', '.join(chat)}", "these for a chat")
            check_flags(**{"encode: special_tokens": special_tokens})
            return text.encode(prompt, special_tokens=special_tokens)
        return text.chat(prompt, **chat)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        Raises:
            EngineError: it could never be served, or its id is another's whose events are not all
                read. The engine is as it was.
        """
        told = isinstance(id, str) and any(event.id == id for event in self._unread)
        if isinstance(id, str) and (told or id in self._claimed):
            allowed = "an id that no live request has, nor one whose events are not all read"
            raise EngineError("request id", repr(id), allowed)
        if not isinstance(id, str | None):
            raise EngineError("request id", described(id), "a text, or None")
        names = Names.of("request" if id is None else f"request {id}")
        return self._queue(prompt, params, id, names)

    def _queue(
        self, prompt: Prompt, params: SamplingParams | None, id: str | None, names: Names
    ) -> str:
        params = checked_params(params, self.default_params)
        ids = checked_prompt(prompt, names.prompt, self.text and self.text.ids)
        if params.stop and self.text is None:
            allowed = "none, because the engine has no tokenizer"
            raise EngineError(
                f"{names.request}: stop", params.stop, allowed, "stop_token_ids need none."
            )
        if params.seed is None:
            params = replace(params, seed=self._fresh_seed(names))
        text = None if self.text is None else self.text.begin(params)
        with self._exclusive():
            id = self._new_id() if id is None else id
            return self.scheduler.add(id, ids, params, text, names).id

    def _fresh_seed(self, names: Names) -> int:
        """One that no one chose; several processes would choose different ones."""
        if self.placement.processes > 1:
            allowed = "a number: every process must draw the same tokens"
            raise EngineError(f"{names.request}: seed", None, allowed)
        return secrets.randbits(32)

    def _new_id(self) -> str:
        taken = self.scheduler, self._claimed, {event.id for event in self._unread}
        names = (f"request-{n}" for n in self._ids)
        return next(name for name in names if not any(name in ids for ids in taken))

    def cancel(self, id: str) -> bool:
        """End a request now; its last event is delivered with the next step's. False if unknown."""
        if not isinstance(id, str):
            return False
        with self._exclusive():
            outcome = self.scheduler.cancellation(id)
            if outcome is not None:
                self._conclude([outcome])
        return outcome is not None

    def step(self) -> list[Event]:
        """Wait for one step and return what happened to requests made by ``add``.

        Events of a ``generate`` or ``stream`` in progress go to their own readers.
        """
        self._advance()
        events, self._unread = self._unread, []
        return events

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[Event], None] | None = None,
    ) -> list[Completion]:
        """Serve all prompts together; completions in the order of the prompts.

        A prompt is token ids, a text, or a list of messages (a chat).
        ``params`` is one for all or one each, ``default_params`` in place of None;
        ``on_progress`` sees every event of these prompts. If one of them is refused, or the call
        is interrupted, none of them stays behind.
        """
        check_callback("generate: on_progress", on_progress)
        given = checked_prompts(prompts, self.text and self.text.ids)
        each = params_of_prompts(params, len(given), self.default_params)
        ids: list[str] = []
        inbox: list[Event] = []
        done: dict[str, Completion] = {}
        try:
            for i, (prompt, one) in enumerate(zip(given, each, strict=True)):
                where = f"generate: prompt {i}"
                self._claim(prompt, one, inbox, ids, Names(where, where))
            while len(done) < len(ids):
                self._advance()
                for event in inbox:
                    if event.completion is not None:
                        done[event.id] = event.completion
                    if on_progress is not None:
                        on_progress(event)
                inbox.clear()
        finally:
            self._abandoned.update(ids)
            self._drop()
        return [done[id] for id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """Yield a request's events as they come; the last one carries the completion.

        Where there is a tokenizer, the ``text`` of all events makes that of the completion.
        The request is queued when the first event is asked for, and cancelled when the iterator
        is closed early. Other live requests advance with it.
        """
        inbox: list[Event] = []
        ids: list[str] = []
        try:
            params = checked_params(params, self.default_params, where="stream: params")
            self._claim(prompt, params, inbox, ids, Names.of("stream"))
            while True:
                self._advance()
                while inbox:
                    event = inbox.pop(0)
                    yield event
                    if event.completion is not None:
                        return
                    self._mend()  # before an event is read that may be told again
        finally:
            self._abandoned.update(ids)
            if not self._broken:  # else by the next call: this may be the garbage collector's
                self._drop()

    def stats(self) -> Stats:
        """Counts, read without touching the device."""
        pools = [group.pool for group in self.scheduler.groups]
        return Stats(
            steps=self._buckets.total(),
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            live=len(self.scheduler),
            pages=sum(pool.capacity for pool in pools),
            pages_used=sum(pool.used for pool in pools),
            pages_peak=sum(pool.peak for pool in pools),
            preemptions=self.scheduler.preemptions,
            recoveries=self._recoveries,
            compiles=self._step.compiled,
            weight_bytes=bytes_of((self._step.leaves, self._step.derived)),
            cache_bytes=bytes_of(self._caches),
            workspace_bytes=self._step.workspace_bytes,
            buckets=dict(self._buckets),
        )

    def _alloc(self) -> None:
        """Caches of zeros in place of those that are there, of which no traceback keeps any."""
        for leaf in jax.tree.leaves(self._caches):
            leaf.delete()
        self._caches = {}
        for group, pages in zip(self.groups, self._pages, strict=True):
            self._caches[group.name] = group.alloc(pages, self.placement)

    def _check_largest_step(self, serving: Serving) -> None:
        """Refuse a ladder that cannot hold the largest steps that the scheduler may make.

        Each of them with contexts of ``max_model_len``.
        """
        most, chunk, longest = serving.max_requests, serving.prefill_chunk, serving.max_model_len
        many = max(min(most, chunk // 2), 1)  # prompts of two tokens and more
        last = min(max(chunk - 2 * (many - 1), 1), longest)
        rest = [chunk % longest] if chunk % longest else []
        steps = {
            "decodes only": [1] * most,
            "decodes beside one chunk": [1] * (most - 1) + [min(chunk, longest)],
            "the most prompts, two tokens each": [min(2, longest)] * (many - 1) + [last],
            "the most prompt tokens": [*[longest] * (chunk // longest), *rest][:most],
        }
        for lens in filter(None, steps.values()):
            self.builder.decide(HostBatch.of(np.array(lens), np.array([longest] * len(lens))))

    def _exclusive(self) -> "_Exclusive":
        """One call at a time; what an earlier one left half done is mended first."""
        return _Exclusive(self)

    def _advance(self) -> None:
        """Send what can be sent, read the oldest step, conclude it. Nothing to run is no error."""
        self._drop()
        with self._exclusive():
            while len(self._flights) < self._most_flights and self._launch():
                pass
            self._land()

    def _launch(self) -> bool:
        """Send the next step; False if there is none."""
        plan = self.scheduler.schedule()
        if not plan.work:
            return False
        lens = np.array([(w.length, w.start + w.length) for w in plan.work], np.int32)
        host = HostBatch.of(lens[:, 0], lens[:, 1])
        decision = self.builder.decide(host)
        batch = self._batch(plan, host, decision)
        out, self._caches = self._step.run(self._caches, batch, self._tokens, self._history)
        self._tokens = out.tokens
        self.scheduler.launch(plan)
        self._flights.append(_Flight(plan, out))
        self._buckets[decision.bucket] += 1
        self._prompt_tokens += sum(
            w.length for w in plan.work if w.length > 1 or w.start < w.request.prompt_len
        )
        return True

    def _land(self) -> None:
        """Read the oldest step that anybody waits for, and conclude it."""
        while self._flights:
            plan, out = self._flights[0].plan, self._flights[0].out
            if any(w.request.finish_reason is None for w in plan.work):
                token_ids, logprobs = out.read()
                n = len(plan.work)
                self._keep_logits(plan, jax.device_get(out.logits))
                found = token_ids[:n].tolist(), logprobs[:n].tolist()
                self._flights.popleft()
                self._conclude(self.scheduler.outcomes(plan, *found, _likeliest(plan, out)))
                return
            self._flights.popleft()

    def _conclude(self, outcomes: Sequence[Outcome]) -> None:
        """Record and tell what happened; ``_recover`` finishes it where it was interrupted."""
        self._outcomes = [self._with_logits(outcome) for outcome in outcomes]
        for outcome in self._outcomes:
            self.scheduler.apply(outcome)
            self._tell(outcome)
        self._outcomes = ()

    def _mend(self) -> None:
        """Make host state whole again if a call was interrupted."""
        if self._broken:
            self._recover()
            self._broken = False

    def _recover(self) -> None:
        """After an interruption: everything is computed again but what was drawn already."""
        self.scheduler.recover(self._outcomes)
        for outcome in self._outcomes:
            self._tell(outcome, again=True)
        self._outcomes = ()
        self._flights.clear()
        self._tokens = self._step.no_tokens()
        self._history.reset()
        self._history_rows = HistoryRows(self._history.rows)
        self._recoveries += 1
        self._step.forget_sums()
        self._alloc()

    def _batch(self, plan: Plan, host: HostBatch, decision: Any) -> StepBatch:
        """A plan as host arrays of the decision's sizes, padding last."""
        bucket, work = decision.common_bucket, plan.work
        batch = empty_batch(decision, [group.name for group in self.groups])
        starts, lens, count = host.padded_arrays(bucket)
        fed: list[int] = []
        for w in work:
            fed += w.tokens
            if len(w.tokens) < w.length:
                fed.append(drawn_by(w.request.row))
        batch.token_ids[: len(fed)] = fed
        for g, table in enumerate(batch.page_tables.values()):
            width = table.shape[1]
            for i, w in enumerate(work):
                pages = w.request.pages[g][:width]
                table[i, : len(pages)] = pages
        sampling = batch.sampling
        sampling.fill([w.request.params for w in work])
        for i, w in enumerate(work):
            if w.request.params.needs_history:
                sampling.adjust.row[i] = self._row(w)
                sampling.adjust.prompt_len[i] = w.request.prompt_len
        return replace(
            batch,
            query_starts=starts,
            seq_lens=lens,
            num_requests=np.asarray(count, np.int32),
            sampling=replace(sampling, position=lens),
        )

    def _row(self, work: Work) -> int:
        """Of the token history; begun with the request's first token, also when it comes again."""
        row = self._history_rows.of(work.request, self.scheduler.running)
        if work.start == 0:
            self._history.begin(row, work.request.params.logit_bias)
        return row

    def _keep_logits(self, plan: Plan, logits: np.ndarray | None) -> None:
        """Rows of the requests that draw, each at its place: a repeated step writes it again."""
        if logits is None:
            return
        for i, work in enumerate(plan.work):
            if work.samples and work.request.finish_reason is None:
                rows = self._logits.setdefault(work.request.id, [])
                rows[work.start + work.length - work.request.prompt_len :] = [logits[i]]

    def _claim(
        self,
        prompt: Prompt,
        params: SamplingParams,
        inbox: list[Event],
        ids: list[str],
        names: Names,
    ) -> None:
        id = self._new_id()
        ids.append(id)
        self._claimed[id] = inbox
        self._queue(prompt, params, id, names)

    def _with_logits(self, outcome: Outcome) -> Outcome:
        """The completion with the rows that were kept for it."""
        event = outcome.event
        if event is None or event.completion is None or not self.want_logits:
            return outcome
        rows = self._logits.get(event.id, [])[: len(event.completion.token_ids)]
        stacked = np.stack(rows) if rows else np.zeros((0, self.config.vocab), np.float32)
        completion = replace(event.completion, logits=stacked)
        return replace(outcome, event=replace(event, completion=completion))

    def _tell(self, outcome: Outcome, *, again: bool = False) -> None:
        """Deliver an outcome's event to its reader; ``again``: unless it is there already."""
        event = outcome.event
        if event is None:
            return
        box = self._claimed.get(event.id, self._unread)
        if not (again and any(e is event for e in box)):
            box.append(event)
            self._new_tokens += event.token_id is not None
        if event.completion is not None:
            self._logits.pop(event.id, None)

    def _drop(self) -> None:
        """Cancel the requests whose readers are gone."""
        for id in sorted(self._abandoned):  # in every process the same
            self.cancel(id)
            self._claimed.pop(id, None)
            self._logits.pop(id, None)
            self._abandoned.discard(id)


def _end_tokens(config: Any, defaults: GenerationDefaults) -> tuple[int, ...]:
    """The end tokens: of generation_config.json, else of the configuration.

    Warns of ids beyond the vocabulary.
    """
    eos = config.eos if defaults.eos is None else defaults.eos
    if far := [token for token in eos if token >= config.vocab]:
        text = f"end tokens {far} are not among the {config.vocab} of the vocabulary"
        warnings.warn(f"{text}: no request ends at them", stacklevel=3)
    return eos


def _keep_fp8(
    folder: str | Path,
    config: Any,
    family: Family,
    placement: Placement,
    dtype: jnp.dtype,
    asked: bool | None,
) -> bool:
    """Whether e4m3 weights stay so; refuses what was asked for and cannot be."""
    check_choice("fp8_weights", asked)
    if asked is None:
        usual = placement.on_gpu and dtype.itemsize == 2
        given = bool(getattr(config, "fp8_block", None))
        return usual and given and family.fp8 and keeps_fp8(folder, config)
    if asked and not family.fp8:
        allowed = "None or False: this family's weights are widened"
        raise EngineError("fp8_weights", f"True, family {family.name}", allowed)
    return asked


@dataclass(frozen=True)
class _Flight:
    """A step that was sent to the device."""

    plan: Plan
    out: StepOutput


def _likeliest(plan: Plan, out: StepOutput) -> list[Likeliest] | None:
    """What each request of a step asks to be told; None: none of them does."""
    counts = [w.request.params.logprobs for w in plan.work]
    if not any(counts):
        return None
    ids, logprobs = out.likeliest()
    return [
        tuple(zip(ids[:n, i].tolist(), logprobs[:n, i].tolist(), strict=True))
        for i, n in enumerate(counts)
    ]


@dataclass(frozen=True)
class _Call:
    """A method of an engine that runs: its thread, and its place on the stack."""

    thread: int
    frame: FrameType

    @classmethod
    def now(cls) -> "_Call":
        """The method that enters ``_Exclusive``: the innermost function that is none of its."""
        frame = sys._getframe()
        own = ("now", "__enter__")
        while frame.f_globals is not globals() or frame.f_code.co_name in own:
            assert frame.f_back is not None
            frame = frame.f_back
        return cls(threading.get_ident(), frame)

    @property
    def here(self) -> bool:
        return self.thread == threading.get_ident()

    def runs(self) -> bool:
        """Whether it has not ended: an interruption may have kept it from saying so."""
        top = sys._getframe() if self.here else sys._current_frames().get(self.thread)
        while top is not None and top is not self.frame:
            top = top.f_back
        return top is not None


class _Exclusive:
    """Context manager around every change of host state.

    It refuses a second call meanwhile. After an exception the next call first makes caches and
    queues anew (``_recover``).
    """

    def __init__(self, engine: Engine):
        self._engine = engine

    def __enter__(self) -> None:
        inside = self._engine._inside
        if inside is not None and not inside.runs():  # interrupted on its way in or out
            inside = None
        if inside is not None and inside.here:  # a signal handler, or a destructor
            self._engine._entered = True
            hint = "Take note of it, and call when that one is done."
            raise EngineError(
                "a call of the engine", "inside of another one", "one at a time", hint
            )
        if inside is not None:
            given, hint = "while another thread is in one", "Calls may take turns under a lock."
            raise EngineError("a call of the engine", given, "one thread at a time", hint)
        self._engine._inside, self._engine._entered = _Call.now(), False
        try:
            self._engine._mend()
        except BaseException:
            self._engine._inside = None
            raise
        self._engine._broken = True

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # A refusal comes before anything is changed, but for that of a call inside of this one.
        refused = kind is not None and issubclass(kind, EngineError) and not self._engine._entered
        self._engine._broken = kind is not None and not refused
        self._engine._inside = None


def _dtype_of(model: nnx.Module) -> jnp.dtype:
    """The dtype of most weights: norms and routers may be wider.

    Beside e4m3 weights only 16-bit leaves count: those have scales.
    """
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    if any(leaf.dtype == jnp.float8_e4m3fn for leaf in leaves):
        leaves = [leaf for leaf in leaves if leaf.dtype.itemsize == 2]
    return jnp.dtype(Counter(leaf.dtype for leaf in leaves).most_common(1)[0][0])
