"""Memory that microbatches free is there for those after them, without the system clearing it again."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from torch import nn
from executor.training.device import keep_freed_memory
if sys.argv[1] == "keeps":
    keep_freed_memory()
torch.set_num_threads(1)
blocks = ((nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()) for _ in range(3))
layers = nn.Sequential(*(layer for block in blocks for layer in block))
faults = []
for step in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    in_flight = [layers(torch.ones(4, 16, 48, 48)).sum() for microbatch in range(4)]
    while in_flight:
        in_flight.pop(0).backward()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[4:]))
"""


def page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library: nothing is told to it")
def test_later_steps_find_the_memory_of_those_before() -> None:
    """Eight steps, each with four microbatches in flight; without this it is a thousand pages and more in each."""
    given_back = page_faults("gives-back")
    if given_back < 800:
        pytest.skip("this system does not clear what it gives page by page")
    assert page_faults("keeps") < given_back / 10
