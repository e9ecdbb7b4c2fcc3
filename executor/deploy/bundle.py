"""The folder that carries a run to other hosts: scenario, plan, options, and the code of model, data set and policy."""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from executor.core.job import ComputeMode, RunConfig, rank_devices
from planner.files.documents import read_json
from planner.files.plan import read_plan, write_plan
from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.plan.plan import Plan
from planner.scenario.scenario import Code, HuggingFaceCode, Scenario, weight_files
from planner.scenario.training import DatasetCode
from traces.common.errors import InputError

# The model's file, or its weights: a file or a folder.
CODE_FILE, WEIGHTS = "model.py", "weights"
DATASET_FILE = "dataset.py"
POLICY_FILE = "policy.py"
DOCUMENTS = ("scenario.json", "plan.json", "run.json")
# SHA-256 of each other file of the run, by its path in the folder.
CHECKSUMS = "checksums.json"


@dataclass(frozen=True, slots=True)
class HostedRun:
    """How a job runs on its hosts, as options of the command.

    Attributes:
        compute: ``real`` trains the model; ``paced`` sleeps for the profile's times and sends messages of the right
            size.
        policy: Name of the policy, or path of a Python file that defines a policy.
        backup_every: Number of steps between two copies of the state in memory; 0 if a lost host ends the run.
        checkpoint: Folder for checkpoints, which all hosts can access; empty for none.
        on_this_device: Whether hosts may train on devices of other kinds than the scenario gives.
        allow_nan: Whether the job goes on with a loss or parameters that are not finite.
    """

    compute: ComputeMode
    steps: int
    policy: str
    backup_every: int
    checkpoint: str
    checkpoint_every: int
    on_this_device: bool = False
    allow_nan: bool = False

    def devices(self, scenario: Scenario, plan: Plan, *, adapts: bool) -> tuple[str, ...]:
        """Return the names of the job's devices in rank order; with ``adapts`` a policy may use further ones."""
        config = RunConfig(self.compute, self.steps, "none", adapts, backup_every=self.backup_every, spread=True)
        return rank_devices(scenario, plan, config)


@dataclass(frozen=True, slots=True)
class RunBundle:
    """A run, and the files that it needs on the hosts that carry it out.

    Folders of data are not copied: they must be at the path that the scenario names, on every host.
    """

    scenario: Scenario
    plan: Plan
    run: HostedRun

    @property
    def code(self) -> Path | None:
        """Path of the model's file or weights; None for paced compute, and for random weights."""
        return self.scenario.code.path if self.scenario.code is not None and self.run.compute == "real" else None

    @property
    def data(self) -> Path | None:
        """Path of the data, or of its code; None for paced compute, and for a model with its own data."""
        data = self.scenario.training.data
        return data.source.path if data is not None and self.run.compute == "real" else None

    def write(self, folder: Path) -> None:
        """Write the run into a new folder."""
        folder.mkdir(parents=True)
        write_resolved_scenario(self.scenario, folder / "scenario.json")
        write_plan(self.plan, folder / "plan.json")
        (folder / "run.json").write_text(json.dumps(asdict(self.run), indent=1) + "\n")
        if self.code is not None:
            _copy(self.code, folder / _place(self.scenario.code))
        if self.data is not None and self.data.suffix == ".py":
            shutil.copy(self.data, folder / DATASET_FILE)
        if self.run.policy.endswith(".py"):
            shutil.copy(self.run.policy, folder / POLICY_FILE)
        (folder / CHECKSUMS).write_text(json.dumps(_checksums(folder), indent=1) + "\n")


def read_run_bundle(folder: Path) -> RunBundle:
    """Return the run in a folder that `RunBundle.write` wrote.

    Raises:
        InputError: The folder contains no run, or a file of the run is not the one that was written.
    """
    scenario = read_resolved_scenario(folder / "scenario.json")
    try:
        run = HostedRun(**read_json(folder / "run.json"))
    except (OSError, ValueError, TypeError) as error:
        valid = "name the folder 'job' that 'ropebridge deploy' wrote"
        raise InputError(f"the folder does not hold a job: {error}", where=str(folder), valid=valid) from None
    _check_files(folder)
    if run.policy.endswith(".py"):
        run = replace(run, policy=str(folder.resolve() / POLICY_FILE))
    if scenario.code is not None and scenario.code.path is not None:
        place = folder.resolve() / _place(scenario.code)
        scenario = replace(scenario, code=replace(scenario.code, path=place))
    training = scenario.training
    if training.data is not None and isinstance(training.data.source, DatasetCode):
        code = replace(training.data.source, path=folder.resolve() / DATASET_FILE)
        scenario = replace(scenario, training=replace(training, data=replace(training.data, source=code)))
    return RunBundle(scenario, read_plan(folder / "plan.json"), run)


def _checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a run, without those that are in the folder for other reasons."""
    single = [folder / name for name in (*DOCUMENTS, CODE_FILE, DATASET_FILE, POLICY_FILE)]
    weights = [path for path in (folder / WEIGHTS).rglob("*") if path.is_file()] + [folder / WEIGHTS]
    found = {}
    for path in sorted(path for path in [*single, *weights] if path.is_file()):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _check_files(folder: Path) -> None:
    valid = "copy the folder again, whole, or submit the job again"
    try:
        written = json.loads((folder / CHECKSUMS).read_text())
        if not isinstance(written, dict):
            raise ValueError("they are no object")
    except (OSError, ValueError) as error:
        raise InputError(f"the checksums cannot be read: {error}", str(folder / CHECKSUMS), valid) from None
    found = _checksums(folder)
    names = [name for name in {**found, **written} if found.get(name) != written.get(name)]
    if names:
        problem = "missing" if names[0] not in found else "not the file that was written with the job"
        raise InputError(f"it is {problem}", where=str(folder / names[0]), valid=valid)


def _place(code: Code | None) -> str:
    return WEIGHTS if isinstance(code, HuggingFaceCode) else CODE_FILE


def _copy(source: Path, target: Path) -> None:
    files = weight_files(source)
    if files == [source]:
        shutil.copy(source, target)
        return
    target.mkdir()
    for file in files:
        shutil.copy(file, target)
