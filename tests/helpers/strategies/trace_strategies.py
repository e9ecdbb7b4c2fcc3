"""Random traces for property tests, outages included."""

import numpy as np
from hypothesis import strategies as st

from traces.trace import LinkTrace

RATES_BPS = st.one_of(st.just(0.0), st.floats(1e3, 1e10))
LENGTHS_S = st.floats(1e-3, 1e3)


@st.composite
def link_traces(draw: st.DrawFn, *, with_latency: bool = False, loops: bool | None = None) -> LinkTrace:
    """A trace of up to 12 pieces; ``loops`` is drawn where it is None."""
    pieces = draw(st.lists(st.tuples(LENGTHS_S, RATES_BPS, st.floats(0, 1)), min_size=1, max_size=12))
    lengths_s, rates_bps, latencies_s = (np.array(column) for column in zip(*pieces, strict=True))
    edges_s = np.concatenate(([0.0], np.cumsum(lengths_s)))
    return LinkTrace(
        edges_s[:-1],
        rates_bps,
        float(edges_s[-1]),
        latencies_s if with_latency else None,
        draw(st.booleans()) if loops is None else loops,
    )
