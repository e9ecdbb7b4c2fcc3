"""Messages over several connections are cut so that both ends agree and every byte travels once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from executor.transport.transport import LEAST_STRIPE_BYTES, stripes


@given(st.integers(0, 10**8), st.integers(1, 16))
def test_stripes_cover_a_message_once_and_evenly(size_bytes: int, connections: int) -> None:
    parts = stripes(size_bytes, connections)
    assert 1 <= len(parts) <= connections
    assert parts[0][0] == 0
    assert parts[-1][1] == size_bytes
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    widths = [end - first for first, end in parts]
    assert max(widths) - min(widths) <= 1
    assert len(parts) == 1 or min(widths) >= LEAST_STRIPE_BYTES


@given(st.integers(1, 16))
def test_large_messages_use_every_connection(connections: int) -> None:
    assert len(stripes(connections * LEAST_STRIPE_BYTES, connections)) == connections
