"""``generation_config.json``: what its authors advise for a request that asks for nothing else.

Read as transformers reads it: temperature, top-k, top-p and min-p count where ``do_sample`` is
true; else the likeliest token is taken. A filter that the file does not name is off.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from warnings import warn

from mla_jax.checks import is_int
from mla_jax.errors import EngineError, shown
from mla_jax.hf_keys import load_json
from mla_jax.model.sampling import SamplingParams

__all__ = ["GenerationDefaults"]

_DRAWS: Final = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS: Final = ("repetition_penalty", "max_new_tokens")
_NEUTRAL: Final = {  # keys that would change tokens here, with the values that do not
    "num_beams": (1, None),
    "num_beam_groups": (1, None),
    "penalty_alpha": (None, 0, 0.0),
    "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "no_repeat_ngram_size": (0, None),
    "encoder_repetition_penalty": (1.0, None),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None, {}),
    "min_length": (0, None),
    "min_new_tokens": (0, None),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1, 1.0),
    "stop_strings": (None, []),
}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What a folder says of generation."""

    params: SamplingParams = field(default_factory=SamplingParams)  # of a request that gives none
    eos: tuple[int, ...] | None = None  # end tokens in place of config.json's; None: those

    @classmethod
    def open(cls, folder: Path) -> "GenerationDefaults":
        """Of ``generation_config.json``; without the file, greedy and config.json's end tokens.

        A key that asks for what is not done here is a warning.

        Raises:
            EngineError: a value that is out of its range, with the file.
            ConfigError: no JSON object.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        data = load_json(path)
        if not isinstance(data, Mapping):
            raise EngineError(str(path), type(data).__name__, "a JSON object")
        for key, neutral in _NEUTRAL.items():
            if key in data and data[key] not in neutral:
                warn(f"{path}: {key}={shown(data[key])} is not applied here", stacklevel=2)
        return cls(params=_params(data, path), eos=_eos(data.get("eos_token_id"), path))


def _params(data: Mapping[str, Any], path: Path) -> SamplingParams:
    draws = data.get("do_sample", False)
    if not isinstance(draws, bool | None):
        raise EngineError(f"{path}: do_sample", repr(draws), "true or false")
    names = (*_ALWAYS, *(_DRAWS if draws else ()))
    facts: dict[str, Any] = {name: data[name] for name in names if data.get(name) is not None}
    if draws:
        facts = {"temperature": 1.0} | facts
    try:
        return SamplingParams(**facts)
    except EngineError as error:
        what = error.what.replace("SamplingParams", str(path))
        raise EngineError(what, error.given, error.allowed) from None


def _eos(value: Any, path: Path) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(is_int(id) and 0 <= id < 2**31 for id in ids):
        raise EngineError(f"{path}: eos_token_id", shown(value), "a token id, a list of them, null")
    return tuple(ids)
