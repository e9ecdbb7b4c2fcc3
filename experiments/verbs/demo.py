"""The verb ``ropebridge demo``: plan, simulate, run for real on this machine, compare, draw."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from executor.backend import TorchBackend, choose_emulator
from experiments.benches.fidelity.planned import DEMO_POLICY, DEMO_SCENARIO, DEMO_STEPS, DEMO_STRATEGY
from experiments.report.figures.run_figure import draw_runs
from experiments.report.html.run_page import write_run_page
from experiments.report.perfetto import write_perfetto
from experiments.runs.folder import new_folder, summarise, write_record
from experiments.runs.scenario import choose_scenario
from experiments.verbs.plan import describe_plan
from experiments.verbs.report import compare
from planner.files.plan import write_plan
from planner.runs.record import Backend
from planner.scenario.effects import Effects
from planner.systems.auto.objective import contended_step_time_s
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator
from traces.common.units import number_text

REAL_STEPS = 12

# Folders of the runs: the plan as it is, and changed by the policy, in either backend.
FIXED = {"simulated": "simulated-fixed", "real": "real-fixed"}
ADAPTED = {"simulated": "simulated", "real": "real"}
TRAINED = "trained"


def demo(output: Path | None, as_json: bool, tell: Callable[[str], None]) -> str:
    """Run the demo into a folder, the next free one below ``runs`` by default; return what to print."""
    free = (folder for number in count(1) if not (folder := Path("runs") / f"demo-{number}").exists())
    target = output if output is not None else next(free)
    scenario, emulator = choose_scenario(DEMO_SCENARIO), choose_emulator("auto", tell)
    if emulator != "relay":
        # Without the relay, the emulated links do not carry TCP; then neither may the simulated ones.
        scenario = replace(scenario, effects=Effects())
    with new_folder(target) as folder:
        plan = make_plan(DEMO_STRATEGY, scenario)
        write_plan(plan, folder / "plan.json")
        tell(describe_plan(plan, scenario, contended_step_time_s(plan, scenario)))
        backends: dict[str, Backend] = {
            "simulated": Simulator(),
            "real": TorchBackend("paced", emulator=emulator, tell=tell),
        }
        shown = []
        for side, backend in backends.items():
            how = "on torch.distributed, true bytes, profiled times" if side == "real" else "simulated"
            for policy, folders in (("none", FIXED), (DEMO_POLICY, ADAPTED)):
                tell(f"{DEMO_STEPS} steps, policy '{policy}', {how}")
                record = backend.run(scenario, plan, make_policy(policy, scenario), DEMO_STEPS)
                write_record(record, folder / folders[side])
            shown.append(record)
        tell(f"training the model for real: {REAL_STEPS} steps of the same plan")
        (folder / TRAINED).mkdir()
        parameters = folder / TRAINED / "parameters.safetensors"
        trainer = TorchBackend("real", emulator=emulator, on_this_device=True, parameters=parameters, tell=tell)
        trained = trainer.run(scenario, plan, None, REAL_STEPS)
        write_record(trained, folder / TRAINED)
        tell("drawing")
        write_run_page(shown, list(ADAPTED), folder / "report.html")
        draw_runs(shown, folder / "report.png")
        write_perfetto(shown, folder / "perfetto.json")
        result = _result(folder, dict(zip(ADAPTED, map(summarise, shown), strict=True)))
        result |= {"loss_first": trained.losses[0], "loss_last": trained.losses[-1]}
        (folder / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    return json.dumps(result) if as_json else _describe(target, result)


def _result(folder: Path, adapted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    fixed = {side: json.loads((folder / name / "summary.json").read_text()) for side, name in FIXED.items()}
    return {
        **adapted,
        "throughput_error": adapted["simulated"]["samples_per_s"] / adapted["real"]["samples_per_s"] - 1,
        "gain": {side: adapted[side]["samples_per_s"] / fixed[side]["samples_per_s"] for side in ADAPTED},
    }


def _describe(folder: Path, result: dict[str, Any]) -> str:
    simulated, real, gain, error = result["simulated"], result["real"], result["gain"], result["throughput_error"]
    return "\n".join(
        [
            compare([folder / each for folders in (FIXED, ADAPTED) for each in folders.values()], as_json=False),
            f"The simulation promised {number_text(simulated['samples_per_s'])} samples per second and the real run "
            f"reached {number_text(real['samples_per_s'])}: {number_text(100 * abs(error))} % too "
            f"{'many' if error > 0 else 'few'} were promised.",
            f"Policy '{DEMO_POLICY}' made training {number_text(gain['simulated'])} times as fast in the simulation, "
            f"and {number_text(gain['real'])} times in the real run.",
            f"Loss of the model trained for real: {number_text(result['loss_first'])} -> "
            f"{number_text(result['loss_last'])}",
            f"open {folder / 'report.html'} (or report.png); load {folder / 'perfetto.json'} into ui.perfetto.dev",
        ]
    )
