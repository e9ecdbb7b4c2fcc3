"""Freed memory stays with a process that trains: the next microbatch needs as much again.

Left to itself, glibc gives large blocks back to the system as soon as they are free, and gets new ones that the system
has to clear page by page: where several microbatches are in flight, in every step.
"""

import ctypes

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# The most that it takes, half of what the heap of a thread may be.
_LARGEST_BYTES = 32 * 2**20


def keep_freed_memory() -> None:
    """Give memory back to the system only when this process ends, where its C library can be told so."""
    try:
        tell = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # Never, however much is free at the end of the heap. Blocks outside of it go when they are free: have fewer.
    tell(_TRIM_THRESHOLD, -1)
    tell(_MMAP_THRESHOLD, _LARGEST_BYTES)
