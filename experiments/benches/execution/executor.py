"""Compares the executor with torch.distributed.pipelining on the same two stages over the same emulated link.

Paced runs have eight microbatches of 1 MB, 20 ms each for forward, input gradient and weight gradient, and a link of
400 Mbit/s at several one-way latencies. TCP has this machine's settings and, at one latency, those for wide-area links.

Real runs train the example GPT over this machine's loopback. The losses of both programs must be equal, and their
processor times are compared. Both run at the same time, since other load on the machine changes from minute to minute.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from executor.backend import TorchBackend, choose_emulator
from executor.control.launcher import prepared_job, run_job
from executor.core.job import Emulator, RunConfig, Tcp
from executor.rank.telemetry import read_samples
from experiments.benches.cases import TWO_DEVICES, trained_scenario, two_stage_plan, two_stage_scenario
from experiments.benches.execution.torch_pipelining import Measured, PipeliningRun
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from experiments.benches.simulation.predicted import profile_of
from experiments.models import gpt
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from traces.common.atomic import scratch_folder


def run_torch_pipelining(
    run: PipeliningRun, scenario: Scenario, plan: Plan, emulator: Emulator, tcp: Tcp
) -> list[Measured]:
    """Run torch.distributed.pipelining with its own schedule; return the measurements of each rank.

    The scenario determines the links, the plan the devices; ``tcp`` are the hosts' TCP settings for emulator ``relay``.
    """
    with prepared_job(scenario, plan, RunConfig(run.compute, run.steps, emulator, adapts=False, tcp=tcp)) as job:
        (job.path / "parameters.json").write_text(json.dumps(asdict(run)))
        run_job(job, plan.devices, module="experiments.benches.execution.torch_pipelining")
        ranks = range(len(plan.devices))
        return [Measured(**json.loads((job.path / f"rank-{rank}.json").read_text())) for rank in ranks]


MICROBATCHES = 8
TRANSFER_BYTES = 1_000_000
BANDWIDTH_BPS = 400e6
ACTION_S = 0.02
FLOOR_S = 3 * MICROBATCHES * ACTION_S
# One-way latency, seconds, and the TCP settings of the hosts: this machine's own, and those for wide-area links.
SETTINGS: tuple[tuple[float, Tcp], ...] = (
    (0.0, "as-is"),
    (0.010, "as-is"),
    (0.025, "as-is"),
    (0.050, "as-is"),
    (0.050, "wide-area"),
)
QUICK_SETTINGS: tuple[tuple[float, Tcp], ...] = ((0.050, "as-is"),)
STEPS, ROUNDS = 6, 2

TORCH: tuple[Literal["gpipe", "1f1b", "zb-v"], ...] = ("gpipe", "1f1b", "zb-v")
BASELINE = "torch 1f1b"
# Maps a name to the schedule, the order, and the most microbatches in flight in each of the two stages.
OURS = {
    "ropebridge 1f1b": ("1f1b", "scheduled", (2, 1)),
    "ropebridge compact-zb": ("compact-zb", "scheduled", (MICROBATCHES, MICROBATCHES)),
    "ropebridge dynamic": ("compact-zb", "dynamic", (MICROBATCHES, MICROBATCHES)),
}
BEST = "ropebridge dynamic"

# Limits that the figures must meet; MOST_OF_FLOOR maps a latency to the largest ratio of step time to compute time.
SPEEDUP_AT_S, LEAST_SPEEDUP = 0.050, 3.5
MOST_OF_FLOOR = {0.025: 1.2, 0.050: 1.25}
MOST_CPU = 1.02
# Largest allowed difference of a loss, divided by 1 + torch's loss: float32 sums are added in another order.
MOST_LOSS_DIFFERENCE = 1e-5

REAL_MODEL = {"vocabulary": 256, "width": 128, "heads": 4, "blocks": 6, "length": 64}
REAL_SAMPLES = 4
REAL_STEPS, REAL_WARMUP, REAL_ROUNDS = 40, 4, 5
REAL_RULE = Optimizer("adamw", learning_rate=0.001, weight_decay=0.01)


@dataclass(frozen=True, slots=True)
class RealPair:
    """A ropebridge run and a torch run with real compute, carried out at the same time.

    Attributes:
        own_cpu_s: Processor time of a step on all ranks of ropebridge, seconds.
        torch_cpu_s: Processor time of a step on all of torch's ranks, seconds.
        loss_difference: Largest difference of the losses of a step, divided by 1 + torch's loss.
    """

    own_cpu_s: float
    torch_cpu_s: float
    loss_difference: float


def measure_executor(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Measure ropebridge and torch.distributed.pipelining in alternating runs; ``quick`` takes one latency."""
    rows: list[Row] = []
    checks: list[Check] = []
    emulator = choose_emulator("relay", tell)
    assert emulator == "relay"
    for latency_s, tcp in QUICK_SETTINGS if quick else SETTINGS:
        step_s = _paced_rounds(latency_s, tcp, 1 if quick else ROUNDS, tell)
        baseline = step_s[BASELINE]
        for way, times_s in step_s.items():
            ratios = [other_s / own_s for other_s, own_s in zip(baseline, times_s, strict=True)]
            rows.append(
                {
                    "what": f"paced, TCP {tcp}",
                    "way": way,
                    "latency_s": latency_s,
                    "step_s": median(times_s),
                    "of_floor": median(times_s) / FLOOR_S,
                    "torch_1f1b_over_this": median(ratios),
                }
            )
            if way != BEST or latency_s not in MOST_OF_FLOOR:
                continue
            at = f"at {1000 * latency_s:.0f} ms, TCP {tcp}"
            if tcp == "as-is" and latency_s == SPEEDUP_AT_S:
                checks.append(at_least(f"torch 1F1B / dynamic {at}", median(ratios), LEAST_SPEEDUP))
            checks.append(at_most(f"dynamic / compute floor {at}", median(times_s) / FLOOR_S, MOST_OF_FLOOR[latency_s]))
    pairs = _real_pairs(2 if quick else REAL_ROUNDS, tell)
    cpu_ratios = [pair.torch_cpu_s / pair.own_cpu_s for pair in pairs]
    # Step times are not compared: they depend on the share of the cores that each rank happens to get.
    rows += [
        {"what": "real GPT, loopback", "way": way, "cpu_s_per_step": cpu_s, "torch_cpu_over_this": ratio}
        for way, cpu_s, ratio in (
            ("ropebridge 1f1b", median(pair.own_cpu_s for pair in pairs), median(cpu_ratios)),
            (BASELINE, median(pair.torch_cpu_s for pair in pairs), 1.0),
        )
    ]
    checks += [
        at_most("CPU seconds of all ranks / torch 1F1B, loopback", 1 / median(cpu_ratios), MOST_CPU),
        at_most(
            "largest difference of a loss from torch's",
            max(pair.loss_difference for pair in pairs),
            MOST_LOSS_DIFFERENCE,
        ),
    ]
    return BenchResult(rows, checks)


