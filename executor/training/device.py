"""Freed memory stays with a process that trains: the next microbatch needs as much again.

Left to itself, glibc gives large blocks back to the system as soon as they are free, and gets new ones that the system
has to clear page by page: where several microbatches are in flight, in every step.
"""

import ctypes
import os
from collections.abc import Sequence

import torch

from executor.core.job import ComputeMode

CPU = torch.device("cpu")


def compute_device(kind: str, compute: ComputeMode) -> torch.device:
    """Return where this rank computes; if that is a GPU, it becomes this process's current one.

    The ranks of a machine take its GPUs in turn. Paced compute has no layers, and stays on the CPU.

    Args:
        kind: Of the device that the rank stands for: ``cpu``, and what begins with ``cpu-``, are no GPUs.
        compute: How the rank computes.
    """
    stands_for_a_cpu = kind == "cpu" or kind.startswith("cpu-")
    if compute == "paced" or stands_for_a_cpu or not torch.cuda.is_available():
        return CPU
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # What names no GPU, as the allocation of page-locked memory, would otherwise go to the first one.
    torch.cuda.set_device(device)
    return device


def threads_of_a_rank(ranks: int) -> int:
    """Return the threads that torch may use in each of a machine's ranks: its share of the cores, one at least.

    Args:
        ranks: Processes that share the cores that this one may run on, which a container's or a batch system's mask
            may make fewer than the machine has.
    """
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def settle(device: torch.device) -> None:
    """Wait until a device has done all that it was given, so that a clock read now shows it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seed_random(device: torch.device, seed: int) -> None:
    """Start the random numbers of layers on a device anew.

    `torch.manual_seed` does it for every kind of device that torch knows, and writes down the stack for each kind that
    is not in use: a millisecond for every forward.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


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


def to_payload(samples: torch.Tensor) -> torch.Tensor:
    """Return the samples as a one-dimensional uint8 tensor on the CPU, which shares memory where it can."""
    row = samples.contiguous().view(-1).view(torch.uint8)
    if row.device.type != "cuda":
        return row.cpu()
    # Page-locked memory, which a GPU writes to directly and torch keeps for the next payload; the copy is waited for.
    return torch.empty(row.numel(), dtype=torch.uint8, pin_memory=True).copy_(row)


def from_payloads(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return one tensor of the samples of consecutive payloads.

    Args:
        parts: In the order of the samples.
        sizes: Shape of a sample.
        dtype: Of its numbers.
        device: Where the tensor is wanted.
    """
    row = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return row.view(dtype).view(-1, *sizes).to(device)
