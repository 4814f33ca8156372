"""``generation_config.json``: what its authors advise for a request that asks for nothing else.

Read as transformers reads it: temperature, top-k, top-p and min-p count where ``do_sample`` is
true; else the likeliest token is taken. A filter that the file does not name is off. Without the
file, transformers would apply such keys of ``config.json``: here each of them is a warning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from warnings import warn

from mla_jax.checks import is_int
from mla_jax.errors import EngineError, shown
from mla_jax.hf_keys import load_json, load_object
from mla_jax.model.sampling import SamplingParams

__all__ = ["GenerationDefaults"]

_DRAWS: Final = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS: Final = ("repetition_penalty", "max_new_tokens")
_OWN: Final = (*_DRAWS, *_ALWAYS, "do_sample", "eos_token_id")
_HARMLESS: Final = """
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind bos_token_id
    cache_config cache_implementation compile_config continuous_batching_config
    decoder_start_token_id disable_compile diversity_penalty early_stopping is_assistant
    length_penalty low_memory max_cache_len max_matching_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule output_attentions output_hidden_states output_logits
    output_router_logits output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens
    remove_invalid_values renormalize_logits return_dict return_dict_in_generate
    return_legacy_cache speculation_type target_lookbehind transformers_version use_cache use_mtp
    """.split()  # noqa: SIM905
"""Keys that leave the tokens as they are, whatever their value; three count with beams only."""
_NEUTRAL: Final = {  # values beside null and false that leave the tokens as they are
    "assistant_ensemble_weight": (0,),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "force_words_ids": ([],),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "typical_p": (1,),
}

_OF_CONFIG: Final = """
    bad_words_ids begin_suppress_tokens do_sample encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences repetition_penalty
    suppress_tokens typical_p
    """.split()  # noqa: SIM905
"""Keys of config.json that transformers applies where there is no generation_config.json."""
_WRITTEN: Final = {"max_length": 20, "repetition_penalty": 1}  # of transformers 4, in every file


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What a folder says of generation."""

    params: SamplingParams = field(default_factory=SamplingParams)  # of a request that gives none
    eos: tuple[int, ...] | None = None  # end tokens in place of config.json's; None: those

    @classmethod
    def open(cls, folder: Path) -> "GenerationDefaults":
        """Of ``generation_config.json``; without the file, greedy and config.json's end tokens.

        A key that asks for what is not done here is a warning, and so is one that is not known.

        Raises:
            EngineError: a value that is out of its range, with the file.
            ConfigError: no JSON object.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            _warn_of_config(folder / "config.json")
            return cls()
        data = load_object(path)
        for key, value in data.items():
            if not (key in _OWN or key in _HARMLESS or key[:1] == "_" or _is_neutral(key, value)):
                warn(f"{path}: {shown(key)}={shown(value)} is not applied here", stacklevel=2)
        return cls(params=_params(data, path), eos=_eos(data.get("eos_token_id"), path))


def _warn_of_config(path: Path) -> None:
    data = load_json(path) if path.is_file() else {}
    for key in _OF_CONFIG:
        value = data.get(key) if isinstance(data, Mapping) else None
        if not (_is_neutral(key, value) or value == _WRITTEN.get(key)):
            text = f"{path}: {key}={shown(value)} is not applied here"
            warn(f"{text}; keys of generation are read from generation_config.json", stacklevel=3)


def _is_neutral(key: str, value: Any) -> bool:
    """Whether a request's tokens are the same with this value as without the key."""
    return value is None or value is False or value in _NEUTRAL.get(key, ())


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
