"""Checkpoint folders to model leaves and back, one tensor in host memory at a time.

Quantised tensors ``X`` (e4m3) come with ``X_scale_inv``, one float32 per 128 x 128 block:
``W[o, i] = float32(X[o, i]) * scale[o // 128, i // 128]``, rounded once to the leaf's dtype.
Those of V4, ``Y.weight``, come with ``Y.scale`` of E8M0, powers of two. Its experts may be packed
E2M1, two codes a byte, the low nibble the even column, with one scale for each 32 columns. Where
weights stay e4m3, these become so (``e4m3_of_fp4``).
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax import lax

from mla_jax.checks import checked_size
from mla_jax.config_v4 import AnyConfig, V4Config, read_config
from mla_jax.errors import WeightsError
from mla_jax.model.safetensors_io import Checkpoint, Tensor, write_safetensors
from mla_jax.model.sharding import named_leaves
from mla_jax.model.stack import Place
from mla_jax.model.weight_row import Weight
from mla_jax.model.weight_table import expected_shapes, fused_experts, weight_table
from mla_jax.model.weight_table_v4 import layout_of, stays_e4m3, weight_table_v4
from mla_jax.placement import put
from mla_jax.types import Array, Int, cdiv

__all__ = [
    "Progress",
    "checked_config",
    "dequantise",
    "dequantise_fp4",
    "e4m3_of_fp4",
    "keeps_fp8",
    "load",
    "place",
    "save",
]

type Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes to read."""

_BLOCK = 128  # literal: 576 rows have 5 scale rows
_FLOATS = ("F32", "BF16", "F16", "F64")
_INTEGERS = ("I64", "I32")
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_LAYER_NAME = re.compile(r"(?:model\.)?layers\.([0-9]{1,9})\.")
_EXPERT_NAME = re.compile(
    r"((?:model\.)?layers\.[0-9]{1,9})\.(?:mlp|ffn)\.experts\.([0-9]{1,9}|\{e\})\."
)
_PACKED = ("I8", "U8")  # two E2M1 codes a byte, with one scale for each 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_FP4_BLOCK = 32
_FP4_SHIFT = 6  # 6 * 2^6 is the largest E2M1 value that e4m3 (448) holds times a power of two
_FP4_DEEPEST = 19  # so many powers of two below a block's largest scale all values become 0
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED = 1024  # rows at a time


def checked_config(folder: str | Path, *, ignore_keys: Collection[str] = ()) -> AnyConfig:
    """The folder's configuration, once the headers of its tensors were compared with it.

    So that nothing is allocated, and no table built, for what the files do not hold.

    Raises:
        ConfigError: as ``ModelConfig.from_hf``.
        WeightsError: every missing, unexpected, misshapen or mistyped tensor.
    """
    config = read_config(folder, ignore_keys=ignore_keys)
    _checked_table(folder, config, Checkpoint.open(folder).tensors)
    return config


def _checked_table(
    folder: str | Path, config: AnyConfig, tensors: Mapping[str, Tensor], *, leading: bool = False
) -> list[Weight]:
    """The rows to read, or WeightsError with what the files lack of them."""
    layers = {match[1] for name in tensors if (match := _LAYER_NAME.match(name))}
    if len(layers) < config.layers:
        first = next(i for i in range(config.layers) if str(i) not in layers)
        given = f"the config asks for {config.layers:,} layers, the files hold {len(layers):,}"
        raise WeightsError(str(folder), [f"missing: model.layers.{first}: {given}"])
    table = _choose_layout(config, tensors)
    problems = _problems(config, table, tensors, leading=leading)
    if problems:
        raise WeightsError(str(folder), problems)
    return table


