"""generation_config.json: the defaults of a request that asks for nothing else."""

import json

import pytest

from mla_jax.errors import ConfigError, EngineError
from mla_jax.generation_config import GenerationDefaults
from mla_jax.model.sampling import SamplingParams


@pytest.fixture
def read(tmp_path):
    def read(**content) -> GenerationDefaults:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        return GenerationDefaults.open(tmp_path)

    return read


def test_without_the_file_it_is_greedy_and_ends_as_the_configuration_says(tmp_path):
    assert GenerationDefaults.open(tmp_path) == GenerationDefaults(
        params=SamplingParams(), eos=None
    )


def test_deepseek_v3(read):
    file = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True}
    found = read(**file, temperature=0.6, top_p=0.95, transformers_version="4.46.3")
    assert found == GenerationDefaults(params=SamplingParams(temperature=0.6, top_p=0.95), eos=(1,))


def test_a_list_of_end_tokens_and_every_key(read):
    found = read(
        eos_token_id=[5, 7],
        do_sample=True,
        temperature=0.5,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        max_new_tokens=99,
    )
    assert found.eos == (5, 7)
    assert found.params == SamplingParams(
        temperature=0.5, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1, max_new_tokens=99
    )


def test_filters_count_where_tokens_are_drawn(read):
    given = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.1}
    assert read(**given).params == SamplingParams(repetition_penalty=1.1)
    assert read(**given, do_sample=False).params.temperature == 0
    assert read(do_sample=True, top_k=None).params == SamplingParams(temperature=1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"eos_token_id": "1"}, "eos_token_id: given 1; allowed: a token id"),
        ({"eos_token_id": [1, -2]}, "eos_token_id: given"),
        ({"do_sample": 1}, "do_sample: given 1; allowed: true or false"),
        ({"do_sample": True, "temperature": -1}, r"generation_config.json: temperature: given -1"),
        ({"do_sample": True, "top_p": "x"}, "generation_config.json: top_p: given 'x'"),
        ({"max_new_tokens": 0}, "generation_config.json: max_new_tokens: given 0"),
    ],
    ids=str,
)
def test_values_out_of_range_name_the_file(read, content, message):
    with pytest.raises(EngineError, match=message):
        read(**content)


def test_what_is_not_done_here_is_a_warning(read):
    with pytest.warns(UserWarning, match="num_beams=4 is not applied here"):
        read(num_beams=4, typical_p=1.0, bad_words_ids=None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_length", 100),
        ("watermarking_config", {"bias": 2.0}),
        ("top_h", 0.4),
        ("token_healing", True),
        ("max_time", 1.5),
        ("constraints", [1]),
        ("force_words_ids", [[1]]),
        ("a_key_of_tomorrow", 0),
    ],
)
def test_every_key_that_is_not_known_to_be_harmless_is_a_warning(read, key, value):
    with pytest.warns(UserWarning, match=f"generation_config.json: {key}=.* is not applied here"):
        read(**{key: value})
    read(**{key: None})


def test_what_changes_no_token_is_no_warning(read):
    found = read(
        _from_model_config=True,
        pad_token_id=0,
        use_cache=True,
        output_scores=True,
        return_dict_in_generate=True,
        cache_implementation="static",
        num_assistant_tokens=5,
        transformers_version="5.23.0",
        token_healing=False,
        num_beams=1,
        length_penalty=0.5,
        suppress_tokens=[],
    )
    assert found == GenerationDefaults()


def test_keys_of_config_json_are_a_warning_where_there_is_no_file(tmp_path):
    def write(**content):
        (tmp_path / "config.json").write_text(json.dumps(content))

    write(do_sample=False, max_length=20, repetition_penalty=1.0, temperature=0.6, num_beams=1)
    assert GenerationDefaults.open(tmp_path) == GenerationDefaults()
    for key, value in (("repetition_penalty", 1.2), ("suppress_tokens", [3]), ("do_sample", True)):
        write(**{key: value})
        with pytest.warns(UserWarning, match=f"config.json: {key}=.* is not applied here"):
            assert GenerationDefaults.open(tmp_path) == GenerationDefaults()
    (tmp_path / "generation_config.json").write_text("{}")
    GenerationDefaults.open(tmp_path)


def test_files_that_are_none(tmp_path):
    for content, kind in (("[]", EngineError), ("{", ConfigError)):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(kind, match=r"generation_config\.json"):
            GenerationDefaults.open(tmp_path)
