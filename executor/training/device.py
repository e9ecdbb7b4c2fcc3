"""Functions for the device on which a rank computes: choice, threads, random numbers, memory, copies to the CPU."""

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from executor.core.job import ComputeMode
from planner.scenario.cluster import Device
from planner.scenario.datasheet import DATASHEET, is_gpu
from traces.common.errors import InputError
from traces.common.units import size_text

CPU = torch.device("cpu")

# The names of models for kinds that the datasheet calls differently; those of other kinds are in the kind's name.
_MODELS: Mapping[str, str] = {
    "a4000": "rtx a4000",
    "a5000": "rtx a5000",
    "a6000": "rtx a6000",
    "jetson-nano": "tegra x1",
    "jetson-tx2": "tegra x2",
    "jetson-xavier-nx": "xavier",
    "jetson-agx-xavier": "xavier",
    "jetson-orin-nano": "orin",
    "jetson-agx-orin": "orin",
}

# The memory in the name of a kind, such as ``a100-40``.
_MEMORY_OF_KIND = re.compile(r"-\d{2}$")

# Parts of a driver's name that are not the model: vendor, brand, form factor, memory, revision of a board.
_NOT_MODEL = re.compile(
    r"\b(nvidia|tesla|quadro|geforce|nvgpu|sxm\d?|pcie|fhhl|dgxs|hbm\d\w*|\d+gb?|model b rev \d+(\.\d+)?)\b"
)

_BOARD = Path("/proc/device-tree/model")

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# The largest mmap threshold that glibc accepts.
_LARGEST_BYTES = 32 * 2**20


def gpu_names() -> list[str]:
    """Return the names of the GPUs that torch finds, as their driver gives them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def gpus_of_ranks(kinds: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Return the index of the GPU of each rank of a host; None for a rank that computes on the CPU.

    Ranks of a kind of the datasheet choose first: each takes a GPU of its kind that no other rank has. The other ranks
    take the remaining GPUs. If there are too few, ranks share them in turn; `check_gpus` refuses this where it matters.

    Args:
        kinds: The kinds that the scenario gives for the devices of the host's ranks, in the order of ``LOCAL_RANK``.
        names: The names of the host's GPUs, as `gpu_names` returns them.
    """
    found: list[int | None] = [None] * len(kinds)
    free = list(range(len(names)))
    on_gpu = [place for place, kind in enumerate(kinds) if is_gpu(kind)] if names else []
    for place in on_gpu:
        kind = kinds[place]
        fitting = (index for index in free if kind in DATASHEET and is_kind(kind, names[index]))
        if (index := next(fitting, None)) is not None:
            found[place] = index
            free.remove(index)
    for turn, place in enumerate(on_gpu):
        if found[place] is None:
            found[place] = free.pop(0) if free else turn % len(names)
    return found


def check_gpus(devices: Sequence[Device], names: Sequence[str]) -> None:
    """Raise `InputError` if a host has fewer GPUs than ranks that need one each.

    Ranks of a user's own kinds need none: such a kind may be any device, also a part of a GPU.

    Args:
        devices: The devices of the host's ranks.
        names: The names of the host's GPUs, as `gpu_names` returns them.
    """
    needing = [device for device in devices if is_gpu(device.kind) and device.kind in DATASHEET]
    if len(needing) <= len(names):
        return
    wanted = ", ".join(f"{device.name} ({device.kind})" for device in needing)
    found = f"{len(names)} ({', '.join(names)})" if names else "none"
    raise InputError(
        f"{wanted} need a GPU each on this host, {len(needing)} in all, but torch finds {found}",
        where="--compute real",
        valid="ask the scheduler for as many, or give '--on-this-device' to let ranks share a GPU",
    )


# The driver and error correction leave less than the nominal capacity: 14.6 of 16 GiB of a T4, 79.1 of 80 of an H100.
_LEAST_MEMORY = 0.9


def check_gpu_memory(device: Device, name: str, memory_bytes: int) -> None:
    """Raise `InputError` if a GPU with this name and memory is much smaller than the scenario says of the device."""
    if memory_bytes < _LEAST_MEMORY * device.memory_bytes:
        raise InputError(
            f"the scenario gives device '{device.name}' {size_text(device.memory_bytes)} of memory, but {name} has "
            f"{size_text(memory_bytes)} here",
            where="--compute real",
            valid="give the device's memory or its kind in the scenario, and make a new plan",
        )


