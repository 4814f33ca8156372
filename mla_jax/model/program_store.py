"""Compiled programs in a folder, so that a later process neither traces nor compiles them.

JAX's persistent cache keeps what XLA compiles; tracing, and lowering the Mosaic kernels in Python,
are done again by every process, which takes seconds a program. Here a whole executable is stored
under a digest of everything that it follows from.

Loading one runs what is in the file: the folder must be yours.
"""

import hashlib
import importlib
import inspect
import uuid
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from mla_jax.checks import made_folder
from mla_jax.errors import EngineError
from mla_jax.placement import Placement

__all__ = ["ProgramStore", "source_digest", "source_of"]

DIGEST_BYTES = hashlib.sha256().digest_size


@cache
def source_digest() -> str:
    """Of every Python file of this package: another version of it has other programs."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def source_of(kind: type) -> str:
    """The file that defines a class outside of this package: programs follow from it too."""
    if kind.__module__.split(".")[0] == __name__.split(".")[0]:
        return kind.__qualname__
    try:
        return Path(inspect.getfile(kind)).read_text()
    except (OSError, TypeError):  # made in a console, of which there is no file
        return f"{kind.__module__}.{kind.__qualname__} {id(kind)}"


class ProgramStore:
    """Executables of one placement by what they were compiled from.

    Programs that flags of XLA changed are not told apart: use a folder for each set of flags.
    """

    def __init__(self, folder: str | Path, placement: Placement):
        allowed = "a folder, as a text or a Path"
        if not isinstance(folder, str | Path):
            raise EngineError("programs", type(folder).__name__, allowed)
        if folder == "":  # a Path of it would be the current folder, and loading runs what is there
            raise EngineError("programs", repr(folder), allowed, "'.' is the current folder.")
        self.folder, self.placement = Path(folder), placement
        made_folder("programs", self.folder)
        if placement.on_gpu:
            # Says where the runtime of Mosaic kernels is: without it they are assembled again.
            importlib.import_module("jax.experimental.mosaic.gpu")
        client = placement.device.client
        self._common = (
            jax.__version__,
            client.platform_version,
            placement.device.device_kind,
            placement.size,
            (placement.processes, jax.process_index()),  # all have theirs, or none has
            source_digest(),
            jax.config.jax_enable_x64,  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.jax_default_prng_impl,  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.jax_threefry_partitionable,  # pyright: ignore[reportAttributeAccessIssue]
            # A program of one device runs on any; one of several only on its own, in their order.
            [d.id for d in placement.mesh.devices.flat] if placement.size > 1 else (),
        )
        self._warned = False

    def path(self, facts: Sequence[object]) -> Path:
        """The file of a program that follows from these facts; their ``repr`` tells them apart."""
        text = "\n".join(map(repr, (*self._common, *facts)))
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.program"

    def new_name(self) -> str:
        """Of a function whose program is to be stored: one that JAX's persistent cache cannot have.

        What XLA's CPU client reads from that cache lacks functions once it is stored again.
        """
        return f"run_{uuid.uuid4().hex}"

    def load(self, facts: Sequence[object], in_tree: Any, out_tree: Any) -> Any:
        """The stored executable, or None: never stored, damaged, unreadable, or of another build.

        Bytes that are not those that were written would end the process when they are loaded.
        """
        path = self.path(facts)
        try:
            stored = path.read_bytes() if path.is_file() else b""
        except OSError:
            return None
        data = stored[DIGEST_BYTES:]
        if stored[:DIGEST_BYTES] != self._digest(path, data):
            return None
        try:
            return serialize_executable.deserialize_and_load(
                data,
                in_tree,
                out_tree,
                backend=self.placement.device.client,
                execution_devices=list(self.placement.mesh.devices.flat),
            )
        except Exception:  # what pickle, JAX and XLA raise for what they cannot read: made again
            return None

    def save(self, facts: Sequence[object], compiled: Any) -> None:
        """Store an executable; a reader never sees half a file.

        Where the folder takes none, the program serves this process, and a warning says so once.
        """
        data, _, _ = serialize_executable.serialize(compiled)
        path = self.path(facts)
        partial = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            with partial.open("xb") as file:
                file.write(self._digest(path, data))
                file.write(data)
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            if not self._warned:
                text = f"programs are not stored in {self.folder}: {error.strerror}"
                warnings.warn(text, stacklevel=2)
                self._warned = True

    @staticmethod
    def _digest(path: Path, data: bytes) -> bytes:
        """What a file begins with: it follows from its name, hence from its facts, and its data."""
        digest = hashlib.sha256(path.name.encode())
        digest.update(data)
        return digest.digest()
