"""Hyper-parameters of layers, and the page layout."""

from types import SimpleNamespace

import pytest

from mla_jax.errors import MetadataError
from mla_jax.metadata.compat.hyperparameters import (
    PerLayerParameters,
    get_per_layer_parameters,
    infer_global_hyperparameters,
)
from mla_jax.metadata.compat.kv_cache_layout import LayoutChoice


def layer(*, window=None, cap=None, scale=0.1, sinks=False):
    return SimpleNamespace(sliding_window=window, logits_soft_cap=cap, scale=scale, has_sinks=sinks)


def parameters(**layers):
    return get_per_layer_parameters(layers, SimpleNamespace)


def test_equal_layers_agree():
    found = infer_global_hyperparameters(
        parameters(a=layer(window=(127, 0)), b=layer(window=(127, 1)))
    )
    assert found.parameters.window_left == 127
    assert found.has_same_window_lefts
    assert found.has_same_all_params


def test_disagreement_names_layers_and_values():  # edge 34
    mixed = parameters(a=layer(), b=layer(window=(127, 0)), c=layer(scale=0.2))
    with pytest.raises(MetadataError, match=r"window_left: a=-1, b=127; sm_scale: a=0.1, c=0.2"):
        infer_global_hyperparameters(mixed)
    found = infer_global_hyperparameters(mixed, require_same=False)
    assert found.differing == {"window_left": {"b": 127}, "sm_scale": {"c": 0.2}}
    assert found.parameters == mixed["a"]
    assert not found.has_same_window_lefts
    assert not found.has_same_all_params


def test_what_an_implementation_lacks_its_layer_has_not():
    found = get_per_layer_parameters({"a": SimpleNamespace(scale=0.5)}, SimpleNamespace)
    assert found == {"a": PerLayerParameters(window_left=-1, logits_soft_cap=None, sm_scale=0.5)}
    assert not found["a"].has_sinks


def test_sinks_are_reported_but_not_refused():
    found = infer_global_hyperparameters(parameters(a=layer(), b=layer(sinks=True)))
    assert found.has_same_window_lefts
    assert not found.has_same_all_params


def test_no_layers_and_wrong_layers():  # edge 34
    with pytest.raises(MetadataError, match="attention layers: given none"):
        infer_global_hyperparameters({})
    with pytest.raises(MetadataError, match="attention implementation of a: given SimpleNamespace"):
        get_per_layer_parameters({"a": layer()}, int)


def test_the_first_answer_stays():  # edge 35
    choice = LayoutChoice()
    assert choice.get() == "NHD"
    choice.wanted = "HND"
    assert choice.get("HND") == "NHD"
    assert LayoutChoice().get(required="HND") == "HND"
    assert LayoutChoice(wanted="HND").get(required="NHD") == "HND"


def test_unknown_layouts_are_refused():
    with pytest.raises(MetadataError, match="given 'DHN'; allowed: one of NHD, HND"):
        LayoutChoice(wanted="DHN")
    with pytest.raises(MetadataError, match="KV cache layout"):
        LayoutChoice(wanted="HND").get("XXX")
