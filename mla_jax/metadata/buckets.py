"""The ladder of static sizes. Pure Python: choosing a rung is host work and total.

A compiled program exists per bucket; everything that varies below a rung is an array.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from mla_jax.errors import MetadataError

__all__ = [
    "CONTEXT_ROWS",
    "FEWEST_ROWS",
    "CommonBucket",
    "Ladder",
    "MLABucket",
    "MLALadder",
    "StepBucket",
    "StepLadder",
    "default_steps",
    "dense_bucket",
    "powers_of_two",
]


FEWEST_ROWS = 8
"""Decodes of the smallest step. XLA does not give a product of one row to cuBLAS: its own is
slower, and for the logits of one row it converts the vocabulary's weights to float32 every time.
"""

CONTEXT_ROWS = 4096
"""Workspace rows of one chunk of cached context, unless a ladder says otherwise."""


def powers_of_two(largest: int, *, smallest: int = 1) -> tuple[int, ...]:
    """``smallest, 2 smallest, 4 smallest, …``, ending exactly at ``largest``."""
    return _powers(largest, smallest=smallest, factor=2, least=1)


def _powers(largest: int, *, smallest: int, factor: int, least: int) -> tuple[int, ...]:
    """``smallest * factor**k`` up to ``largest / least``, then ``largest``."""
    if smallest < 1 or largest < 1:
        raise MetadataError("sizes of a ladder", (smallest, largest), "1 or more")
    rungs = []
    rung = smallest
    while rung < largest and rung * least <= largest:
        rungs.append(rung)
        rung *= factor
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

    @property
    def largest(self) -> int:
        return self.rungs[-1]

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
    pages: tuple[int, ...]  # page-table width of each cache group

    def check_holds(self, *, requests: int, tokens: int, pages: tuple[int, ...] = ()) -> None:
        """Refuse a batch that is larger in any dimension; no ``pages``: of unknown width."""
        self._check("requests", requests, self.requests)
        self._check("tokens", tokens, self.tokens)
        for n, most in zip(pages, self.pages, strict=False):
            self._check("pages", n, most)

    def _check(self, name: str, n: int, most: int) -> None:
        if n > most:
            raise MetadataError(f"{name} of a batch", n, f"at most {most}, as in {self}")


@dataclass(frozen=True, order=True, kw_only=True)
class StepBucket:
    """Static sizes of one step."""

    decodes: int  # decode requests, one token each
    prefills: int  # prefill requests; 0 iff prefill_tokens is 0
    prefill_tokens: int  # new prompt tokens of all prefills together
    pages: int  # page-table width (of the first cache group)

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill_tokens

    @property
    def requests(self) -> int:
        return self.decodes + self.prefills


@dataclass(frozen=True, order=True, kw_only=True)
class MLABucket(StepBucket):
    """Static half of one step's metadata: it decides the compiled program."""

    context_rows: int  # workspace rows of one context chunk; 0 = no view of cached context
    absorb: int = 0  # > 0: prefills run absorbed over their pages, cut into runs of so many queries

    @property
    def decode_tokens(self) -> int:
        """Leading tokens that the decode view covers: all of them in an absorbed step."""
        return self.tokens if self.absorb else self.decodes

    @property
    def runs(self) -> int:
        """Rows of the decode view: in an absorbed step ``ceil(queries / absorb)`` each do."""
        if not self.absorb:
            return self.decodes
        whole = self.prefill_tokens // self.absorb
        return self.decodes + min(self.prefill_tokens, whole + self.prefills)

    @cached_property
    def common(self) -> CommonBucket:
        """The sizes of the metadata that all builders share."""
        return CommonBucket(requests=self.requests, tokens=self.tokens, pages=(self.pages,))


# Equal buckets are one object: quick to get and to compare. Positions, because a cache takes three
# times as long to look up names.
@cache
def _step_bucket(decodes: int, prefills: int, prefill_tokens: int, pages: int) -> StepBucket:
    return StepBucket(
        decodes=decodes, prefills=prefills, prefill_tokens=prefill_tokens, pages=pages
    )


