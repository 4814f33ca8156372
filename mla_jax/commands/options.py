"""Options of commands in groups: a command takes each group as one parameter."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from mla_jax.checks import checked_size
from mla_jax.config import MLADims
from mla_jax.config_v4 import AnyConfig
from mla_jax.errors import EngineError, shown
from mla_jax.generation_config import GenerationDefaults
from mla_jax.model.sampling import SamplingParams
from mla_jax.prompts import bias_of, ids_of

__all__ = [
    "MOST",
    "CacheOption",
    "Dtype",
    "DtypeOption",
    "EngineOptions",
    "IgnoreKey",
    "Model",
    "PromptOptions",
    "SamplingOptions",
    "Size",
    "StoredDtype",
    "WidthOptions",
    "cache_format",
    "grouped",
]

MOST = 2**31 - 1  # of a size: kernels count in int32
_CACHE_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# Not ``type`` statements: the help of an option shows the choices of a plain Literal only.
Dtype = Literal["float32", "bfloat16", "float16"]
StoredDtype = Literal["bf16", "fp16", "fp32", "fp8_e4m3"]
CacheDtype = Literal["auto", "bf16", "fp16", "fp32", "fp8_e4m3"]

Model = Annotated[str, typer.Argument(help="A folder, or a hub id (owner/name).")]
Size = Annotated[int, typer.Option(min=1, max=MOST)]
DtypeOption = Annotated[Dtype, typer.Option(help="Of weights and activations.")]
CacheOption = Annotated[CacheDtype, typer.Option(help="auto: as --dtype.")]
IgnoreKey = Annotated[
    list[str] | None,
    typer.Option(help="Unknown key of config.json to pass over; may be given again."),
]


def cache_format(dtype: Dtype, cache_dtype: CacheDtype) -> str:
    """The format that ``--cache-dtype`` names."""
    return _CACHE_OF_DTYPE[dtype] if cache_dtype == "auto" else cache_dtype


def grouped[T](command: Callable[..., T]) -> Callable[..., T]:
    """The command, each parameter that is a dataclass replaced by options of its fields."""
    given = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in given if is_dataclass(p.annotation)}
    parts = [_options(p.annotation) if p.name in groups else [p] for p in given]
    # By keyword, so that an option that has a default may come before one that has none.
    options = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in parts for p in part]

    @wraps(command)
    def run(**values: Any) -> T:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        return command(**values)

    run.__signature__ = inspect.Signature(options)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {p.name: p.annotation for p in options}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    return [
        p.replace(annotation=types[p.name]) for p in inspect.signature(group).parameters.values()
    ]


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is asked; ``prompts.Reader`` reads it."""

    prompt_ids: Annotated[
        list[str] | None, typer.Option(help="Token ids, as 1,2,3. May be given again.")
    ] = None
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text; needs tokenizer.json. May be given again.")
    ] = None
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help='One {"prompt_ids": [...]}, {"prompt": "..."} or {"messages": [...]} a line.'
        ),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Texts are what a user says, by the chat template.")
    ] = False
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None


