"""Checkpoint folders of safetensors files: headers checked before a byte of data is read.

The format: eight bytes of little-endian header length, a JSON header
``{name: {dtype, shape, data_offsets}}``, then the data, back to back. It is read here because
the numpy front end of the safetensors package has no float8. Nothing is ever unpickled.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mla_jax.errors import WeightsError, listed, shown
from mla_jax.files import read_regular

__all__ = ["Checkpoint", "Tensor", "write_safetensors"]

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes, the limit of the format
_MAX_INDEX = 256 * 2**20  # bytes; V3's names 92,000 tensors in 9 million
_SHARD_NAME = re.compile(r"[\w][\w.+-]*\.safetensors")
_MOST_AXES = 64  # of a numpy array
_LONGEST_NAME = 255  # of a file, what file systems take


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Where one tensor lies."""

    file: Path
    offset: int  # of its first byte in the file
    dtype: str  # safetensors name, one of the table above
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def read(self, index: int | None = None) -> np.ndarray:
        """The tensor, or row ``index`` of its first axis, read from the file."""
        shape, offset = self.shape, self.offset
        if index is not None:
            shape = shape[1:]
            offset += index * math.prod(shape) * _DTYPES[self.dtype].itemsize
        size = math.prod(shape) * _DTYPES[self.dtype].itemsize
        data = np.fromfile(self.file, np.uint8, count=size, offset=offset)
        if data.size != size:
            problem = f"{self.file.name}: ended while being read"
            raise WeightsError(str(self.file.parent), [problem])
        return data.view(_DTYPES[self.dtype]).reshape(shape)

    def pieces(self, rows: int) -> Iterator["Tensor"]:
        """The tensor in parts of at most so many rows of its first axis."""
        row = self.nbytes // max(self.shape[0], 1)
        for first in range(0, self.shape[0], rows):
            shape = min(rows, self.shape[0] - first), *self.shape[1:]
            yield replace(self, offset=self.offset + first * row, shape=shape)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The tensors of a folder, by name."""

    folder: Path
    tensors: Mapping[str, Tensor]

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Read the headers of ``model.safetensors``, or of the shards that its index names.

        A shard may be a symbolic link (the hub's cache links to its blobs), but an index may
        only name files of its own folder. Raises WeightsError with every problem found.
        """
        root = Path(folder)
        problems: list[str] = []
        tensors: dict[str, Tensor] = {}
        for file, promised in _files(root, problems).items():
            found = _read_header(root / file, problems)
            if promised is not None and found is not None:
                problems += [f"{file}: {n} is indexed but not there" for n in promised - set(found)]
                problems += [f"{file}: {n} is not in the index" for n in set(found) - promised]
            tensors |= found or {}
        if problems:
            raise WeightsError(str(folder), sorted(problems))
        return cls(folder=root, tensors=tensors)


def _files(root: Path, problems: list[str]) -> dict[str, set[str] | None]:
    """Files to read and, where there is an index, the names that each should hold."""
    single, index = root / "model.safetensors", root / "model.safetensors.index.json"
    if single.exists():
        return {single.name: None}
    if not index.exists():
        pickled = sorted(p.name for p in root.glob("*.bin")) + sorted(
            p.name for p in root.glob("*.pt*")
        )
        hint = f"; {', '.join(pickled)} is never read, convert it" if pickled else ""
        problems.append(f"no model.safetensors and no model.safetensors.index.json{hint}")
        return {}
    try:
        weight_map = _json(read_regular(index, limit=_MAX_INDEX))["weight_map"]
        pairs = list(weight_map.items())
    except OSError as e:
        problems.append(f"{index.name}: {e.strerror or type(e).__name__}")
        return {}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
        problems.append(f"{index.name}: no weight_map ({type(e).__name__}: {shown(e)})")
        return {}
    files: dict[str, set[str]] = {}
    for name, file in pairs:
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            given = repr(file) if isinstance(file, str) else shown(file)
            text = f"{index.name}: {shown(name)} is in {shown(given)}"
            problems.append(f"{text}, not a .safetensors file of this folder")
            continue
        if len(file.encode()) > _LONGEST_NAME:
            text = f"{index.name}: {shown(name)} is in a file whose name has {len(file):,}"
            problems.append(f"{text} characters; allowed: at most {_LONGEST_NAME} bytes")
            continue
        files.setdefault(file, set()).add(name)
    return dict(files)