@cache
def _mla_bucket(step: StepBucket, context_rows: int, absorb: int) -> MLABucket:
    return MLABucket(**vars(step), context_rows=context_rows, absorb=absorb)


def dense_bucket(step: StepBucket, *, context_rows: int) -> MLABucket:
    """The same step for dense attention; its workspace is there iff it has prefills."""
    return _mla_bucket(step, context_rows if step.prefill_tokens else 0, 0)


@dataclass(frozen=True, kw_only=True)
class StepLadder:
    """Ladders of every dimension of a step, and the sizes of a batch's step.

    A step without prefills takes a rung of ``decodes``. One with prefills takes, of the pairs
    ``mixed`` that hold it, the one of the fewest tokens.
    """

    decodes: Ladder  # of steps without prefills
    prefills: Ladder
    prefill_tokens: Ladder
    pages: Ladder
    mixed: tuple[tuple[int, int], ...] = ()  # (decodes, prefill tokens); () = any, 0 decodes too

    def __post_init__(self):
        largest = (self.decodes.largest, self.prefill_tokens.largest)
        if self.mixed and largest not in self.mixed:
            raise MetadataError(
                "pairs of decodes and prefill tokens", self.mixed, f"{largest} among them"
            )

    @cached_property
    def _pairs(self) -> tuple[tuple[int, int], ...]:
        """Decodes and prefill tokens of steps with prefills, fewest tokens first."""
        tokens = self.prefill_tokens.rungs
        every = self.mixed or [(d, t) for d in (0, *self.decodes.rungs) for t in tokens]
        return tuple(sorted(set(every), key=lambda pair: (sum(pair), pair)))

    def _sizes(self, decodes: int, prefill_tokens: int, *, full: bool) -> tuple[int, int]:
        """The step's decodes and prefill tokens; ``full``: only pairs with the most decodes."""
        rung = self.decodes.rung(decodes)
        if not prefill_tokens:
            return rung or self.decodes.rungs[0], 0
        self.prefill_tokens.rung(prefill_tokens)
        pairs = self._full_pairs if full else self._pairs
        for pair in pairs:
            if decodes <= pair[0] and prefill_tokens <= pair[1]:
                return pair
        raise AssertionError("the largest pair holds what both ladders hold")

    @cached_property
    def _full_pairs(self) -> tuple[tuple[int, int], ...]:
        """Those of ``_pairs`` with the most decodes."""
        return tuple(pair for pair in self._pairs if pair[0] == self.decodes.largest)

    def step(self, *, decodes: int, prefills: int, prefill_tokens: int, pages: int) -> StepBucket:
        """The sizes of such a step; an empty one takes those of the smallest decode step."""
        return self._step(decodes, prefills, prefill_tokens, pages, full=False)

    def _step(
        self, decodes: int, prefills: int, prefill_tokens: int, pages: int, *, full: bool
    ) -> StepBucket:
        d, t = self._sizes(decodes, prefill_tokens, full=full)
        return _step_bucket(d, self.prefills.rung(prefills), t, self.pages.rung(pages or 1))

    def steps(self) -> tuple[StepBucket, ...]:
        """Everything that ``step`` returns, one compiled program each."""
        return tuple(self._every(full=False))

    def _every(self, *, full: bool, decode_only: bool = True) -> Iterator[StepBucket]:
        """Every step that can be asked for."""
        for pages in self.pages.rungs:
            if decode_only:
                for d in self.decodes.rungs:
                    yield _step_bucket(d, 0, 0, pages)
            for d, t in self._full_pairs if full else self._pairs:
                below = 0  # prefills that the rung before holds: this one needs a token more
                for p in self.prefills.rungs:
                    if below < t:
                        yield _step_bucket(d, p, t, pages)
                    below = p