def load(
    folder: str | Path,
    config: AnyConfig,
    *,
    dtype: str | np.dtype | type,
    progress: Progress | None = None,
    sharding: Callable[[str, tuple[int, ...], np.dtype], jax.sharding.Sharding] | None = None,
    fp8: bool = False,
    leading: bool = False,
) -> dict[str, Array]:
    """Leaves by path, on the default device unless ``sharding(path, shape, dtype)`` says where.

    A leaf of stacked layers is filled row by row where it will stay: beside the leaves, one
    layer's part of one of them is in memory at a time, and each device is sent its own share.

    The router and its choice bias are float32, everything else is ``dtype``. Multi-token
    prediction layers, rotary buffers and the head of a tied model are skipped. With ``fp8`` the
    layers' e4m3 tensors stay as they are, ``[out, in]``, and so do their scales; packed experts
    become such tensors. With ``leading`` the configuration has the first layers of the files only.

    Raises WeightsError with every missing, unexpected, misshapen or mistyped tensor, and for the
    head of a tied model that is not its embedding.
    """
    checkpoint = Checkpoint.open(folder)
    table = _checked_table(folder, config, checkpoint.tensors, leading=leading)
    if _is_tied(config) and (why := _why_not_tied(checkpoint.tensors)):
        raise WeightsError(str(folder), [why])
    if fp8 and (why := _why_not_fp8(config, table, checkpoint.tensors)):
        raise WeightsError(str(folder), [f"{why}; fp8_weights=False, or None, widens what is e4m3"])
    reader = _Reader(
        checkpoint=checkpoint, config=config, progress=progress or (lambda done, total: None)
    )
    reader.total = sum(
        reader.tensors[n].nbytes for w in table for name in w.names() for n in reader.parts(name)
    )
    filling = _Filling(sharding=sharding)
    for weight in table:
        if fp8 and _stays_e4m3(config, weight):
            for path, array in reader.kept(weight):
                filling.put(path, array, weight.place)
            continue
        kept = {"float32": np.dtype(np.float32), "int32": np.dtype(np.int32)}
        target = kept.get(weight.kind, jnp.dtype(dtype))
        for path, array in zip(weight.paths, reader.leaves(weight, target), strict=True):
            filling.put(path, array, weight.place)
    return filling.leaves


@dataclass(kw_only=True)
class _Filling:
    """Leaves in the making. A stack begins as zeros and gets its rows in place."""

    sharding: Callable[[str, tuple[int, ...], np.dtype], jax.sharding.Sharding] | None
    leaves: dict[str, Array] = field(default_factory=dict)

    def put(self, path: str, array: np.ndarray, place: Place | None) -> None:
        """A whole leaf, or the row ``place.index`` of a stack."""
        shape = array.shape if place is None else (place.repeats, *array.shape)
        sharding = self.sharding and self.sharding(path, shape, array.dtype)
        if place is None:
            self.leaves[path] = put(array, sharding)
            return
        if path not in self.leaves:
            self.leaves[path] = jnp.zeros(shape, array.dtype, device=sharding)
        row = put(array, _of_a_row(sharding))
        self.leaves[path] = _set_row(self.leaves[path], row, place.index)


