"""The verb ``ropebridge demo``: plan, simulate, run for real on this machine, compare, draw."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from executor.backend import TorchBackend, choose_emulator
from experiments.report.figures.run_figure import draw_runs
from experiments.report.html.run_page import write_run_page
from experiments.report.perfetto import write_perfetto
from experiments.runs.folder import new_folder, summarise, write_record
from experiments.runs.scenario import choose_scenario
from experiments.verbs.plan import describe_plan
from experiments.verbs.report import compare
from planner.files.plan import write_plan
from planner.scenario.effects import WIDE_AREA_TCP, Effects
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator
from traces.common.units import number_text

SCENARIO = "cloud-edge-end-small"
STRATEGY = "megatron"
POLICY = "depth"
PACED_STEPS = 30
REAL_STEPS = 12


def demo(output: Path | None, as_json: bool, tell: Callable[[str], None]) -> str:
    """Run the demo into a folder, the next free one below ``runs`` by default; return what to print."""
    free = (folder for number in count(1) if not (folder := Path("runs") / f"demo-{number}").exists())
    target = output if output is not None else next(free)
    scenario, emulator = choose_scenario(SCENARIO), choose_emulator("auto", tell)
    if emulator == "relay":
        # The emulated links carry real TCP between hosts with settings for wide-area links; so must the simulated ones.
        scenario = replace(scenario, effects=Effects(network=WIDE_AREA_TCP))
    with new_folder(target) as folder:
        plan = make_plan(STRATEGY, scenario)
        write_plan(plan, folder / "plan.json")
        tell(describe_plan(plan, scenario))
        tell(f"simulating {PACED_STEPS} steps over the links' traces, policy '{POLICY}'")
        simulated = Simulator().run(scenario, plan, make_policy(POLICY, scenario), PACED_STEPS)
        write_record(simulated, folder / "simulated")
        tell(f"running the same on torch.distributed: {len(plan.devices)} processes, true bytes, profiled times")
        backend = TorchBackend("paced", emulator=emulator, tell=tell)
        paced = backend.run(scenario, plan, make_policy(POLICY, scenario), PACED_STEPS)
        write_record(paced, folder / "paced")
        tell(f"training the model for real: {REAL_STEPS} steps of the same plan")
        (folder / "trained").mkdir()
        parameters = folder / "trained" / "parameters.safetensors"
        trainer = TorchBackend("real", emulator=emulator, parameters=parameters, tell=tell)
        trained = trainer.run(scenario, plan, None, REAL_STEPS)
        write_record(trained, folder / "trained")
        tell("drawing")
        write_run_page([simulated, paced], ["simulated", "paced"], folder / "report.html")
        draw_runs([simulated, paced], folder / "report.png")
        write_perfetto([simulated, paced], folder / "perfetto.json")
        before, after = summarise(simulated), summarise(paced)
        result = {
            "simulated": before,
            "real": after,
            "step_time_error": before["step_s"] / after["step_s"] - 1,
            "loss_first": trained.losses[0],
            "loss_last": trained.losses[-1],
        }
        (folder / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    return json.dumps(result) if as_json else _describe(target, result)


def _describe(folder: Path, result: dict[str, Any]) -> str:
    return "\n".join(
        [
            compare([folder / "simulated", folder / "paced"], as_json=False),
            f"simulated step against real: {100 * result['step_time_error']:+.3g} %; "
            f"WAN bytes equal: {result['simulated']['wan_bytes'] == result['real']['wan_bytes']}",
            f"loss of the model trained for real: {number_text(result['loss_first'])} -> "
            f"{number_text(result['loss_last'])}",
            f"open {folder / 'report.html'} (or report.png); load {folder / 'perfetto.json'} into ui.perfetto.dev",
        ]
    )
