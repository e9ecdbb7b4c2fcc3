"""Compiles all functions of numba into their caches: ``python -m experiments.tools.compile_kernels``.

Otherwise the first commands, and each process that runs meanwhile, compile what they call, for about a minute in all.
"""

from dataclasses import replace

from experiments.runs.scenario import choose_scenario
from planner.scenario.effects import WIDE_AREA_TCP, Effects
from planner.systems.auto.robust import robust_cost_model
from planner.systems.registry import make_plan
from sim.simulator import Simulator


def compile_kernels() -> None:
    """Plan and simulate small cases that call every compiled function."""
    few, more = choose_scenario("two-regions"), choose_scenario("cloud-edge-end-small")
    make_plan("auto", few)
    for strategy in ("auto", "deepcee", "ddp"):
        plan = make_plan(strategy, more)
        robust_cost_model(more, 0.1)(plan)
        for effects in (Effects(), Effects(network=WIDE_AREA_TCP)):
            Simulator().run(replace(more, effects=effects), plan, None, 2)
    pipeline = make_plan("megatron", more)
    Simulator().run(more, replace(pipeline, order="dynamic"), None, 2)
    Simulator().run(more, replace(pipeline, schedule="portfolio"), None, 2)


if __name__ == "__main__":
    compile_kernels()
