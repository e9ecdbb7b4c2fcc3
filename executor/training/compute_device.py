"""Where a rank's layers are computed: on a GPU of its machine, which ranks may share, or on the CPU.

What passes between ranks goes through the CPU's memory and gloo wherever they compute, inside a region too.
"""

import os

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
