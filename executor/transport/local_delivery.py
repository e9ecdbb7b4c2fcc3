"""How long a message takes on this machine by itself, so that an emulated link does not come on top of it."""

import time
from statistics import median

import torch
import torch.distributed as dist

_ROUNDS = 20
_PAUSE_S = 0.003
_SIZE_BYTES = 32 * 1024
_TAG = 1


def measure_local_delivery_s(rank: int, ranks: int) -> float:
    """Return the time from when a message should be handed to gloo until a waiting rank has it, in seconds.

    Waking up late is part of it, on either side. Ranks measure in pairs, all at the same time, as they will send;
    all get the mean of the pairs' medians. All ranks of one machine must call this together.
    """
    partner = rank ^ 1
    result = torch.zeros(2, dtype=torch.float64)
    if partner < ranks:
        if rank < partner:
            _send(partner)
        else:
            result[0], result[1] = median(_receive(partner) for _ in range(_ROUNDS)), 1.0
    dist.all_reduce(result)
    return float(result[0] / result[1]) if result[1] else 0.0


def _send(partner: int) -> None:
    message = torch.zeros(_SIZE_BYTES // 8, dtype=torch.float64)
    for _ in range(_ROUNDS):
        due_s = time.monotonic() + _PAUSE_S
        message[0] = due_s
        time.sleep(_PAUSE_S)
        dist.send(message, partner, tag=_TAG)


def _receive(partner: int) -> float:
    message = torch.empty(_SIZE_BYTES // 8, dtype=torch.float64)
    dist.recv(message, partner, tag=_TAG)
    return time.monotonic() - float(message[0])
