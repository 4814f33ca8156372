"""Reading files of unknown origin: regular files only, up to a size."""

import errno
import os
import stat
from pathlib import Path

__all__ = ["read_regular"]


def read_regular(path: Path, *, limit: int) -> bytes:
    """The bytes of a regular file, or of a link to one, of at most ``limit`` bytes.

    A pipe would be waited for and a device read without end, so neither is opened for reading.

    Raises:
        OSError: it is none, it is larger, or it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe opens at once
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"{_kind(found.st_mode)}, not a regular file", str(path))
        if found.st_size > limit:
            raise _too_large(path, f"{found.st_size:,} bytes", limit)
        with os.fdopen(fd, "rb", closefd=False) as file:
            content = file.read(limit + 1)  # files of /proc say that they are empty
    finally:
        os.close(fd)
    if len(content) > limit:
        raise _too_large(path, "more", limit)
    return content


def _too_large(path: Path, given: str, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"{given}, at most {limit:,} bytes are read", str(path))


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a pipe",
        stat.S_IFDIR: "a folder",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
