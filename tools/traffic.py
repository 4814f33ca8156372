"""Random mixes of requests against each request alone.

``python -m tools.traffic [MIXES] [SEED] [v3|v4]`` serves a tiny model in float32. It ends with one
line of counts, and with status 1 where one of them is wrong.
"""

import sys

from tests import traffic


def main(mixes: int = 10_000, seed: int = 0, name: str = "v3") -> int:
    """Serve so many mixes; 0 if nothing was wrong, no page lost, nothing compiled on the way."""
    kind = traffic.KINDS[name]
    model = kind.model()
    engine = kind.engine(model)
    rungs = engine.warm_up()
    single = traffic.alone(traffic.sharing(engine, model, kind))
    single(traffic.asks(1, seed=seed)[0])
    compiled = traffic.Compilations()

    def report(tally: traffic.Tally) -> None:
        if tally.mixes % max(mixes // 20, 1) == 0:
            print(tally, file=sys.stderr)

    kinds = max(mixes // 10, 10)
    tally = traffic.run(engine, single, mixes=mixes, kinds=kinds, seed=seed, each=report)
    print(f"{tally}; {rungs} rungs, {engine.stats().compiles} programs, {compiled.count} later")
    right = engine.stats().compiles == rungs and not (compiled.count or engine.stats().pages_used)
    return int(not right or bool(tally.wrong or tally.lost_pages))


if __name__ == "__main__":
    if any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit(__doc__)
    numbers = [int(word) for word in sys.argv[1:] if word not in traffic.KINDS]
    names = [word for word in sys.argv[1:] if word in traffic.KINDS]
    sys.exit(main(*numbers, **({"name": names[0]} if names else {})))
