"""Text in, text out: all of it, whatever the file asks for, and never a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mla_jax.errors import EngineError
from mla_jax.tokenizer import TextTokenizer

tokenizers = pytest.importorskip("tokenizers")

WORDS = {f"w{i}": i for i in range(10)}
REPLACE = {"type": "Replace", "pattern": {"Regex": "w"}, "content": "w"}


def write(folder: Path, **changes: object) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    data = json.loads(made.to_str()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def truncation(length: int) -> dict:
    rule = {"direction": "Right", "strategy": "LongestFirst", "stride": 0}
    return {"truncation": rule | {"max_length": length}}


def padding(length: int) -> dict:
    rule = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    rule |= {"pad_type_id": 0, "pad_token": "w0"}
    return {"padding": rule | {"strategy": {"Fixed": length}}}


@pytest.mark.parametrize(
    "changes",
    [{}, truncation(2), padding(9), padding(2**33), truncation(2) | padding(9)],
    ids=["plain", "cut", "padded", "padded to 2**33", "both"],
)
def test_prompts_are_neither_cut_nor_padded(tmp_path, changes):
    tokenizer = TextTokenizer.open(write(tmp_path, **changes))
    assert tokenizer.encode("w4 w3 w2 w1", where="here") == [4, 3, 2, 1]
    assert tokenizer.decode([4, 3]) == "w4 w3"


def test_folders_without_one(tmp_path, monkeypatch):
    assert TextTokenizer.open(tmp_path) is None
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert TextTokenizer.open(write(tmp_path)) is None


def test_what_cannot_be_encoded_or_decoded_is_one_error(tmp_path):
    model = {"type": "WordLevel", "vocab": WORDS, "unk_token": "none of them"}
    tokenizer = TextTokenizer.open(write(tmp_path, model=model))
    message = r"line 3: given 'Hello', which .*tokenizer.json cannot encode \(WordLevel error"
    with pytest.raises(EngineError, match=message):
        tokenizer.encode("Hello", where="line 3")
    with pytest.raises(EngineError, match=r"here: given 'w1 \\ud800', which"):
        tokenizer.encode("w1 \ud800", where="here")
    with pytest.raises(EngineError, match="2 token ids without a text"):
        tokenizer.decode([1, 2**40])
    with pytest.raises(EngineError, match="characters"):
        tokenizer.encode("x" * 1_000_000, where="here")


class Panic(BaseException):
    """What a panic of the native package is: no Exception."""


class Hostile:
    def __init__(self, error: BaseException):
        self.error = error

    def encode(self, text):
        raise self.error

    decode = encode


def test_panics_are_errors_and_interrupts_are_not(tmp_path):
    panics = TextTokenizer(tmp_path, Hostile(Panic("index out of bounds")))
    for call in (lambda: panics.encode("a", where="here"), lambda: panics.decode([1])):
        with pytest.raises(EngineError, match="index out of bounds"):
            call()
    stopped = TextTokenizer(tmp_path, Hostile(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        stopped.encode("a", where="here")


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": REPLACE | {"content": "x" * 100_000_000}},
        {"normalizer": {"type": "Sequence", "normalizers": [REPLACE | {"content": "ww"}] * 40}},
        {"normalizer": {"type": "Prepend", "prepend": "x" * 1_000_000}},
        {"decoder": REPLACE | {"content": "x" * 1_000_000}},
        {"normalizer": REPLACE | {"pattern": {"String": ""}, "content": "x" * 1_000_000}},
    ],
    ids=["long", "doubled forty times", "in front", "decoder", "empty pattern"],
)
def test_replacements_that_would_end_the_process_are_refused(tmp_path, changes):
    with pytest.raises(EngineError, match=r"replacements that make up to .* at most 16,384"):
        TextTokenizer.open(write(tmp_path, **changes))


def test_what_published_files_replace_is_taken(tmp_path):
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    many = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    prepend = {"type": "Prepend", "prepend": "▁"}
    steps = {"type": "Sequence", "normalizers": [prepend, *[spaces, many] * 5]}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    end = {"type": "Sequence", "decoders": [back, {"type": "Fuse"}, strip]}
    assert TextTokenizer.open(write(tmp_path, normalizer=steps, decoder=end)) is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "not JSON"),
        (b"{}", "unreadable"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"version": %s}' % (b"9" * 5000), "not JSON"),
    ],
    ids=["empty", "list", "nothing", "deep", "bytes", "digits"],
)
def test_files_that_are_none(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(EngineError, match=message) as error:
        TextTokenizer.open(tmp_path)
    assert "tokenizer.json" in str(error.value)


def test_a_file_without_end_is_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as f:
        f.truncate(20 * 2**30)
    with pytest.raises(EngineError, match="21,474,836,480 bytes, at most 268,435,456"):
        TextTokenizer.open(tmp_path)


def test_importing_it_does_not_import_the_native_package():
    code = "import sys, mla_jax.tokenizer; assert 'tokenizers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
