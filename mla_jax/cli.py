"""The command line: ``mla-jax --help`` lists the commands.

Results go to stdout, progress and messages to stderr. Bad input is one clear message and exit
code 2.
"""

import io
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from mla_jax import ops
from mla_jax.checks import checked_size, is_real, made_folder
from mla_jax.commands import fit, parity
from mla_jax.commands.explain import EXPLAINED, Problem
from mla_jax.commands.inspect import facts_of
from mla_jax.commands.models import model_of
from mla_jax.commands.roofline import roofline
from mla_jax.commands.show import checked_out, fit_report, parity_report, roofline_report, show
from mla_jax.config_v4 import AnyConfig, read_config
from mla_jax.demo import main as serve_demo
from mla_jax.engine import Engine, WarmUp
from mla_jax.errors import EngineError, MLAError
from mla_jax.generation_config import GenerationDefaults
from mla_jax.hub import folder_of
from mla_jax.model.presets import PRESETS
from mla_jax.model.sampling import SamplingParams
from mla_jax.pallas.device import PEAKS, peaks_of
from mla_jax.placement import ONE_QUEUE
from mla_jax.prompts import Prompt, Reader, ids_of
from mla_jax.scheduler import Completion, Event
from mla_jax.text import TextProcessor
from mla_jax.types import cdiv
from mla_jax.version import __version__

try:
    import typer
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    from mla_jax.commands.options import (
        MOST,
        CacheOption,
        Dtype,
        DtypeOption,
        EngineOptions,
        IgnoreKey,
        Model,
        PromptOptions,
        SamplingOptions,
        Size,
        StoredDtype,
        WidthOptions,
        cache_format,
        grouped,
    )
except ModuleNotFoundError as missing:
    raise SystemExit(f"mla-jax needs {missing.name}: pip install typer rich") from None

__all__ = ["app", "main"]

