"""Facts of a job and of its model that must be equal on all ranks (executor/rank/handshake.py)."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from executor.core.job import JobFolder, RunConfig
from executor.training.data.sources import fingerprint
from executor.training.models.loading import LayerSize
from planner.files.plan import plan_json
from planner.plan.plan import Plan
from planner.scenario.scenario import HuggingFaceCode, Scenario, weight_files
from planner.scenario.training import TrainingData

# Number of hexadecimal digits of a SHA-256 that are compared and shown in messages: nobody finds two files with equal
# ones.
_DIGITS = 32

Job = tuple[Scenario, Plan, RunConfig]


def job_facts(folder: JobFolder, job: Job) -> dict[str, str]:
    """Return the facts, by name, that must be equal on all ranks before any of them loads a model."""
    scenario, plan, config = job
    facts = {
        "ropebridge": _ropebridge_version(),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "scenario": _digest(_resolved(folder)),
        "plan": _digest(plan_json(plan)),
        # Without the folders for checkpoints and for rows, whose paths may differ between hosts.
        **{name: str(value) for name, value in asdict(config).items() if name not in ("checkpoints", "attempt")},
    }
    if scenario.code is not None and scenario.code.path is not None and config.compute == "real":
        facts["model file"] = _file_digest(scenario.code.path)
    if isinstance(scenario.code, HuggingFaceCode) and config.compute == "real":
        facts["transformers"] = version("transformers") if find_spec("transformers") else "not installed"
    return facts


def model_facts(sizes: Sequence[LayerSize]) -> dict[str, str]:
    """Return the sizes of the layers as facts."""
    return {f"layer {index}": _layer_facts(size) for index, size in enumerate(sizes)}


def data_facts(named: TrainingData | None) -> dict[str, str]:
    """Return a fact about the data that the scenario names, if it names any."""
    return {} if named is None else {"training data": fingerprint(named.source)}


def _layer_facts(size: LayerSize) -> str:
    shape, dtype = list(size.output.sizes), str(size.output.dtype).removeprefix("torch.")
    return f"{shape} {dtype} per sample, {size.parameter_bytes} bytes of parameters"


def _ropebridge_version() -> str:
    try:
        return version("ropebridge")
    except PackageNotFoundError:
        return "not installed"


def _resolved(folder: JobFolder) -> str:
    """Return the scenario as JSON, without the paths of the model's files and the data, which may differ by host."""
    data = folder.documents()["scenario"]
    if data["code"] is not None:
        del data["code"]["path"]
    if data["training"]["data"] is not None:
        del data["training"]["data"]["source"]["path"]
    return json.dumps(data, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _file_digest(path: Path) -> str:
    """Return the digest of a file, or that of the digests of several files with weights."""
    files = weight_files(path)
    if files != [path]:
        return _digest(" ".join(map(_file_digest, files)))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]
