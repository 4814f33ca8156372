"""The ladder of static sizes. Pure Python: choosing a rung is host work, O(log n), total.

A compiled program exists per ``MLABucket``; everything that varies below a rung is an array.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from mla_jax.errors import MetadataError

__all__ = ["CommonBucket", "Ladder", "MLABucket", "MLALadder", "powers_of_two"]


def powers_of_two(largest: int, *, smallest: int = 1) -> tuple[int, ...]:
    """``smallest, 2 smallest, 4 smallest, …``, ending exactly at ``largest``."""
    rungs = []
    rung = smallest
    while rung < largest:
        rungs.append(rung)
        rung *= 2
    return (*rungs, largest)


@dataclass(frozen=True)
class Ladder:
    """Increasing sizes of one dimension. ``rung(0)`` is 0: an absent part costs nothing."""

    name: str
    rungs: tuple[int, ...]

    def __post_init__(self):
        if not self.rungs or any(
            b <= a for a, b in zip((0, *self.rungs), self.rungs, strict=False)
        ):
            raise MetadataError(
                f"ladder of {self.name}", self.rungs, "positive, strictly increasing sizes"
            )

    @classmethod
    def of(cls, name: str, sizes: Iterable[int]) -> "Ladder":
        return cls(name, tuple(sorted(set(sizes))))

    def rung(self, n: int) -> int:
        """Smallest rung that holds ``n``; 0 for 0. Larger than the largest is refused."""
        if n < 0 or n > self.rungs[-1]:
            raise MetadataError(
                f"number of {self.name}",
                n,
                f"0 to {self.rungs[-1]} (the largest rung)",
                f"Schedule fewer {self.name} in one step, or build a taller ladder.",
            )
        return 0 if n == 0 else self.rungs[bisect_left(self.rungs, n)]


@dataclass(frozen=True, order=True, kw_only=True)
class CommonBucket:
    """Static half of the metadata that all builders share: its array sizes."""

    requests: int
    tokens: int
    pages: int  # page-table width

    def check_holds(self, *, requests: int, tokens: int, pages: int) -> None:
        """Refuse a batch that is larger in any dimension."""
        if requests <= self.requests and tokens <= self.tokens and pages <= self.pages:
            return
        given = {"requests": requests, "tokens": tokens, "pages": pages}
        for name, n in given.items():
            if n > getattr(self, name):
                raise MetadataError(
                    f"{name} of a batch", n, f"at most {getattr(self, name)}, as in {self}"
                )


@dataclass(frozen=True, order=True, kw_only=True)
class MLABucket:
    """Static half of one step's metadata: it decides the compiled program."""

    decodes: int  # decode requests, one token each
    prefills: int  # prefill requests; 0 iff prefill_tokens is 0
    prefill_tokens: int  # new prompt tokens of all prefills together
    pages: int  # page-table width
    context_rows: int  # workspace rows of one context chunk; 0 = no prefill has context
    absorb: int = 0  # > 0: prefills run absorbed over their pages, cut into runs of so many queries

    @property
    def decode_tokens(self) -> int:
        """Leading tokens that the decode view covers: all of them in an absorbed step."""
        return self.tokens if self.absorb else self.decodes

    @property
    def runs(self) -> int:
        """Rows of an absorbed step's decode view, enough for ``ceil(queries / absorb)`` each."""
        whole = self.prefill_tokens // self.absorb
        return self.decodes + min(self.prefill_tokens, whole + self.prefills)

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill_tokens

    @property
    def requests(self) -> int:
        return self.decodes + self.prefills


_mla_bucket = cache(MLABucket)  # equal ones are one object: quick to get and to compare


@dataclass(frozen=True, kw_only=True)
class MLALadder:
    """Ladders of every dimension of a step, and the rung of a batch."""

    decodes: Ladder
    prefills: Ladder
    prefill_tokens: Ladder
    pages: Ladder
    context_rows: int  # the one workspace size

    def __post_init__(self):
        if self.context_rows < 1:
            raise MetadataError("context workspace rows", self.context_rows, "1 or more")

    @classmethod
    def default(
        cls, *, max_requests: int, max_prefill_tokens: int, max_pages: int, context_rows: int
    ) -> "MLALadder":
        """Few programs: rungs grow by four, and the number of prefills has one rung.

        A step below some hundred tokens is bound by reading weights, so padding it costs
        little; what a prefill costs is its tokens.
        """

        def by_four(name: str, largest: int, smallest: int) -> Ladder:
            rungs = powers_of_two(largest, smallest=min(smallest, largest))
            return Ladder(name, rungs[::-2][::-1])

        return cls(
            decodes=by_four("decode requests", max_requests, 1),
            prefills=Ladder("prefill requests", (min(max_requests, max_prefill_tokens),)),
            prefill_tokens=by_four("prefill tokens", max_prefill_tokens, 16),
            pages=by_four("pages of one request", max_pages, 16),
            context_rows=context_rows,
        )

    def bucket(
        self,
        *,
        decodes: int,
        prefills: int,
        prefill_tokens: int,
        pages: int,
        context: bool,
        absorb: int = 0,
    ) -> MLABucket:
        """The smallest bucket that holds a step of these sizes.

        ``absorb`` is the run length of prefills over their pages: no workspace is needed then.
        """
        return _mla_bucket(
            decodes=self.decodes.rung(decodes),
            prefills=self.prefills.rung(prefills),
            prefill_tokens=self.prefill_tokens.rung(prefill_tokens),
            pages=self.pages.rung(pages),
            context_rows=self.context_rows if context and not absorb else 0,
            absorb=absorb,
        )