app = typer.Typer(
    help="Multi-head latent attention for JAX.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_BAD_INPUT = (MLAError, OSError)
_USAGE: type[Exception] = typer.BadParameter.__bases__[0]
_MOST_GIB = 1e9  # an exbibyte
Folder = Annotated[
    Path | None,
    typer.Option(
        help="Compiled programs, kept for later runs. Yours alone: they are run. The cache has "
        "room for --max-requests requests of --max-model-len tokens then, as in ``warm``."
    ),
]
ModelName = Annotated[
    str, typer.Argument(help=f"A folder, a hub id, or one of {', '.join(PRESETS)}.")
]
Out = Annotated[
    Path | None,
    typer.Option(callback=checked_out, help="Also write it: a name ending in .html or .svg."),
]


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0, or 2 after bad input."""
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal gets escapes, no traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = app(None if args is None else list(args), standalone_mode=False)
    except _USAGE as error:
        code = _complain(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
    except _BAD_INPUT as error:
        code = _complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    raise SystemExit(code if isinstance(code, int) else 0)


def _complain(message: str) -> int:
    print(f"mla-jax: {message}", file=sys.stderr)
    return 2


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"mla-jax: warning: {message}", file=sys.stderr)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"mla-jax {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print it."),
    ] = False,
) -> None:
    """Multi-head latent attention for JAX."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command()
@grouped
def generate(
    model: Model,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    serving: EngineOptions,
    programs: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a request.")] = False,
) -> None:
    """Serve prompts together and print each answer when it is finished, by the prompt's number.

    After Ctrl-C what the others have so far is printed too.
    """
    model_dir = folder_of(model)
    config = read_config(model_dir, ignore_keys=serving.ignore_key or ())
    defaults = GenerationDefaults.open(model_dir)
    params = sampling.params(defaults, vocab=config.vocab)
    _keep_compilations(serving.cache)
    _devices(serving.devices)  # refused before a folder is made
    if programs is not None:
        made_folder("--programs", programs)
    text = TextProcessor.open(model_dir, vocab=config.vocab, family=config.family)
    if sampling.stop and text is None:
        allowed = "none, because the model has no tokenizer"
        raise EngineError("--stop", sampling.stop, allowed, "--stop-ids needs none.")
    read = Reader(vocab=config.vocab, text=text, chat=prompts.chat, system=prompts.system)
    asked = read.prompts(ids=prompts.prompt_ids, text=prompts.prompt, file=prompts.prompts_file)
    limit = serving.limit(config)
    rows = [_rows(p, params.max_new_tokens, limit) for p in asked]
    if programs is not None:  # the settings as they are, for other runs to find its programs
        sizes = _sizes(serving, limit)
    else:
        requests = min(serving.max_requests, len(asked))
        # Sizes below 1 are refused by the engine.
        needs = sorted((cdiv(n, max(serving.page_size, 1)) for n in rows), reverse=True)
        sizes = {
            "max_requests": requests,
            "num_pages": 1 + sum(needs[: max(requests, 1)]),
            "max_model_len": max(rows) + 1 if serving.max_model_len is None else limit,
        }
        if serving.num_pages is not None:
            sizes["num_pages"] = serving.num_pages
    facts = {"programs": programs, "text": text, "defaults": defaults}
    engine = _load(model_dir, serving, **sizes, **facts)
    _serve(engine, [p.ids for p in asked], params, as_json=as_json)


@app.command()
@grouped
def warm(
    model: Model,
    programs: Annotated[
        Path, typer.Option(help="Where programs go: a folder of your own, for reading one runs it.")
    ],
    serving: EngineOptions,
) -> None:
    """Compile every program of these settings; ``generate --programs`` with the same finds them."""
    model_dir = folder_of(model)
    config = read_config(model_dir, ignore_keys=serving.ignore_key or ())
    _keep_compilations(serving.cache)
    _devices(serving.devices)  # refused before the folder is made
    made_folder("--programs", programs)
    engine = _load(model_dir, serving, **_sizes(serving, serving.limit(config)), programs=programs)
    print(engine.explain())
    start = time.perf_counter()
    left = TextColumn("{task.fields[left]}")
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("programs", total=len(engine.builder.rungs()), left="")

        def report(state: WarmUp) -> None:
            left = f"{state.remaining:.0f} s left" if state.done < state.total else ""
            bar.console.print(f"ready: {state.bucket}", soft_wrap=True, highlight=False)
            bar.update(task, completed=state.done, left=left)

        count = engine.warm_up(progress=report)
    print(f"{count} programs ready in {time.perf_counter() - start:.1f} s: {programs}")


def _sizes(serving: EngineOptions, limit: int) -> dict[str, int | None]:
    """Engine sizes from the options, for requests of up to ``limit`` tokens."""
    return {
        "max_requests": serving.max_requests,
        "num_pages": serving.num_pages,
        "max_model_len": limit,
    }


def _keep_compilations(folder: Path | None) -> None:
    """Let JAX keep what XLA compiles, however short it took."""
    if folder is None:
        return
    made_folder("--cache", folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _devices(count: int) -> list[Any] | None:
    """The first ``count`` devices, or all of them; None: one, which JAX chooses."""
    if count == 1:
        os.environ.setdefault(*ONE_QUEUE)
    found = jax.local_devices()
    if count > len(found):
        raise EngineError("--devices", count, f"at most {len(found)}, those of this machine")
    return None if count == 1 else found[: count or len(found)]


def _rows(prompt: Prompt, new: int, limit: int) -> int:
    """Cache rows of a request; refused here so that the message names where it came from."""
    n = len(prompt.ids)
    if n == 0:
        raise EngineError(prompt.where, "no tokens", "1 token or more")
    if n + new > limit:
        given = f"{n} tokens and {new} new ones"
        raise EngineError(prompt.where, given, f"at most {limit} together")
    return n + new - 1


def _load(folder: Path, serving: EngineOptions, **settings: Any) -> Engine:
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("weights", total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return Engine.from_pretrained(
            folder,
            dtype=jnp.dtype(serving.dtype),
            progress=report,
            ignore_keys=serving.ignore_key or (),
            cache_format=cache_format(serving.dtype, serving.cache_dtype),
            page=serving.page_size,
            prefill_chunk=serving.prefill_chunk,
            backend=serving.backend,
            fp8_weights=serving.fp8_weights,
            fp8_activations=serving.fp8_activations,
            devices=_devices(serving.devices),
            **settings,
        )


def _serve(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, *, as_json: bool
) -> None:
    """Print every completion when it is finished; on a terminal below a progress bar."""
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Into a file or a pipe it is printed at once; on a terminal the bar makes room for it.
    watched = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=watched) as bar:
        task = bar.add_task("requests", total=len(prompts))

        finished: list[Event] = []

        def step() -> None:
            finished.extend(event for event in engine.step() if event.completion is not None)
            show()

        def show() -> None:
            while finished:  # an interruption leaves those that are not printed yet
                event = finished[0]
                assert event.completion is not None
                _print_completion(int(event.id), event.completion, engine, as_json=as_json)
                finished.pop(0)
                bar.advance(task)

        for i, prompt in enumerate(prompts):
            engine.add(prompt, params, id=str(i))
        try:
            while engine.stats().live:
                step()
        except KeyboardInterrupt:
            for i in range(len(prompts)):
                engine.cancel(str(i))
            show()
            step()
            raise
    s = engine.stats()
    print(
        f"{s.new_tokens} tokens in {s.steps} steps, {s.compiles} programs, "
        f"{s.pages_peak} of {s.pages} pages at most, {s.preemptions} preemptions",
        file=sys.stderr,
    )


def _print_completion(i: int, c: Completion, engine: Engine, *, as_json: bool) -> None:
    if c.text is None and engine.text is not None:
        try:
            engine.text.decode(c.token_ids)
        except EngineError as error:  # the ids were paid for: they are printed
            _warn(f"request {i}: {error}")
    if not as_json:
        ids = ",".join(map(str, c.token_ids))
        print(f"[{i}] {c.finish_reason}: {ids if c.text is None else c.text}", flush=True)
        for token, logprob, best in zip(c.token_ids, c.logprobs, c.top_logprobs, strict=False):
            others = "  ".join(f"{_named(id, engine)} {value:.3f}" for id, value in best)
            print(f"    {_named(token, engine)} {logprob:.3f}; likeliest {others}", flush=True)
        return
    line: dict[str, Any] = {
        "index": i,
        "prompt_ids": c.prompt_ids,
        "token_ids": c.token_ids,
        "logprobs": c.logprobs,
        "finish_reason": c.finish_reason,
    }
    line |= {} if c.text is None else {"text": c.text}
    line |= {"top_logprobs": c.top_logprobs} if c.top_logprobs else {}
    print(json.dumps(line, allow_nan=False), flush=True)


def _named(token: int, engine: Engine) -> str:
    """A token's id, and its text where that can be told."""
    try:
        return str(token) if engine.text is None else f"{token} {engine.text.decode([token])!r}"
    except EngineError:
        return str(token)


@app.command()
def inspect(
    model: ModelName,
    dtype: Dtype = "bfloat16",
    ignore_key: IgnoreKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print what config.json says: family, widths, bytes of weights and of a cached token.

    ``programs`` are those that an engine of default settings compiles on this machine. What fits
    into a memory is printed by ``mla-jax fit``.
    """
    facts = facts_of(model_of(model, ignore_keys=ignore_key or ()), dtype)
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        if isinstance(value, list):
            print("\n  ".join([f"{name}: {len(value)}", *value]))
            continue
        inner = value.items() if isinstance(value, dict) else ()
        print(f"{name}: {'  '.join(f'{k}={v:,}' for k, v in inner) if inner else value}")


@app.command()
@grouped
def explain(
    op: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPLAINED)}.")],
    widths: WidthOptions,
    requests: Size = 8,
    tokens: Annotated[int, typer.Option(min=1, max=MOST, help="Query tokens.")] = 8,
    keys: Annotated[int, typer.Option(min=1, max=MOST, help="Key tokens of mla_prefill.")] = 8,
    page_size: Size = 64,
    pages: Annotated[int, typer.Option(min=1, max=MOST, help="Page-table width.")] = 64,
    dtype: Dtype = "bfloat16",
    cache_dtype: StoredDtype = "bf16",
    causal: bool = True,
    backend: str | None = None,
) -> None:
    """Say which backend would run an operation on this device, and why not the others.

    ``prefill_crossover``: whether ``tokens`` new tokens on ``keys`` cached ones are expanded.
    """
    problem = Problem(
        dims=widths.dims,
        requests=requests,
        tokens=tokens,
        keys=keys,
        page=page_size,
        pages=pages,
        dtype=dtype,
        cache_dtype=cache_dtype,
        causal=causal,
    )
    print(problem.explain(op, backend=backend))


@app.command("parity")
def parity_command(
    model: Model,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="How many tokens, drawn evenly: 96, or what has room.")
    ] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead, as 1,2,3.")] = None,
    layers: Annotated[int | None, typer.Option(help="Leading layers only; serves nothing.")] = None,
    serve: Annotated[bool, typer.Option(help="Also serve the tokens and compare logits.")] = True,
    out: Out = None,
    ignore_key: IgnoreKey = None,
) -> None:
    """Compare every tensor with transformers, and name the convention where they part.

    Exit code 1 if they do. Needs the extra ``parity`` (torch and transformers): in a checkout,
    pip install -e '.[parity]'.
    """
    keys = ignore_key or ()
    model_dir = folder_of(model)
    config = read_config(model_dir, ignore_keys=keys)
    ids = None
    if prompt_ids is not None:
        if tokens is not None:
            raise EngineError("--tokens", f"{tokens}, with --prompt-ids", "one of them")
        ids = ids_of(prompt_ids, vocab=config.vocab, where="--prompt-ids")
    found = parity.compare(
        model_dir,
        parity.prompt_ids(config, tokens) if ids is None else ids,
        layers=layers,
        serve=serve,
        ignore_keys=keys,
        progress=lambda what: print(f"mla-jax: {what}", file=sys.stderr),
    )
    show(parity_report(found), title=f"parity of {model}", out=out)
    raise typer.Exit(0 if found.agrees else 1)


@app.command("roofline")
def roofline_command(
    model: ModelName,
    device: Annotated[str, typer.Option(help=f"One of {', '.join(PEAKS)}.")] = "H200",
    phase: Annotated[
        Literal["decode", "prefill"], typer.Option(help="A new token each, or whole prompts.")
    ] = "decode",
    batch: Annotated[int, typer.Option(help="Requests.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of each, cached or new. Default: 4096, or the model's limit."),
    ] = None,
    weights: Annotated[Literal["bf16", "fp8"], typer.Option(help="Of the layers.")] = "bf16",
    cache_dtype: Annotated[StoredDtype, typer.Option(help="Of cached rows.")] = "bf16",
    results: Annotated[
        Path | None, typer.Option(help="Measured tables: benchmarks/results of a checkout.")
    ] = None,
    out: Out = None,
    ignore_key: IgnoreKey = None,
) -> None:
    """Print bytes, FLOPs, floor and time of every kernel of a step, with a picture."""
    config = model_of(model, ignore_keys=ignore_key or ())
    found = roofline(
        config,
        device=device,
        phase=phase,
        batch=batch,
        context=_context(context, config),
        weights=weights,
        cache=cache_dtype,
        results=results,
    )
    show(roofline_report(found), title=f"{model}: {phase} step", out=out)


@app.command("fit")
def fit_command(
    model: ModelName,
    device: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PEAKS)}. Default: H200.")
    ] = None,
    cards: Annotated[int, typer.Option(help="How many, weights divided among them.")] = 1,
    memory: Annotated[float | None, typer.Option(help="GiB of a card instead.")] = None,
    share: Annotated[float, typer.Option(help="Part of it that JAX takes.")] = 0.75,
    dtype: DtypeOption = "bfloat16",
    fp8_weights: Annotated[bool, typer.Option(help="Products keep e4m3 weights.")] = False,
    cache_dtype: CacheOption = "auto",
    page_size: int = 64,
    compare: Annotated[
        bool, typer.Option("--compile", help="Compile a step of the true size and compare.")
    ] = False,
    batch: Annotated[int | None, typer.Option(help="Of the compiled step. Default: 8.")] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Of the compiled step. Default: 4096, or the model's limit."),
    ] = None,
    out: Out = None,
    ignore_key: IgnoreKey = None,
) -> None:
    """Print what weights and caches take, and the largest batch for each context."""
    if memory is not None and not (is_real(memory) and 0 < memory <= _MOST_GIB):
        allowed = f"GiB above 0, at most {_MOST_GIB:,.0f}"
        raise EngineError("--memory", memory, allowed, "A GPU of 80 GB has about 79.")
    if memory is not None and device is not None:
        raise EngineError("--memory", f"{memory}, with --device {device}", "one of them")
    for name, value in (("--batch", batch), ("--context", context)):
        if value is not None and not compare:
            raise EngineError(name, value, "with --compile, whose step has it")
    config = model_of(model, ignore_keys=ignore_key or ())
    context = _context(context, config)
    settings = fit.Settings(
        config=config,
        cards=cards,
        dtype=dtype,
        fp8=fp8_weights,
        cache_format=cache_format(dtype, cache_dtype),
        page=page_size,
    )
    room = peaks_of(device or "H200").memory if memory is None else memory * 2**30
    found = fit.fit(settings, memory=room, share=share)
    batch = 8 if batch is None else batch
    made = fit.compiled(settings, batch=batch, context=context) if compare else None
    show(fit_report(found, made), title=f"{model}: what fits", out=out)


def _context(given: int | None, config: AnyConfig) -> int:
    """Tokens of a request, checked."""
    most = config.max_positions
    return min(4096, most) if given is None else checked_size("--context", given, high=most)


@app.command("support-matrix")
def support_matrix() -> None:
    """Print every backend and what it requires, as a Markdown table."""
    print(ops.support_matrix())


@app.command()
def demo() -> None:
    """Serve the small trained model of the package and check its answers."""
    os.environ.setdefault(*ONE_QUEUE)
    raise typer.Exit(serve_demo())
