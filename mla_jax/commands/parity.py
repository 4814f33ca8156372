"""Our model against transformers, tensor by tensor: where they part, and by which convention.

``compare`` loads a checkpoint folder twice, in float32, runs the same token ids through both and
returns a ``Parity``: one row for each tensor of ``trace.Trace``, the first that differs by more
than rounding, what each side does in every step (``conventions``), weights that were read
otherwise than stored, and the logits of a served request.
"""

import importlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.commands.conventions import STAGES, Finding, Site, difference, find, told_apart
from mla_jax.commands.trace import Trace, trace_model
from mla_jax.commands.trace_v4 import trace_model_v4
from mla_jax.config import ModelConfig
from mla_jax.config_v4 import AnyConfig, V4Config
from mla_jax.engine import Engine
from mla_jax.errors import ArgumentError
from mla_jax.model import weights
from mla_jax.model.family import family_of
from mla_jax.model.reading import Tensors
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.sharding import named_leaves
from mla_jax.model.weight_table import Weight, weight_table
from mla_jax.types import cdiv

__all__ = ["Parity", "Row", "compare", "first_layers", "judge", "load_ours", "prompt_ids"]

PAGE, SERVED = 16, 4
"""Rows of a page, and tokens of the request that is served for comparison."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor of both sides."""

    name: str
    shape: tuple[int, ...]
    difference: float  # largest absolute
    magnitude: float  # largest absolute value of transformers
    diverges: bool  # by more than rounding


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What a comparison found."""

    folder: str
    config: AnyConfig
    tokens: int
    rows: tuple[Row, ...]
    served: tuple[Row, ...]  # logits of an engine's prefill and decode steps
    findings: tuple[Finding, ...]  # steps and weights in which a side departs from config.json
    conventions: tuple[tuple[str, str, str, str], ...]  # name, config.json, transformers, mla_jax

    @property
    def first(self) -> str | None:
        """The first tensor that diverges; a weight counts before every tensor."""
        wrong = [f"weights of layer {f.layer}: {f.output}" for f in self.weight_findings]
        wrong += [row.name for row in (*self.rows, *self.served) if row.diverges]
        return wrong[0] if wrong else None

    @property
    def weight_findings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.output.endswith((".weight", ".bias")))

    @property
    def faults(self) -> tuple[str, ...]:
        """``convention: value`` in which mla_jax departs from config.json, each once."""
        mine = (f for f in self.findings if f.side == "mla_jax")
        texts = (f"{f.convention or 'unexplained: ' + f.output}: {f.value}" for f in mine)
        return tuple(dict.fromkeys(texts))

    @property
    def agrees(self) -> bool:
        """Nothing diverges."""
        return self.first is None


def compare(
    folder: str | Path,
    token_ids: Sequence[int] | None = None,
    *,
    layers: int | None = None,
    serve: bool = True,
    ignore_keys: Collection[str] = (),
    progress: Callable[[str], None] = lambda what: None,
) -> Parity:
    """The folder's model computed by transformers and here.

    Args:
        token_ids: one sequence; ``prompt_ids`` by default.
        layers: only so many leading layers, for models that do not fit twice; then nothing is
            served.
        serve: also serve the sequence and four more tokens, and compare those logits.
        progress: told what is done next.

    Raises:
        ArgumentError: ids of no token, or more of them than there are positions.
        ConfigError: config.json, a family without tracer, or transformers is not installed.
        WeightsError: the folder does not hold the model.
    """
    config = first_layers(weights.checked_config(folder, ignore_keys=ignore_keys), layers)
    ids = list(prompt_ids(config) if token_ids is None else token_ids)
    if not ids or not all(0 <= i < config.vocab for i in ids):
        raise ArgumentError("parity: token ids", ids, f"1 or more, each 0 to {config.vocab - 1}")
    serve = serve and layers is None
    most = config.max_positions - (SERVED if serve else 0)
    if len(ids) > most:
        allowed = f"at most {most} of the model's {config.max_positions} positions"
        more = f"{SERVED} more tokens are served; serve=False (--no-serve) leaves them out."
        raise ArgumentError("parity: token ids", len(ids), allowed, more if serve else "")
    tensors = Tensors(folder)
    progress("transformers")
    other: Any = importlib.import_module("mla_jax.commands.transformers_trace")
    reference = other.load(tensors, config)
    of_v4 = isinstance(config, V4Config)
    theirs = (other.trace_v4 if of_v4 else other.trace)(reference, config, ids)
    progress("mla_jax")
    model = load_ours(folder, config)
    mine = (trace_model_v4 if of_v4 else trace_model)(model, config, ids)  # pyright: ignore
    served: tuple[Row, ...] = ()
    if serve:
        progress("a served request")
        logits_of = partial(other.logits_of, reference)
        served = _served(folder, config, ids, logits_of, ignore_keys=ignore_keys)
    progress("conventions")
    return judge(tensors, config, mine, theirs, model=model, served=served)


def prompt_ids(config: AnyConfig, tokens: int | None = None) -> list[int]:
    """Ids drawn evenly from the vocabulary, always the same; None: 96, or what has room.

    Raises:
        ArgumentError: more than the model has positions for, with those that are served behind.
    """
    most = config.max_positions - SERVED
    count = min(96, most) if tokens is None else tokens
    if not 1 <= count <= most:
        allowed = f"1 to {most}: {config.max_positions} positions, {SERVED} of them served"
        raise ArgumentError("parity: tokens", count, allowed)
    return np.random.default_rng(0).integers(min(3, config.vocab - 1), config.vocab, count).tolist()


def first_layers[C: AnyConfig](config: C, layers: int | None) -> C:
    """The configuration with its leading ``layers`` layers only."""
    if layers is None or layers == config.layers:
        return config
    if isinstance(config, V4Config):
        raise ArgumentError("parity: layers of a DeepSeek V4", layers, "None: all of them")
    if not 1 <= layers <= config.layers:
        raise ArgumentError("parity: layers", layers, f"1 to {config.layers}")
    sparse = config.sparse_layers[:layers]
    indexer = config.indexer and replace(config.indexer, full=config.indexer.full[:layers])
    return replace(
        config,
        layers=layers,
        sparse_layers=sparse,
        moe=config.moe if any(sparse) else None,
        indexer=indexer,
    )


def load_ours(folder: str | Path, config: AnyConfig) -> nnx.Module:
    """Our module with the folder's weights in float32, of as many layers as ``config`` has."""
    dtype = jnp.dtype(jnp.float32)
    model = family_of(config.family).abstract(config, dtype)
    weights.place(model, weights.load(folder, config, dtype=dtype, leading=True))
    return model