def _of_a_row(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """Of a stack's row, where the stack itself is on these devices."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return sharding.update(spec=jax.sharding.PartitionSpec(*sharding.spec[1:]))


@partial(jax.jit, donate_argnums=0)
def _set_row(stack: Array, row: Array, index: Int[Array, ""] | int) -> Array:
    """``stack`` with ``stack[index] = row``, in place."""
    return lax.dynamic_update_index_in_dim(stack, row, index, 0)


@dataclass(kw_only=True)
class _Reader:
    """Reads tensors, dequantises them and counts the bytes."""

    checkpoint: Checkpoint
    config: AnyConfig
    progress: Progress
    done: int = 0
    total: int = 0

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.checkpoint.tensors

    def parts(self, name: str) -> list[str]:
        """The tensor and, for a quantised one, its scales."""
        scaled = self.tensors[name].dtype in ("F8_E4M3", *_PACKED)
        return [name, _scales_of(name, self.config)] if scaled else [name]

    def leaves(self, weight: Weight, dtype: np.dtype) -> list[np.ndarray]:
        """The finished leaves of one table row; experts are filled in one by one."""
        if not weight.experts:
            return [self._cast(weight, weight.name, None, dtype)]
        out = [np.zeros(weight.leaf_shape, dtype) for _ in weight.paths]
        for e in range(weight.experts):
            name, index = (weight.name, e) if weight.fused else (weight.name.format(e=e), None)
            one = self._cast(weight, name, index, dtype)
            for leaf, part in zip(out, one if len(out) > 1 else [one], strict=True):
                leaf[e] = part
        return out

    def kept(self, weight: Weight) -> Iterator[tuple[str, np.ndarray]]:
        """Bytes and scales of one table row, experts stacked; several of them at a time."""
        (path,) = weight.paths
        names, pairs = [*weight.names()], []
        with ThreadPoolExecutor() as pool:
            for name, pair in zip(names, pool.map(self._kept, names), strict=True):
                self.done += sum(self.tensors[part].nbytes for part in self.parts(name))
                self.progress(self.done, self.total)
                pairs.append(pair)
        values, scales = zip(*pairs, strict=True)
        one = not weight.experts
        yield path, values[0] if one else np.stack(values)
        scale = (scales[0] if one else np.stack(scales)).astype(np.float32)
        yield (path.removesuffix("kernel") + "scale" if one else f"{path}_scale"), scale

    def _kept(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and scales of one tensor."""
        values, scale = (self.tensors[part].read(None) for part in self.parts(name))
        if self.tensors[name].dtype not in _PACKED:
            return values, scale
        if np.isnan(scale.astype(np.float32)).any():
            problem = f"{_scales_of(name, self.config)}: NaN among the scales"
            raise WeightsError(str(self.checkpoint.folder), [problem])
        return e4m3_of_fp4(values, scale)

    def _cast(self, weight: Weight, name: str, index: int | None, dtype: np.dtype) -> np.ndarray:
        read = [self.tensors[part].read(index) for part in self.parts(name)]
        self.done += sum(x.nbytes for x in read)
        self.progress(self.done, self.total)
        x = read[0]
        if weight.integer and x.size and self.config.moe is not None:
            most = self.config.moe.experts - 1
            if not 0 <= x.min() <= x.max() <= most:
                problem = f"{name}: experts {x.min()} to {x.max()}; the model has 0 to {most}"
                raise WeightsError(str(self.checkpoint.folder), [problem])
        if len(read) > 1:
            packed = self.tensors[name].dtype in _PACKED
            x = dequantise_fp4(*read) if packed else dequantise(*read)
        with np.errstate(over="ignore"):
            leaf = np.ascontiguousarray(weight.to_leaf(x).astype(dtype))
        beyond = dtype == np.float16 and not np.isfinite(leaf).all()
        if dtype.itemsize < x.dtype.itemsize and x.size:  # quicker than to look at 16 bits
            info = jnp.iinfo if dtype.kind in "iu" else jnp.finfo
            least, most = (float(limit) for limit in (info(dtype).min, info(dtype).max))
            beyond = beyond or not (x.min() >= least and x.max() <= most)  # nor NaN
        if beyond:
            problem = f"{name}: values beyond {dtype.name}, or NaN; load it in a wider dtype"
            raise WeightsError(str(self.checkpoint.folder), [problem])
        return leaf


def _is_tied(config: AnyConfig) -> bool:
    return not isinstance(config, V4Config) and config.tied


def _why_not_tied(tensors: Mapping[str, Tensor]) -> str:
    """Why the stored head cannot be left out, read some rows at a time; empty if it can."""
    if _HEAD not in tensors or not tensors[_HEAD].nbytes:
        return ""
    head, embedding = tensors[_HEAD], tensors[_EMBEDDING]
    if head.shape == embedding.shape and head.dtype in _FLOATS and embedding.dtype in _FLOATS:
        pairs = zip(head.pieces(_COMPARED), embedding.pieces(_COMPARED), strict=True)
        if all((a.read().astype(float) == b.read().astype(float)).all() for a, b in pairs):
            return ""
    return (
        f'unused: {_HEAD} differs from {_EMBEDDING}, but "tie_word_embeddings" of config.json is '
        'true (given, or by default); "tie_word_embeddings": false would use it'
    )


def keeps_fp8(folder: str | Path, config: AnyConfig) -> bool:
    """Whether ``load(…, fp8=True)`` can: every product of every layer is block-scaled e4m3.

    Of V4 those that are published so, and experts may be packed with E8M0 scales.
    """
    tensors = Checkpoint.open(folder).tensors
    return not _why_not_fp8(config, _checked_table(folder, config, tensors), tensors)


def _stays_e4m3(config: AnyConfig, weight: Weight) -> bool:
    """A matrix of a layer that is not the router's; of V4 those that are published so."""
    if isinstance(config, V4Config):
        return stays_e4m3(weight)
    return weight.place is not None and len(weight.shape) == 2 and not weight.float32


def _why_not_fp8(config: AnyConfig, table: list[Weight], tensors: Mapping[str, Tensor]) -> str:
    """The first product whose weights could not stay e4m3; empty if there is none."""
    for weight in table:
        if not _stays_e4m3(config, weight):
            continue
        for name in weight.names():
            how = "all experts in one tensor" if weight.fused else tensors[name].dtype
            if how in _PACKED and tensors[_scales_of(name, config)].dtype != "F8_E8M0":
                how = f"{how} with scales of {tensors[_scales_of(name, config)].dtype}"
            if how not in ("F8_E4M3", *_PACKED):
                packed = ", or packed with scales of F8_E8M0" if weight.experts else ""
                return f"{name}: given {how}; allowed: F8_E4M3{packed}, a tensor for each product"
    return ""


def dequantise(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """``float32(q[o, i]) * scale[o // 128, i // 128]`` over the last two axes, in float32."""
    out = _E4M3[q.view(np.uint8)]
    for row in range(scale.shape[-2]):
        blocks = scale[..., row, None, :].astype(np.float32)
        factor = np.repeat(blocks, _BLOCK, axis=-1)[..., : q.shape[-1]]
        out[..., row * _BLOCK : (row + 1) * _BLOCK, :] *= factor
    return out


def dequantise_fp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """``E2M1(code[o, i]) * scale[o, i // 32]`` in float32; byte ``j`` has columns 2j and 2j + 1.

    Exact: three significant bits times a power of two.
    """
    codes = packed.view(np.uint8)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1)
    values = _E2M1[pairs.reshape(*codes.shape[:-1], -1)]
    return (
        values * np.repeat(scale.astype(np.float32), _FP4_BLOCK, axis=-1)[..., : values.shape[-1]]
    )


def e4m3_of_fp4(packed: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E2M1 ``[out, in / 2]`` as e4m3 ``[out, in]``, with a float32 scale for each 128 x 128 block.

    ``scale`` has powers of two. A block's scale is ``2^-6`` of its largest, so each code is itself
    times a power of two. The same numbers, but where a block's scales differ by more than 2^14:
    then the smallest become the nearest multiple of 2^-15 of that largest scale.
    """
    exponent = _exponents(scale)
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    down, across = cdiv(rows, _BLOCK), cdiv(columns, _BLOCK)
    padded = np.full((down * _BLOCK, across * (_BLOCK // _FP4_BLOCK)), -256, np.int16)
    padded[: exponent.shape[0], : exponent.shape[1]] = exponent
    largest = padded.reshape(down, _BLOCK, across, -1).max(axis=(1, 3))
    each = np.repeat(np.repeat(largest, _BLOCK, 0), _BLOCK // _FP4_BLOCK, 1)
    below = np.minimum(each[:rows, : exponent.shape[1]] - exponent, _FP4_DEEPEST)
    index = np.repeat(below.astype(np.uint16) << 8, _FP4_BLOCK // 2, axis=1)[:, : columns // 2]
    pairs = _pairs_of_fp4().take(index | packed.view(np.uint8))
    values = pairs.view(np.uint8).reshape(rows, columns).view(ml_dtypes.float8_e4m3fn)
    return values, np.exp2((largest - _FP4_SHIFT).astype(np.float32))


def _exponents(scale: np.ndarray) -> np.ndarray:
    """Of scales that are powers of two."""
    return np.frexp(scale.astype(np.float32))[1].astype(np.int16) - 1


@cache
def _pairs_of_fp4() -> np.ndarray:
    """``[below, byte]``: both values of a byte times ``2^(6 - below)``, as two e4m3 in 16 bits."""
    codes = np.arange(256)
    both = _E2M1[np.stack([codes & 15, codes >> 4], axis=-1)]
    powers = np.exp2(_FP4_SHIFT - np.arange(_FP4_DEEPEST + 1, dtype=np.float32))
    values = (both * powers[:, None, None]).astype(ml_dtypes.float8_e4m3fn)
    return np.ascontiguousarray(values).view(np.uint16).reshape(-1)


def _scales_of(name: str, config: AnyConfig) -> str:
    """The tensor of a quantised tensor's scales."""
    if not isinstance(config, V4Config) or ".self_attn." in name or ".mlp." in name:
        return f"{name}_scale_inv"
    return name.removesuffix("weight") + "scale"


def _choose_layout(config: AnyConfig, tensors: Mapping[str, Tensor]) -> list[Weight]:
    """The released table, with fused experts in the layers where the checkpoint has them."""
    if isinstance(config, V4Config):
        return list(weight_table_v4(config, layout=layout_of(tensors)))
    table: list[Weight] = []
    fused: dict[int, bool] = {}
    for weight in weight_table(config):
        if not weight.experts:
            table.append(weight)
            continue
        layer = int(weight.name.split(".")[2])
        if layer not in fused:
            rows = fused_experts(config, layer)
            fused[layer] = any(w.name in tensors for w in rows)
            table += rows if fused[layer] else []
        table += [] if fused[layer] else [weight]
    return table


def _problems(
    config: AnyConfig, table: list[Weight], tensors: Mapping[str, Tensor], *, leading: bool
) -> list[str]:
    missing: list[str] = []
    wrong: list[str] = []
    used: set[str] = set()
    experts = {match.groups() for match in map(_EXPERT_NAME.match, tensors) if match}
    held = Counter(layer for layer, _ in experts)
    for weight in table:
        match = _EXPERT_NAME.match(weight.name)
        found = held[match[1]] if match else 0
        if not weight.fused and weight.experts > 2 * found + 1024:  # no list of what never was
            name = weight.name.format(e=f"0..{weight.experts - 1}")
            missing.append(
                f"missing: {name} {list(weight.shape)}; the files hold {found:,} experts"
            )
            continue
        names = weight.names()
        absent = [n for n in names if n not in tensors]
        lines = [f"missing: {n} {list(names[n])}" for n in absent]
        if weight.experts and len(absent) == weight.experts > 1:
            all_of_them = weight.name.format(e=f"0..{weight.experts - 1}")
            lines = [f"missing: {all_of_them} {list(weight.shape)}"]
        missing += lines
        for name, shape in names.items():
            if name in tensors:
                used.add(name)
                wrong += _tensor_problems(config, weight, name, shape, tensors, used)
    unused = tensors.keys() - used
    extra = sorted(n for n in unused if not _is_skipped(n, config, tensors, leading=leading))
    return missing + wrong + [f"unexpected: {n} {list(tensors[n].shape)}" for n in extra]


def _tensor_problems(
    config: AnyConfig,
    weight: Weight,
    name: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    used: set[str],
) -> Iterator[str]:
    tensor = tensors[name]
    packed = bool(weight.experts) and not weight.fused and tensor.dtype in _PACKED
    if packed and shape[-1] % 2:
        yield f"mistyped: {name} is {tensor.dtype}, two columns a byte; it has {shape[-1]}, odd"
        used.add(_scales_of(name, config))
        return
    if packed:
        shape = *shape[:-1], shape[-1] // 2
    if tensor.shape != shape:
        yield f"misshapen: {name} is {list(tensor.shape)}, the config asks for {list(shape)}"
    if weight.integer:
        if tensor.dtype not in _INTEGERS:
            yield f"mistyped: {name} is {tensor.dtype}; allowed: {', '.join(_INTEGERS)}"
        return
    if tensor.dtype in _FLOATS:
        return
    if not packed and (tensor.dtype != "F8_E4M3" or len(shape) < 2):
        yield f"mistyped: {name} is {tensor.dtype}; allowed: {', '.join(_FLOATS)}, F8_E4M3 matrices"
        return
    scales = _scales_of(name, config)
    used.add(scales)
    if packed:
        blocks = *shape[:-1], cdiv(2 * shape[-1], _FP4_BLOCK)
    else:
        blocks = *shape[:-2], cdiv(shape[-2], _BLOCK), cdiv(shape[-1], _BLOCK)
    if scales not in tensors:
        yield f"missing: {scales} {list(blocks)}, the scales of an {tensor.dtype} tensor"
    elif tensors[scales].shape != blocks:
        given = list(tensors[scales].shape)
        yield f"misshapen: {scales} is {given}, {name} asks for {list(blocks)}"
    elif tensors[scales].dtype not in (*_FLOATS, "F8_E8M0"):
        allowed = f"{', '.join(_FLOATS)}, F8_E8M0"
        yield f"mistyped: {scales} is {tensors[scales].dtype}; allowed: {allowed}"


def _is_skipped(
    name: str, config: AnyConfig, tensors: Mapping[str, Tensor], *, leading: bool
) -> bool:
    """What the main model does not read but a checkpoint of it may hold."""
    if 0 in tensors[name].shape:  # as transformers saves no shared experts
        return True
    if name.endswith((".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")):
        return True
    if isinstance(config, V4Config):
        return name.startswith("mtp.")
    if name == _HEAD:
        return config.tied  # its values are compared when they are read
    match = _LAYER_NAME.match(name)
    if match is None or int(match[1]) < config.layers:
        return False
    return leading or f"{match[0]}eh_proj.weight" in tensors  # of an MTP block, declared or not


def place(module: nnx.Module, weights: Mapping[str, Array]) -> None:
    """Set every ``nnx.Param`` of ``module`` to the leaf of its path, in place.

    Raises WeightsError when paths, shapes or dtypes differ.
    """
    state = nnx.state(module, nnx.Param)
    params = named_leaves(state)
    problems = [f"missing: {p}" for p in params if p not in weights]
    problems += [f"unexpected: {p}" for p in weights if p not in params]
    for path in params.keys() & weights.keys():
        want, have = params[path], weights[path]
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            given, asked = f"{have.dtype}{have.shape}", f"{want.dtype}{want.shape}"
            problems.append(f"misshapen: {path} is {given}, the module has {asked}")
    if problems:
        raise WeightsError(type(module).__name__, problems)
    tree = jax.tree.structure(state)
    nnx.update(module, jax.tree.unflatten(tree, [weights[path] for path in params]))


def save(
    folder: str | Path,
    config: AnyConfig,
    weights: Mapping[str, Array],
    *,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Write ``config.json`` and the released tensor layout, in the dtypes of ``weights``.

    One ``model.safetensors``, or shards of about ``shard_bytes`` with an index.
    Raises WeightsError when ``weights`` are not exactly the leaves of ``config``, ConfigError when
    ``config.json`` cannot say it, and EngineError when ``shard_bytes`` is no size.
    """
    checked_size("save: shard_bytes", shard_bytes, high=2**63 - 1)
    root = Path(folder)
    expected = expected_shapes(config)
    problems = [f"missing: {p}" for p in expected if p not in weights]
    problems += [f"unexpected: {p}" for p in weights if p not in expected]
    for path in expected.keys() & weights.keys():
        if (shape := expected[path][0]) != weights[path].shape:
            given = list(weights[path].shape)
            problems.append(f"misshapen: {path} is {given}, the config asks for {list(shape)}")
    if problems:
        raise WeightsError(str(folder), problems)
    plain: Any = replace(config, fp8_block=None, ignored_layers=0)
    dtype = str(weights["embed.embedding"].dtype)
    text = json.dumps(plain.to_hf() | {"torch_dtype": dtype}, indent=2)
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(text + "\n")
    shards = _shards(_released(config, weights), shard_bytes)
    if len(shards) == 1:
        write_safetensors(root / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        write_safetensors(root / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(x.nbytes for shard in shards for x in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (root / "model.safetensors").unlink(missing_ok=True)  # of an earlier model: it would be read


def _released(config: AnyConfig, weights: Mapping[str, Array]) -> Iterator[tuple[str, np.ndarray]]:
    for weight in weight_table(config):
        leaf = np.asarray(weights[weight.paths[0]])
        leaf = leaf if weight.place is None else leaf[weight.place.index]
        for e, name in enumerate(weight.names()):
            yield name, weight.to_checkpoint(leaf[e] if weight.experts else leaf)


def _shards(
    tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: int
) -> list[dict[str, np.ndarray]]:
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, x in tensors:
        if shards[-1] and size + x.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = x
        size += x.nbytes
    return shards
