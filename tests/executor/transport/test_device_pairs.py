"""Messages between devices pass one at a time and never block each other; gloo stands for NCCL here."""

import json
import multiprocessing
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from executor.core.step_program import Transfer
from executor.training.device import CPU
from executor.transport.device_pairs import NOTICE_BYTES, DevicePair
from executor.transport.rendezvous import form_pair
from executor.transport.wire_format import transfer_tag
from planner.plan.actions import Kind

RANKS, MESSAGES = 3, 12
LIMIT_S = 60.0


def tag_of(number: int) -> int:
    """The tags of both directions are the same."""
    return transfer_tag(number % 2, Transfer("", "", Kind.FORWARD, 0, 1, number, 0, 1, 0))


def size_bytes(source: int, target: int, number: int) -> int:
    return 1 + 1000 * source + 100 * target + number


def content(source: int, target: int, number: int) -> torch.Tensor:
    return torch.full((size_bytes(source, target, number),), 16 * source + number, dtype=torch.uint8)


def exchange(rank: int, store: Path, found: Path) -> None:
    """Send messages to all other ranks at once, in an order of this rank's own, and receive theirs in any order."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT_S)
    )
    world = dist.group.WORLD
    assert world is not None
    failures, departed, occupied = list[Exception](), list[float](), threading.Lock()
    pairs = {}
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        if (group := form_pair(one, other, "gloo")) is not None:
            peer = one + other - rank
            pairs[peer] = DevicePair(
                f"device-{peer}", rank, peer, group, world, occupied, CPU, RunClock(0.0), failures.append
            )
    waiting = ThreadPoolExecutor(2 * MESSAGES)
    numbers = list(range(MESSAGES))

    def take(peer: int, number: int, work: dist.Work) -> bool:
        work.wait()
        received = pairs[peer].receive(tag_of(number), size_bytes(peer, rank, number))
        return torch.equal(received, content(peer, rank, number))

    taken, notices = [], []
    for peer in pairs:
        for number in numbers:
            notices.append(torch.empty(NOTICE_BYTES, dtype=torch.uint8))
            work = dist.irecv(notices[-1], peer, group=world, tag=tag_of(number))
            assert work is not None
            taken.append(waiting.submit(take, peer, number, work))
    random.Random(rank).shuffle(numbers)
    for number in numbers:
        for peer, pair in pairs.items():
            pair.send(tag_of(number), content(rank, peer, number), departed.append)
    right = [each.result() for each in taken]
    for pair in pairs.values():
        pair.close()
    found.write_text(json.dumps([len(right), all(right), len(departed), [str(each) for each in failures]]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_send_to_each_other_in_any_order_receive_everything(tmp_path: Path) -> None:
    spawned = multiprocessing.get_context("spawn")
    results = [tmp_path / f"found-{rank}" for rank in range(RANKS)]
    processes = [
        spawned.Process(target=exchange, args=(rank, tmp_path / "store", results[rank])) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [json.loads(result.read_text()) for result in results] == [[24, True, 24, []]] * RANKS
