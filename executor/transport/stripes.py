"""A message over several connections: each carries a stripe of it, so that several windows are open at once."""

from itertools import pairwise

# A smaller message is not worth a second round of headers.
LEAST_STRIPE_BYTES = 64 * 1024


def stripes(size_bytes: int, connections: int) -> list[tuple[int, int]]:
    """Return the (first, end) bytes that each connection carries, at most one stripe each.

    Both ends know the size, and come to the same answer.
    """
    count = max(1, min(connections, size_bytes // LEAST_STRIPE_BYTES))
    bounds = [size_bytes * part // count for part in range(count + 1)]
    return list(pairwise(bounds))