def compute_device(kinds: Sequence[str], place: int, compute: ComputeMode) -> torch.device:
    """Return the torch device of this rank; a GPU also becomes the current device of the process.

    The device is the CPU for paced compute, for a rank whose kind is a CPU, and if torch finds no GPU.

    Args:
        kinds: As of `gpus_of_ranks`.
        place: The index of this rank in ``kinds``, which is its ``LOCAL_RANK``.
        compute: The mode of compute.
    """
    index = gpus_of_ranks(kinds, gpu_names())[place] if compute == "real" and is_gpu(kinds[place]) else None
    if index is None:
        return CPU
    device = torch.device("cuda", index)
    # Calls that name no GPU, such as the allocation of page-locked memory, would otherwise use the first one.
    torch.cuda.set_device(device)
    return device


def device_name(kinds: Sequence[str], place: int, names: Sequence[str]) -> str:
    """Return the name of the device of a rank: of its GPU, or of the CPU; arguments as of `gpus_of_ranks`."""
    index = gpus_of_ranks(kinds, names)[place]
    return cpu_name() if index is None else names[index]


def cpu_name(board: Path = _BOARD) -> str:
    """Return ``CPU``, or the name of the board if the CPU is a Raspberry Pi's, as the device tree ``board`` has it."""
    try:
        name = board.read_text().rstrip("\0")
    except OSError:
        return "CPU"
    return name if name.startswith("Raspberry Pi") else "CPU"


def is_kind(kind: str, name: str) -> bool:
    """Return whether a device of this ``name`` may be of a kind; the user's own kinds may be any device.

    A kind of the datasheet is told by its model, not by its memory (``a100-40``) or form factor, which not every name
    contains. The rest of the name must be the model: an RTX 2080 Ti or an RTX 2080 SUPER is no ``rtx-2080``, and a part
    of a GPU is not the GPU. Kinds that are a CPU by their name may be on any machine, since `compute_device` computes
    them on its CPU.
    """
    if kind not in DATASHEET:
        return True
    model = _MODELS.get(kind) or _MEMORY_OF_KIND.sub("", kind)
    return _words(model) == _words(_NOT_MODEL.sub(" ", name.lower()))


def _words(text: str) -> list[str]:
    return sorted(re.findall(r"\w+", text))


def other_kind(kind: str, name: str) -> InputError:
    """Return the error for a rank whose device of this ``name`` is not of the ``kind`` that the scenario gives."""
    return InputError(
        f"the scenario gives a device of the kind '{kind}', but torch computes on {name} here",
        where="--compute real",
        valid="give '--on-this-device' to train here all the same, or '--compute paced' for the profiled times",
    )


def threads_of_a_rank(ranks: int) -> int:
    """Return the number of torch threads for each of ``ranks`` processes that share this machine's cores, at least 1.

    Only the cores of this process's affinity mask count, which a container or a batch system may have restricted.
    """
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed everything, so that a clock read afterwards includes it.

    On CUDA this is the work of the calling thread's stream: messages pass on streams of their own beside it, and may
    wait for other ranks.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def seed_random(device: torch.device, seed: int) -> None:
    """Seed torch's random numbers on the CPU and on ``device`` only.

    `torch.manual_seed` seeds every kind of device that torch knows, which takes a millisecond before every forward.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory in the process, since the next microbatch needs as much again.

    By default glibc returns large freed blocks to the kernel, which then clears each page of the next blocks: a cost in
    every step. Does nothing with other C libraries.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # Never trim the heap, and allocate fewer blocks by mmap, since freeing such a block returns it to the kernel.
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)


def to_payload(samples: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a one-dimensional uint8 tensor, a view of the tensor if possible.

    It stays on a CUDA device, whose copy engine takes it to the host if need be (`executor.transport.staging`); from
    other devices it is copied to the CPU.
    """
    flat = samples.contiguous().view(-1).view(torch.uint8)
    return flat if flat.is_cuda else flat.cpu()


def from_payloads(
    payloads: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the samples of consecutive payloads as one tensor of shape (samples, *sizes) on ``device``."""
    flat = payloads[0] if len(payloads) == 1 else torch.cat(list(payloads))
    return flat.view(dtype).view(-1, *sizes).to(device)