def judge(
    tensors: Tensors,
    config: AnyConfig,
    mine: Trace,
    theirs: Trace,
    *,
    model: nnx.Module | None = None,
    served: tuple[Row, ...] = (),
) -> Parity:
    """The comparison of two traces of one sequence; ``model`` has its weights compared too.

    Of DeepSeek V4 only tensors are compared: its conventions and weights have no entries here.
    """
    rows = tuple(_row(name, mine[name], value) for name, value in theirs.tensors.items())
    facts = {"folder": str(tensors.folder), "config": config, "tokens": len(mine["embedding"])}
    if isinstance(config, V4Config):
        return Parity(**facts, rows=rows, served=served, findings=(), conventions=())
    findings = _weight_findings(model, config, tensors) if model is not None else []
    done: set[tuple[str, bool]] = set()
    seen: dict[str, _Convention] = {}
    for i in range(config.layers):
        for stage in STAGES:
            for trace in (theirs, mine):
                site = Site(trace=trace, config=config, tensors=tensors, number=i)
                if not stage.when(site):
                    continue
                if (stage.output, site.sparse) not in done:
                    done.add((stage.output, site.sparse))
                    for name, value in told_apart(stage, site).items():
                        seen.setdefault(name, _Convention(value, {}))
                finding = find(stage, site)
                if finding.value:
                    findings.append(finding)
                _note(seen, finding, stage.choices(site))
    return Parity(
        **facts,
        rows=rows,
        served=served,
        findings=tuple(findings),
        conventions=tuple(
            (name, c.expected, c.said("transformers"), c.said("mla_jax"))
            for name, c in seen.items()
        ),
    )


class _Convention(NamedTuple):
    """What config.json asks for, and what each side was seen to do."""

    expected: str
    sides: dict[str, set[str]]

    def said(self, side: str) -> str:
        return " or ".join(sorted(self.sides.get(side, {"not seen"})))


def _note(
    seen: dict[str, _Convention], finding: Finding, choices: dict[str, tuple[str, ...]]
) -> None:
    """What a side does in a step, under each convention that the sequence tells apart."""
    unexplained = finding.value and not finding.convention
    for name, values in choices.items():
        if name in seen:
            value = finding.value if finding.convention == name else values[0]
            noted = seen[name].sides.setdefault(finding.side, set())
            noted.add("not explained" if unexplained else value)


def _row(name: str, mine: np.ndarray, theirs: np.ndarray) -> Row:
    largest, wrong = difference(name, mine, theirs)
    return Row(
        name=name,
        shape=theirs.shape,
        difference=largest,
        magnitude=float(np.abs(theirs).max(initial=0.0)),
        diverges=wrong,
    )