_ADVISED = "Default: as generation_config.json advises, or else"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn, and when a request ends."""

    max_new_tokens: Annotated[int | None, typer.Option(help=f"{_ADVISED} 16.")] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="The model's own end tokens end no request.")
    ] = False
    stop_ids: Annotated[str, typer.Option(help="More ids that end a request, as 1,2,3.")] = ""
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends a request; may be given again.")
    ] = None
    temperature: Annotated[float | None, typer.Option(help=f"{_ADVISED} 0, the likeliest.")] = None
    top_k: Annotated[int | None, typer.Option(help=f"{_ADVISED} 0, all.")] = None
    top_p: Annotated[float | None, typer.Option(help=f"{_ADVISED} 1, all.")] = None
    min_p: Annotated[float | None, typer.Option(help=f"{_ADVISED} 0, all.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help=f"{_ADVISED} 1, none.")] = None
    presence_penalty: Annotated[float, typer.Option(help="-2 to 2.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="-2 to 2.")] = 0.0
    logit_bias: Annotated[str, typer.Option(help="TOKEN:BIAS, as 12:1.5,7:-100.")] = ""
    logprobs: Annotated[int, typer.Option(help="Print so many likeliest tokens at each.")] = 0
    seed: Annotated[
        str,
        typer.Option(
            help="A number: equal prompts draw equal tokens, each time. Or ``random``: another "
            "number for each request."
        ),
    ] = "0"

    def params(self, defaults: GenerationDefaults, *, vocab: int) -> SamplingParams:
        """What is given here, and what ``defaults`` advise where nothing is.

        Raises:
            EngineError: a value that cannot be served.
        """
        advised = (
            "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in advised}
        return replace(
            defaults.params,
            **{name: value for name, value in given.items() if value is not None},
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=bias_of(self.logit_bias, vocab=vocab, where="--logit-bias"),
            logprobs=self.logprobs,
            seed=_seed(self.seed),
            stop=self.stop or (),
            stop_token_ids=tuple(ids_of(self.stop_ids, vocab=vocab, where="--stop-ids")),
            ignore_eos=self.ignore_eos,
        )


def _seed(text: str) -> int | None:
    if text == "random":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < 2**32):
        raise EngineError(
            "--seed", shown(text), "0 to 2**32 - 1, or random: another one for each request"
        )
    return int(text)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is served."""

    dtype: DtypeOption = "bfloat16"
    cache_dtype: CacheOption = "auto"
    page_size: int = 64
    prefill_chunk: Annotated[
        int | None,
        typer.Option(help="Prompt tokens of one step. Default: 2048 on a GPU, else 512."),
    ] = None
    max_requests: Annotated[int, typer.Option(help="Requests running at once.")] = 32
    num_pages: Annotated[
        int | None,
        typer.Option(
            help="Default: what fits beside the weights, at most enough for --max-requests of the "
            "longest; ``generate`` without --programs takes enough for its prompts."
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Default: the model's limit; ``generate`` without --programs takes its longest "
            "prompt and answer."
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(help="mosaic, triton or xla, of every operation that has it. Default: best."),
    ] = None
    fp8_weights: Annotated[
        bool | None,
        typer.Option(help="Keep e4m3 weights so. Default: on GPUs, if all products are e4m3."),
    ] = None
    fp8_activations: Annotated[
        bool | None,
        typer.Option(
            help="Round activations of long prompts to e4m3, if weights are. Default: on Hopper."
        ),
    ] = None
    devices: Annotated[
        int, typer.Option(min=0, help="How many to divide weights over; 0: all.")
    ] = 1
    cache: Annotated[
        Path | None, typer.Option("--cache", help="JAX's persistent compilation cache.")
    ] = None
    ignore_key: IgnoreKey = None

    def limit(self, config: AnyConfig) -> int:
        """Tokens of a request, prompt and answer together.

        Raises:
            EngineError: more than the model has positions for.
        """
        if self.max_model_len is None:
            return config.max_positions
        most = config.max_positions
        return checked_size("--max-model-len", self.max_model_len, low=2, high=most)


@dataclass(frozen=True, kw_only=True)
class WidthOptions:
    """Widths of an attention layer."""

    heads: Annotated[int, typer.Option(min=1, max=MOST, help="Query heads.")] = 128
    rank: Annotated[int, typer.Option(min=1, max=MOST, help="Elements of a latent.")] = 512
    rope: Annotated[
        int, typer.Option(min=0, max=MOST, help="Rotated elements of a key, shared by the heads.")
    ] = 64
    nope: Annotated[
        int, typer.Option(min=1, max=MOST, help="Elements of a head's key that are not rotated.")
    ] = 128
    v: Annotated[int, typer.Option(min=1, max=MOST, help="Elements of a head's value.")] = 128

    @property
    def dims(self) -> MLADims:
        """As a model has them."""
        return MLADims(
            heads=self.heads, rank=self.rank, nope=self.nope, rope=self.rope, v=self.v, q_rank=None
        )
