"""Where the decodes end: the documented tables, in order."""

import dataclasses

import numpy as np
import pytest

from mla_jax.errors import MetadataError
from mla_jax.metadata.common import HostBatch
from mla_jax.metadata.compat.regions import (
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)
from mla_jax.metadata.split import split_decodes_and_prefills


def host(query_lens, *, tokens=None, is_prefilling=None) -> HostBatch:
    q = np.array(query_lens, np.int32)
    flags = None if is_prefilling is None else np.array(is_prefilling)
    made = HostBatch.of(q, q, is_prefilling=flags)
    return dataclasses.replace(made, num_tokens=tokens or made.num_tokens)


@pytest.mark.parametrize(
    ("query_lens", "threshold", "options", "expected"),
    [
        ([], 1, {}, (0, 0, 0, 0)),  # edge 1
        ([], 4, {"require_uniform": True}, (0, 0, 0, 0)),
        ([1, 1, 1], 1, {}, (3, 0, 3, 0)),  # edge 2
        ([3, 2], 1, {}, (0, 2, 0, 5)),  # edge 3
        ([1, 1], 1, {}, (2, 0, 2, 0)),  # edge 4: a one-token first chunk is a decode
        ([2], 1, {}, (0, 1, 0, 2)),  # edge 5
        ([2], 2, {}, (1, 0, 2, 0)),
        ([2, 2, 1], 2, {"require_uniform": True}, (2, 1, 4, 1)),  # edge 6
        ([2, 2, 1], 2, {}, (3, 0, 5, 0)),
        ([1, 5, 1, 3], 1, {}, (1, 3, 1, 9)),  # edge 23, release
        ([3, 1, 1], 1, {}, (0, 3, 0, 5)),
        ([1, 1, 5, 3], 1, {}, (2, 2, 2, 8)),
        ([1, 1, 3, 2], 2, {}, (2, 2, 2, 5)),
        ([1, 1, 3, 2], 3, {}, (4, 0, 7, 0)),
        ([1, 1, 3, 2], 3, {"require_uniform": True}, (2, 2, 2, 5)),
        ([1, 1, 2, 3], 2, {}, (3, 1, 4, 3)),
        ([1, 1, 2, 3], 2, {"require_uniform": True}, (2, 2, 2, 5)),
        ([2, 1, 2], 2, {"require_uniform": True}, (1, 2, 2, 3)),
        ([1, 2, 2], 2, {"require_uniform": True}, (1, 2, 1, 4)),
        ([2, 2, 0, 0], 2, {"require_uniform": True}, (4, 0, 4, 0)),
        ([2, 0, 7], 2, {"require_uniform": True}, (2, 1, 2, 7)),
        ([3, 1, 4, 0], 4, {}, (4, 0, 8, 0)),
        ([3, 1, 4, 0], 4, {"require_uniform": True}, (1, 3, 3, 5)),
    ],
)
def test_split(query_lens, threshold, options, expected):
    assert split_decodes_and_prefills(host(query_lens), threshold, **options) == expected


@pytest.mark.parametrize(
    ("query_lens", "tokens", "uniform", "threshold", "expected"),
    [
        ([2, 2, 0, 0], 8, True, 2, (4, 0, 8, 0)),
        ([2, 2, 5, 0], 12, True, 2, (2, 2, 4, 8)),
        ([1, 3, 0, 0], 8, False, 1, (1, 3, 1, 7)),
    ],
)
def test_padding_is_charged_where_the_rule_says(query_lens, tokens, uniform, threshold, expected):
    given = host(query_lens, tokens=tokens)
    assert split_decodes_and_prefills(given, threshold, require_uniform=uniform) == expected


@pytest.mark.parametrize("uniform", [False, True])
def test_the_longest_query_may_be_a_bound(uniform):
    bound = dataclasses.replace(host([1, 1, 1]), max_query_len=9)
    assert split_decodes_and_prefills(bound, 1, require_uniform=uniform) == (3, 0, 3, 0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([0, 1, 1], (1, 2, 1, 2)), ([0, 0, 0], (3, 0, 3, 0)), ([1, 1, 1], (0, 3, 0, 3))],
)
def test_short_extends_can_be_prefills(flags, expected):
    given = host([1, 1, 1], is_prefilling=np.array(flags, bool))
    got = split_decodes_and_prefills(given, treat_short_extends_as_decodes=False)
    assert got == expected


def test_short_extends_need_to_be_known():
    with pytest.raises(MetadataError, match="is_prefilling"):
        split_decodes_and_prefills(host([1]), treat_short_extends_as_decodes=False)


def test_debug_refuses_an_unordered_batch():
    with pytest.raises(MetadataError, match=r"query_lens\[2\]: given 1 behind a prefill"):
        split_decodes_and_prefills(host([1, 5, 1, 3]), debug=True)
    with pytest.raises(MetadataError, match=r"query_lens\[1\]: given 1 behind a prefill"):
        split_decodes_and_prefills(host([3, 1, 1]), debug=True)
    assert split_decodes_and_prefills(host([1, 3, 0, 0]), debug=True) == (1, 3, 1, 3)
    uniform = split_decodes_and_prefills(host([3, 4]), require_uniform=True, debug=True)
    assert uniform == (0, 2, 0, 7)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "expected"),
    [
        ([1, 1, 4, 6], [9, 8, 10, 6], (2, 1, 1, 2, 4, 6)),
        ([1, 4, 4], [9, 8, 10], (1, 2, 0, 1, 8, 0)),
        ([1, 1], [9, 8], (2, 0, 0, 2, 0, 0)),
        ([4], [4], (0, 0, 1, 0, 0, 4)),
        ([1, 4, 0], [9, 8, 0], (1, 2, 0, 1, 4, 0)),  # a padding row is no prefill
    ],
)
def test_three_regions(query_lens, seq_lens, expected):
    lens = np.array(seq_lens, np.int32)
    assert split_decodes_prefills_and_extends(host(query_lens), lens) == expected


@pytest.mark.parametrize(
    ("workspace", "offset", "expected"),
    [(26, 0, [(0, 2), (2, 4)]), (25, 2, [(2, 4), (4, 6)]), (100, 0, [(0, 4)])],
)
def test_prefill_chunks(workspace, offset, expected):
    lens = np.array([10, 15, 20, 5], np.int32)
    assert split_prefill_chunks(lens, workspace, offset) == expected


def test_a_prefill_larger_than_the_workspace_is_refused():
    with pytest.raises(MetadataError, match=r"seq_lens\[1\]: given 15; allowed: at most 14"):
        split_prefill_chunks(np.array([10, 15], np.int32), 14)
    assert split_prefill_chunks(np.zeros(0, np.int32), 14) == []


def test_flags_of_other_requests_are_refused(our_errors):
    for flags in ([True], [True, False, True]):
        with pytest.raises(MetadataError, match=f"is_prefilling: given {len(flags)} entries"):
            host([1, 2], is_prefilling=flags)
