"""The device that a rank computes on: its choice, threads, random numbers, memory, and copies to and from the CPU."""

import ctypes
import os
from collections.abc import Sequence

import torch

from executor.core.job import ComputeMode

CPU = torch.device("cpu")

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# glibc's largest value for the mmap threshold: half of the heap of a thread.
_LARGEST_BYTES = 32 * 2**20


def compute_device(kind: str, compute: ComputeMode) -> torch.device:
    """Return the device that this rank computes on, and make it the process's current one if it is a GPU.

    The ranks of a machine take its GPUs in turn. Paced compute has no layers, and stays on the CPU.

    Args:
        kind: Kind of the rank's device in the plan; ``cpu`` and names that begin with ``cpu-`` are not GPUs.
        compute: Whether the rank computes or sleeps.
    """
    is_cpu = kind == "cpu" or kind.startswith("cpu-")
    if compute == "paced" or is_cpu or not torch.cuda.is_available():
        return CPU
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # Calls that name no GPU, such as the allocation of page-locked memory, would otherwise use the first one.
    torch.cuda.set_device(device)
    return device


def threads_of_a_rank(ranks: int) -> int:
    """Return the number of threads for torch in each of a machine's ranks: its share of the cores, at least one.

    Args:
        ranks: Number of processes that share the cores of this process's affinity mask, which a container or a batch
            system may have restricted.
    """
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all its work, so that a clock read afterwards includes it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seed_random(device: torch.device, seed: int) -> None:
    """Seed the random numbers of layers on a device.

    `torch.manual_seed` seeds every kind of device that torch knows, and records the stack for each kind that is not in
    use: a millisecond for every forward.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory in the process, since the next microbatch needs as much again.

    By default glibc returns large blocks to the system when they are freed, and gets new ones that the system clears
    page by page: with several microbatches in flight, in every step. Other C libraries are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # Never trim the heap, and take fewer blocks from outside it, which are returned when they are freed.
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)


def to_payload(samples: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a one-dimensional uint8 tensor on the CPU, which shares its memory if possible."""
    flat = samples.contiguous().view(-1).view(torch.uint8)
    if flat.device.type != "cuda":
        return flat.cpu()
    # A GPU writes directly to page-locked memory, which torch keeps for the next payload; the copy is synchronous.
    return torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True).copy_(flat)


def from_payloads(
    payloads: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return one tensor of the samples of consecutive payloads."""
    flat = payloads[0] if len(payloads) == 1 else torch.cat(list(payloads))
    return flat.view(dtype).view(-1, *sizes).to(device)
