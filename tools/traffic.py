"""Random mixes of requests against each request alone: ``python -m tools.traffic [MIXES] [SEED]``.

A tiny DeepSeek V3 in float32; ends with one line of counts, and with 1 where one of them is wrong.
"""

import sys

from tests import traffic


def main(mixes: int = 10_000, seed: int = 0) -> int:
    """Serve so many mixes; 0 if nothing was wrong, no page lost, nothing compiled on the way."""
    model = traffic.model()
    engine = traffic.engine(model)
    rungs = engine.warm_up()
    single = traffic.alone(traffic.sharing(engine, model, max_requests=1))
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
    sys.exit(main(*map(int, sys.argv[1:])))