def _default_rungs(*, max_requests: int, max_prefill_tokens: int, max_pages: int) -> dict:
    """The rules of ``MLALadder.default``."""
    most = max(max_requests, FEWEST_ROWS)
    decodes = _powers(most, smallest=FEWEST_ROWS, factor=4, least=2)
    tokens = _powers(max_prefill_tokens, smallest=min(128, max_prefill_tokens), factor=4, least=2)
    pages = [max_pages]
    while pages[-1] > 1024:
        pages.append(pages[-1] // 8)
    return {
        "decodes": Ladder("decode requests", decodes),
        "prefills": Ladder("prefill requests", (min(most, max_prefill_tokens),)),
        "prefill_tokens": Ladder("prefill tokens", tokens),
        "pages": Ladder.of("pages of one request", pages),
        "mixed": (*((most, t) for t in tokens), (0, tokens[-1])),
    }


def default_steps(*, max_requests: int, max_prefill_tokens: int, max_pages: int) -> StepLadder:
    """``MLALadder.default`` without a workspace: what sparse models take."""
    return StepLadder(
        **_default_rungs(
            max_requests=max_requests, max_prefill_tokens=max_prefill_tokens, max_pages=max_pages
        )
    )


@dataclass(frozen=True, kw_only=True)
class MLALadder(StepLadder):
    """``StepLadder`` of dense latent attention: one size of the context workspace."""

    context_rows: int

    def __post_init__(self):
        super().__post_init__()
        if self.context_rows < 1:
            raise MetadataError("context workspace rows", self.context_rows, "1 or more")

    @classmethod
    def default(
        cls,
        *,
        max_requests: int,
        max_prefill_tokens: int,
        max_pages: int,
        context_rows: int = CONTEXT_ROWS,
    ) -> "MLALadder":
        """Few programs: at most 8 for 128 requests and 512 prefill tokens, 6 without ``absorb``.

        - Steps of decodes only: 8, 32, 128, …, ``max_requests``, never fewer than 8. A decode
          below some 200 tokens is bound by reading weights, and padded requests read no cache: up
          to 4 times as many rows cost little.
        - Steps with prefills: 128, 512, …, ``max_prefill_tokens`` tokens beside ``max_requests``
          decodes, and ``max_prefill_tokens`` alone for prompts that nobody decodes beside. Padding
          is at most the decodes, and 3 of 4 prompt tokens (below 128: weights bound again).
        - Every such step has the workspace: without cached context its loop runs zero times.
        - Absorbed steps (``buckets``): the same tokens, always beside ``max_requests``.
        - Page tables: one width up to 1,024 pages, above that 8 times narrower ones too. A padded
          entry costs its 4 bytes on the way to the device; kernels read real pages only. The
          ``xla`` reference reads all of them: give it a ladder of more widths.
        """
        rungs = _default_rungs(
            max_requests=max_requests, max_prefill_tokens=max_prefill_tokens, max_pages=max_pages
        )
        return cls(**rungs, context_rows=context_rows)

    def bucket(
        self, *, decodes: int, prefills: int, prefill_tokens: int, pages: int, absorb: int = 0
    ) -> MLABucket:
        """The smallest bucket that holds a step of these sizes.

        ``absorb`` is the run length of prefills over their pages: no workspace is needed then.
        An empty step takes the smallest bucket of decodes.
        """
        absorb = absorb if prefill_tokens else 0
        step = self._step(decodes, prefills, prefill_tokens, pages, full=absorb > 0)
        rows = self.context_rows if step.prefill_tokens and not absorb else 0
        return _mla_bucket(step, rows, absorb)

    def buckets(self, *, absorb: int = 0) -> tuple[MLABucket, ...]:
        """Everything that ``bucket`` returns for this ``absorb`` and for 0: all programs."""
        found = [
            _mla_bucket(step, self.context_rows if step.prefill_tokens else 0, 0)
            for step in self._every(full=False)
        ]
        if absorb:
            every = self._every(full=True, decode_only=False)
            found += [_mla_bucket(step, 0, absorb) for step in every]
        return tuple(found)
