import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from traces.trace import LinkTrace

# Timings differ from machine to machine, and a test that fails by them says nothing.
settings.register_profile("ropebridge", deadline=None, derandomize=True)
settings.load_profile("ropebridge")

rates_bps = st.one_of(st.just(0.0), st.floats(1e3, 1e10))
lengths_s = st.floats(1e-3, 1e3)


@st.composite
def link_traces(draw: st.DrawFn, *, with_latency: bool = False, loops: bool | None = None) -> LinkTrace:
    pieces = draw(st.lists(st.tuples(lengths_s, rates_bps, st.floats(0, 1)), min_size=1, max_size=12))
    lengths, rates, latencies = (np.array(column) for column in zip(*pieces, strict=True))
    edges_s = np.concatenate(([0.0], np.cumsum(lengths)))
    return LinkTrace(
        edges_s[:-1],
        rates,
        float(edges_s[-1]),
        latencies if with_latency else None,
        draw(st.booleans()) if loops is None else loops,
    )


@pytest.fixture
def swaying_trace() -> LinkTrace:
    """10 Mbit/s for 2 s, an outage of 3 s, 4 Mbit/s for 5 s, again and again."""
    return LinkTrace(np.array([0.0, 2.0, 5.0]), np.array([10e6, 0.0, 4e6]), 10.0)
