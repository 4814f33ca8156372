from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mla_jax.request_queue import Queue

OPS = ["append", "appendleft", "popleft", "remove"]


@given(st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 30))))
def test_it_is_a_deque(steps):
    ours, theirs = Queue(), deque()
    for op, n in steps:
        if op.startswith("append") and n not in theirs:
            getattr(ours, op)(n)
            getattr(theirs, op)(n)
        elif op == "popleft" and theirs:
            assert ours.popleft() == theirs.popleft()
        elif op == "remove" and n in theirs:
            ours.remove(n)
            theirs.remove(n)
        assert list(ours) == list(theirs)
        assert (len(ours), bool(ours), n in ours) == (len(theirs), bool(theirs), n in theirs)
        if theirs:
            assert (ours[0], ours[-1]) == (theirs[0], theirs[-1])


def test_what_is_a_bug_of_the_caller():
    queue = Queue()
    with pytest.raises(IndexError):
        queue[0]
    queue.append("a")
    with pytest.raises(AssertionError, match="'a' is in it already"):
        queue.appendleft("a")
    with pytest.raises(AssertionError, match="only the ends"):
        queue[1]
    with pytest.raises(KeyError):
        queue.remove("b")