def _paced_rounds(latency_s: float, tcp: Tcp, rounds: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the median step time of each run, seconds, by program; in a round every program runs once."""
    scenario = two_stage_scenario(ACTION_S, TRANSFER_BYTES, MICROBATCHES, BANDWIDTH_BPS, latency_s)
    step_s: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        tell(f"{1000 * latency_s:.0f} ms one way, round {number + 1} of {rounds}")
        for way, (schedule, order, depths) in OURS.items():
            plan = two_stage_plan(scenario, schedule, (1,) * MICROBATCHES, depths, order)
            record = TorchBackend("paced", emulator="relay", tcp=tcp, tell=tell).run(scenario, plan, None, 2 * STEPS)
            step_s[way].append(measure(record).step_s)
        plan = two_stage_plan(scenario, "1f1b", (1,) * MICROBATCHES, (2, 1), "scheduled")
        for name in TORCH:
            run = PipeliningRun(
                schedule=name,
                compute="paced",
                steps=STEPS,
                microbatches=MICROBATCHES,
                activation_bytes=TRANSFER_BYTES,
                action_s=ACTION_S,
            )
            measured = run_torch_pipelining(run, scenario, plan, "relay", tcp)
            step_s[f"torch {name}"].append(median(measured[0].step_s))
    return step_s


def _real_pairs(rounds: int, tell: Callable[[str], None]) -> list[RealPair]:
    code = ModelCode(Path(gpt.__file__), REAL_MODEL)
    samples = MICROBATCHES * REAL_SAMPLES
    # The times are never used: torch and ropebridge run the same order of actions.
    unused = TimeTable((1,), (0.01,), (0.01,), (0.01,))
    scenario = trained_scenario(profile_of(code, dict.fromkeys(TWO_DEVICES, unused)), code, samples, REAL_RULE)
    plan = two_stage_plan(scenario, "1f1b", (REAL_SAMPLES,) * MICROBATCHES, (2, 1), "scheduled")
    run = PipeliningRun(
        schedule="1f1b",
        compute="real",
        steps=REAL_STEPS,
        warmup_steps=REAL_WARMUP,
        microbatches=MICROBATCHES,
        microbatch_samples=REAL_SAMPLES,
        model=REAL_MODEL,
        learning_rate=REAL_RULE.learning_rate,
        weight_decay=REAL_RULE.weight_decay,
    )
    pairs = []
    for number in range(rounds):
        tell(f"real compute on loopback, round {number + 1} of {rounds}")
        with scratch_folder() as folder, ThreadPoolExecutor() as both:
            backend = TorchBackend("real", emulator="none", resources=folder)
            own = both.submit(backend.run, scenario, plan, None, REAL_WARMUP + REAL_STEPS)
            torchs = both.submit(run_torch_pipelining, run, scenario, plan, "none", "as-is")
            record, ranks = own.result(), torchs.result()
            own_s = sum(_cpu_s(folder / f"resources-{rank}.jsonl") for rank in range(2))
        difference = _largest_difference(record.losses, ranks[-1].losses)
        pairs.append(RealPair(own_s / REAL_STEPS, sum(rank.cpu_s for rank in ranks) / REAL_STEPS, difference))
    return pairs


def _largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(loss - other) / (1 + abs(other)) for loss, other in zip(losses, expected, strict=True))


def _cpu_s(path: Path) -> float:
    samples = read_samples(path)
    return samples[-1].cpu_s - samples[REAL_WARMUP - 1].cpu_s
