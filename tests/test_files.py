import os
from pathlib import Path

import pytest

from mla_jax.files import read_regular


def test_regular_files_and_links_up_to_the_limit(tmp_path: Path):
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(file)
    assert read_regular(file, limit=5) == read_regular(tmp_path / "link", limit=5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, at most 4 bytes are read"):
        read_regular(file, limit=4)


def test_what_would_hang_or_not_end_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "sparse").open("wb") as f:
        f.truncate(20 * 2**30)
    for name, message in [
        ("pipe", "a pipe, not a regular file"),
        ("zero", "a device, not a regular file"),
        ("sparse", "21,474,836,480 bytes, at most 1,024"),
        (".", "a folder, not a regular file"),
        ("none", "No such file"),
    ]:
        with pytest.raises(OSError, match=message):
            read_regular(tmp_path / name, limit=1024)


def test_a_file_that_lies_about_its_size_is_read_up_to_the_limit():
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(OSError, match="more, at most 3 bytes"):
        read_regular(Path("/proc/self/status"), limit=3)