def _read_header(path: Path, problems: list[str]) -> dict[str, Tensor] | None:
    if not path.is_file():
        problems.append(f"{path.name}: no such file")
        return None
    try:
        with path.open("rb") as f:
            size = path.stat().st_size
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                text = (
                    f"{path.name}: truncated or not safetensors: {size} bytes, header of {length}"
                )
                problems.append(text)
                return None
            header = _json(f.read(length).decode())
    except (OSError, ValueError, RecursionError) as e:
        problems.append(f"{path.name}: unreadable header ({type(e).__name__}: {shown(e)})")
        return None
    if not isinstance(header, dict):
        problems.append(f"{path.name}: header is not a JSON object")
        return None
    header.pop("__metadata__", None)
    return _check_entries(path, header, 8 + length, size, problems)


def _json(text: str | bytes) -> Any:
    """A JSON value whose objects name nothing twice.

    Raises:
        ValueError: no JSON, or a name that comes twice: readers differ on which one counts.
    """
    return json.loads(text, object_pairs_hook=_distinct)


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"given twice: {listed([n for n, times in names.items() if times > 1])}")
    return found


def _check_entries(
    path: Path, header: dict, start: int, size: int, problems: list[str]
) -> dict[str, Tensor]:
    """Tensors whose dtype, shape and bytes agree and which fill the file back to back."""
    tensors: dict[str, Tensor] = {}
    sound = len(problems)
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        problem = _entry_problem(entry, size - start)
        if problem:
            problems.append(f"{path.name}: {shown(name)}: {problem}")
            continue
        first, last = entry["data_offsets"]
        spans.append((first, last, name))
        tensors[name] = Tensor(
            file=path, offset=start + first, dtype=entry["dtype"], shape=tuple(entry["shape"])
        )
    spans.sort()
    for (_, end, a), (begin, _, b) in pairwise(spans):
        if begin < end:
            problems.append(f"{path.name}: {shown(a)} and {shown(b)} overlap")
    if len(problems) == sound:  # otherwise bytes of a refused tensor would count as a gap
        problems += [f"{path.name}: {gap}" for gap in _gaps(spans, size - start)]
    return tensors


def _gaps(spans: list[tuple[int, int, str]], data: int) -> Iterator[str]:
    """Bytes that belong to no tensor: the format has none, so the file is not what it says."""
    for (_, end, a), (begin, _, b) in pairwise([(0, 0, ""), *spans, (data, data, "")]):
        if end < begin:
            where = f"before {shown(b)}" if b else f"after {shown(a)}" if a else "and no tensor"
            yield f"{begin - end:,} bytes from byte {end} of the data belong to nothing, {where}"


def _entry_problem(entry: object, data: int) -> str:
    """What is wrong with one header entry over ``data`` bytes, or nothing."""
    if not isinstance(entry, dict):
        return "entry is not an object"
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        return f"unknown dtype {shown(repr(dtype) if isinstance(dtype, str) else dtype)}"
    if not isinstance(shape, list) or not _are_sizes(shape):
        return f"shape {shown(shape)} is not a list of sizes"
    if not isinstance(span, list) or not _are_sizes(span) or len(span) != 2 or span[0] > span[1]:
        return f"data_offsets {shown(span)} are not [begin, end]"
    if span[1] > data:
        return f"truncated: bytes {span[0]} to {span[1]} of {data}"
    if math.prod(shape) * _DTYPES[dtype].itemsize != span[1] - span[0]:
        return f"{dtype} {shown(shape)} does not fill {span[1] - span[0]} bytes"
    return ""


def _are_sizes(values: list) -> bool:
    return len(values) <= _MOST_AXES and all(type(i) is int and 0 <= i < 2**63 for i in values)


def write_safetensors(path: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one file, a tensor at a time, in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, x in tensors.items():
        span = [offset, offset + x.nbytes]
        header[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": span}
        offset += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            f.write(np.ascontiguousarray(x).view(np.uint8).data if x.size else b"")
