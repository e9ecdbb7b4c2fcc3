"""The part of ``make gpu`` for messages that leave a GPU: copies beside compute, and NCCL between two GPUs.

One GPU shows the copies. NCCL refuses two ranks on one GPU, so that on fewer GPUs than two it is "not verified".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from executor.core.clock import RunClock
from executor.core.step_program import compile_plan
from executor.training.device import gpu_names, is_kind
from executor.transport.staging import CudaCopies
from experiments.benches.execution.equal_training import GROUP, WAYS, check_training
from experiments.benches.result import Check, at_least
from experiments.benches.simulation.predicted import TrainedCase
from planner.scenario.datasheet import DATASHEET, has_nccl

# Large enough for the rate of a copy, and compute that lasts far longer than such a copy on any GPU.
_COPIED_BYTES = 64 * 2**20
_COPIES = 10
_WIDTH, _PRODUCTS = 4096, 100


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Measured rates of copies between GPU and page-locked memory, bits per second."""

    out_bps: float
    in_bps: float

    def __str__(self) -> str:
        """Return the rates as a sentence."""
        return (
            f"Copies of {_COPIED_BYTES / 1e6:.0f} MB to the host run at {self.out_bps / 8e9:.1f} GB/s, "
            f"from it at {self.in_bps / 8e9:.1f} GB/s."
        )

    @property
    def slower_bps(self) -> float:
        """The rate of the slower way, with which copies of either way are simulated."""
        return min(self.out_bps, self.in_bps)


def check_copies(case: TrainedCase, device: torch.device) -> tuple[list[Check], CopyRates]:
    """Check that copies of both ways end while the GPU computes, and change nothing; measure their rates.

    A check holds 1 for yes and 0 for no.
    """
    scenario = case.scenario
    plan = case.plan(scenario, "1f1b")
    transfer = compile_plan(plan, scenario)[plan.devices[0]].work[0].sends[0]
    copies = CudaCopies(scenario, device, RunClock(0.0), uses_nccl=False, enters=True)
    payload = torch.randint(256, (_COPIED_BYTES,), dtype=torch.uint8, device=device)
    factor = torch.rand(_WIDTH, _WIDTH, device=device)

    def compute() -> torch.cuda.Event:
        """Queue products on the stream that computes, and return the event of their end."""
        for _ in range(_PRODUCTS):
            torch.mm(factor, factor)
        ended: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
        return ended

    # The first copies and products allocate memory and load kernels, for which CUDA may wait for the whole GPU.
    copied = copies.into(plan, transfer, copies.prepare(payload)(), 0.0)[0]
    compute().synchronize()
    copy_out = copies.prepare(payload)
    computed = compute()
    host = copy_out()
    passed_out = not computed.query()  # type: ignore[no-untyped-call]
    computed.synchronize()
    computed = compute()
    copied = copies.into(plan, transfer, host, 0.0)[0]
    passed_in = not computed.query()  # type: ignore[no-untyped-call]
    computed.synchronize()
    unchanged = torch.equal(copied, payload) and torch.equal(host, payload.cpu())
    checks = [
        at_least("a copy to the host ends while the GPU computes", passed_out, 1),
        at_least("a copy from the host ends while the GPU computes", passed_in, 1),
        at_least("copies change nothing", unchanged, 1),
    ]
    return checks, CopyRates(_rate_bps(host, payload), _rate_bps(payload, host))


def _rate_bps(target: torch.Tensor, source: torch.Tensor) -> float:
    """Return the rate of copies from one tensor to another, one of them on a GPU, by its events, bits per second."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_COPIES):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return float(8 * _COPIES * source.numel() / (start.elapsed_time(end) / 1000))


def check_nccl(
    cases: Sequence[TrainedCase], device: torch.device, tell: Callable[[str], None]
) -> tuple[list[Check], str]:
    """Check that training by two ranks through NCCL gives the result of one process.

    Boundaries between stages go through NCCL, and for a model that can be sharded the sums of a tensor-parallel group.

    Returns:
        The checks; and why they could not be made, or an empty string.
    """
    names = gpu_names()
    kind = nccl_kind(names)
    if kind is None:
        found = ", ".join(names) or "no GPU"
        return [], f"not verified: NCCL needs two GPUs of a kind of the datasheet, and this machine has {found}"
    checks = []
    for case in cases:
        on_gpus = replace(case, name=f"{case.name} through NCCL", kind=kind, host="box")
        ways = [*WAYS[:2], WAYS[-1], *([GROUP] if case.can_be_sharded else [])]
        checks += check_training(on_gpus, device, ways, tell)
    return checks, ""


def nccl_kind(names: Sequence[str]) -> str | None:
    """Return the kind of the datasheet that at least two GPUs with these names have, and that has NCCL, if any."""
    kinds = (kind for kind in DATASHEET if has_nccl(kind) and sum(is_kind(kind, name) for name in names) > 1)
    return next(kinds, None)
