"""Models by their name on the Hugging Face hub: ``"deepseek-ai/DeepSeek-V2-Lite"``."""

import importlib
import os
import re
from pathlib import Path
from typing import Any

from mla_jax.errors import EngineError, described, shown

__all__ = ["folder_of"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEXT = ("*.json", "*.jinja")
_WEIGHTS = ("*.safetensors",)
_OTHERS = ("original/*", "onnx/*", "consolidated*")  # the same weights once more


def folder_of(model: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model: the one that is given, or that of a hub id, downloaded if need be.

    A folder that is there is taken, also if its name could be an id. ``weights=False``: no
    tensors are downloaded.

    Raises:
        EngineError: an id that cannot be downloaded, with what would work.
    """
    if not isinstance(model, str | Path):
        raise EngineError("model", described(model), "a folder, or a hub id, as a text or a Path")
    if model == "":
        raise EngineError("model", "an empty text", "a folder, or a hub id")
    path = Path(model)
    try:
        os.stat(path)
        there = True
    except (FileNotFoundError, NotADirectoryError):
        there = False
    except (OSError, ValueError) as error:  # a name that no file can have
        why = error.strerror if isinstance(error, OSError) else error
        given = f"a text of {len(str(model))} characters ({shown(why)})"
        raise EngineError("model", given, "a folder, or a hub id") from None
    if path.is_file():
        hint = f"Its folder is {path.parent}."
        raise EngineError(f"model {model}", "a file", "a folder, or a hub id", hint)
    if there or not _ID.fullmatch(str(model)):
        return path
    here = f"no folder {path} here"
    try:
        huggingface_hub: Any = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        given = f"{here}, and huggingface_hub, which downloads models, is not installed"
        hint = "For a hub id: pip install huggingface_hub."
        raise EngineError(f"model {model}", given, "a folder, or a hub id", hint) from None
    patterns = [*_TEXT, *(_WEIGHTS if weights else ())]
    try:
        found = huggingface_hub.snapshot_download(
            str(model), allow_patterns=patterns, ignore_patterns=list(_OTHERS)
        )
    except Exception as error:  # of the package, of its transport, of the system
        first = shown(error).strip().splitlines() or [type(error).__name__]
        given = f"{here}, and the download failed ({type(error).__name__}: {first[0]})"
        hint = f"Download it where there is a network: hf download {model} --local-dir FOLDER."
        raise EngineError(f"model {model}", given, "a folder, or a hub id", hint) from None
    return Path(found)