def _served(
    folder: str | Path,
    config: AnyConfig,
    ids: list[int],
    logits_of: Callable[[Sequence[int]], np.ndarray],
    *,
    ignore_keys: Collection[str] = (),
) -> tuple[Row, ...]:
    """Logits of an engine's steps on these ids against the other side's on the same tokens."""
    engine = Engine.from_pretrained(
        folder,
        ignore_keys=ignore_keys,
        dtype=jnp.dtype(jnp.float32),
        cache_format="fp32",
        page=PAGE,
        num_pages=1 + cdiv(len(ids) + SERVED, PAGE),
        max_requests=1,
        prefill_chunk=max(PAGE, len(ids) // 2),
        max_model_len=len(ids) + SERVED,
        want_logits=True,
    )
    wish = SamplingParams(max_new_tokens=SERVED, ignore_eos=True)
    (done,) = engine.generate([ids], wish)
    theirs = logits_of([*ids, *done.token_ids])[len(ids) - 1 : -1]
    mine = np.asarray(done.logits)
    names = ["served.prefill", *(f"served.decode.{i}" for i in range(1, SERVED))]
    return tuple(_row(n, m, t) for n, m, t in zip(names, mine, theirs, strict=True))


def _weight_findings(model: nnx.Module, config: ModelConfig, tensors: Tensors) -> list[Finding]:
    """Leaves that are not what the folder's tensors say, and how they were read instead."""
    leaves = named_leaves(nnx.state(model, nnx.Param))
    found: dict[tuple[str, str, str], Finding] = {}
    for weight in weight_table(config):
        leaf = leaves[weight.paths[0]]
        leaf = np.asarray(leaf if weight.place is None else leaf[weight.place.index], np.float32)
        for e, name in enumerate(weight.names()):
            have = weight.to_checkpoint(leaf[e] if weight.experts else leaf)
            if not difference(name, have, _stored(tensors, weight, name, e))[1]:
                continue
            finding = _how_read(config, tensors, weight, name, e, have)
            found.setdefault((finding.output, finding.convention, finding.value), finding)
    return list(found.values())


def _stored(tensors: Tensors, weight: Weight, name: str, e: int) -> np.ndarray:
    """A tensor as the folder means it, in either layout of experts."""
    if name in tensors or not weight.experts:
        return tensors[name]
    parts = ("gate_proj", "up_proj", "down_proj")
    return tensors.expert(_layer_of(name), e)[parts.index(name.rsplit(".", 2)[-2])]


def _layer_of(name: str) -> str:
    return ".".join(name.split(".")[:3])


def _how_read(
    config: ModelConfig, tensors: Tensors, weight: Weight, name: str, e: int, have: np.ndarray
) -> Finding:
    """The mistake that turns the stored tensor into the leaf, if it is one of the usual ones."""
    layer = int(name.split(".")[2]) if weight.place is not None else -1
    short = name.removeprefix(f"model.layers.{layer}.") if layer >= 0 else name
    short = short.replace(f".experts.{e}.", ".experts.") if weight.experts else short
    facts = {"side": "mla_jax", "layer": layer, "output": short}
    for convention, value, expected, other in _readings(config, tensors, weight, name, e):
        error, wrong = difference(name, have, other)
        if not wrong:
            return Finding(
                **facts, convention=convention, value=value, expected=expected, error=error
            )
    return Finding(**facts, convention="", value="another tensor", expected="", error=math.inf)


def _readings(config: ModelConfig, tensors: Tensors, weight: Weight, name: str, e: int):
    """``(convention, value, expected, tensor)`` of the usual mistakes of reading this tensor."""
    d, right = config.dims, _stored(tensors, weight, name, e)
    if tensors.scaled(name):
        codes, scales = tensors.codes(name), tensors.scales(name)
        grown = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: codes.shape[0], : codes.shape[1]]
        expected = "codes times their block's scale"
        yield "block scales of e4m3 weights", "divided by", expected, codes / grown
        yield "block scales of e4m3 weights", "left out", expected, codes
    if name.endswith("kv_b_proj.weight"):
        heads = right.reshape(d.heads, d.nope + d.v, -1)
        swapped = np.concatenate([heads[:, d.nope :], heads[:, : d.nope]], 1).reshape(right.shape)
        moved = np.concatenate([heads[:, d.v :], heads[:, : d.v]], 1).reshape(right.shape)
        expected = "[key; value] of each head"
        yield "order of kv_b_proj", "[value; key] of each head", expected, swapped
        yield "order of kv_b_proj", "[value; key] of each head", expected, moved
    if name.endswith(("q_b_proj.weight", "q_proj.weight", "kv_a_proj_with_mqa.weight")) and d.rope:
        halves = _permuted(right, d.rope, 1 if "kv_a" in name else d.heads)
        yield "order of rotary rows", "permuted to halves", "as stored", halves
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        twin = "up_proj" if "gate_proj" in name else "gate_proj"
        other = name.replace("gate_proj" if twin == "up_proj" else "up_proj", twin)
        yield "gate and up", "swapped", "gate first", _stored(tensors, weight, other, e)
    if right.ndim == 2 and right.shape[0] == right.shape[1]:
        yield "order of a matrix", "transposed", "[out, in]", right.T


def _permuted(matrix: np.ndarray, rope: int, heads: int) -> np.ndarray:
    """Rows ``(2i, 2i + 1)`` of the last ``rope`` of each head moved to ``(i, i + rope / 2)``."""
    order = [*range(0, rope, 2), *range(1, rope, 2)]
    rows = matrix.reshape(heads, -1, matrix.shape[-1]).copy()
    rows[:, -rope:] = rows[:, -rope:][:, order]
    return rows.reshape(matrix.shape)
