"""Packs the files of a job into one body of a request, and unpacks and checks what was received."""

import io
import re
import zipfile
import zlib
from collections import Counter
from pathlib import Path

from executor.core.job import RunConfig, rank_devices
from executor.deploy.bundle import (
    CHECKSUMS,
    CODE_FILE,
    DATASET_FILE,
    DOCUMENTS,
    POLICY_FILE,
    WEIGHTS,
    HostedRun,
    RunBundle,
    read_run_bundle,
)
from executor.validate import check_supported
from experiments.runs.jobs.messages import BODY_BYTES, parse
from experiments.runs.jobs.states import Devices
from experiments.runs.jobs.store import Submission
from planner.check import check_plan
from traces.common.atomic import scratch_folder
from traces.common.errors import InputError
from traces.common.units import size_text

# The only files of a job; no other name is ever written to a disk.
_FILES = frozenset({*DOCUMENTS, CHECKSUMS, CODE_FILE, DATASET_FILE, POLICY_FILE})
_WEIGHT_FILE = re.compile(rf"{WEIGHTS}/[A-Za-z0-9_][A-Za-z0-9_.-]{{0,99}}")

# Traces as JSON become a tenth of their size when they are packed; a body that grows more than this is refused.
_UNPACKED_BYTES = 8 * BODY_BYTES

# All packed files have the same date, so that equal jobs are equal bytes.
_DATE = (1980, 1, 1, 0, 0, 0)


def pack(bundle: RunBundle) -> bytes:
    """Return the files of a job as a zip file.

    Raises:
        InputError: The files are too large for a request.
    """
    body = io.BytesIO()
    with scratch_folder() as place:
        folder = place / "job"
        bundle.write(folder)
        with zipfile.ZipFile(body, "w") as packed:
            for path in sorted(each for each in folder.rglob("*") if each.is_file()):
                entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _DATE)
                packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    if body.tell() > BODY_BYTES:
        raise InputError(
            f"the files of the job are {size_text(body.tell())}, more than {size_text(BODY_BYTES)}",
            valid="let the model's code read large files from a folder that all hosts share",
        )
    return body.getvalue()


def unpack(content: bytes, folder: Path) -> None:
    """Write the files of a job into a new folder.

    Raises:
        InputError: The bytes are no job: no zip file, a file that no job has, or far more than was sent.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            entries = packed.infolist()
            for entry in entries:
                if entry.filename not in _FILES and not _WEIGHT_FILE.fullmatch(entry.filename):
                    raise _no_job(f"no job has a file '{entry.filename[:100]}'")
            if sum(entry.file_size for entry in entries) > _UNPACKED_BYTES:
                raise _no_job("its files are too large")
            folder.mkdir(parents=True)
            for entry in entries:
                path = folder / entry.filename
                path.parent.mkdir(exist_ok=True)
                # zipfile stops at the declared size, so that a false one cannot fill the disk.
                path.write_bytes(packed.read(entry))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise _no_job(str(error)) from None
    if missing := [name for name in DOCUMENTS if not (folder / name).is_file()]:
        raise _no_job(f"it lacks {', '.join(missing)}")


def check_submission(content: bytes) -> Submission:
    """Return a received job, after the checks that a run makes before it starts; no code of the job is executed.

    Raises:
        InputError: The job is not valid; the message does not name folders of this machine.
    """
    with scratch_folder() as place:
        folder = place / "job"
        try:
            unpack(content, folder)
            parse(HostedRun, (folder / "run.json").read_bytes())
            bundle = read_run_bundle(folder)
            check_plan(bundle.plan, bundle.scenario)
            check_run(bundle)
        except InputError as error:
            raise InputError(str(error).replace(f"{folder}/", "").replace(f"{folder}", "job")) from None
    return Submission(bundle.scenario.name, needed_devices(bundle), bundle.run.steps, content)


def check_run(bundle: RunBundle) -> None:
    """Raise `InputError` if a run cannot carry out a job whose plan fits its scenario."""
    run = bundle.run
    checkpoints = run.checkpoint_every > 0
    recovers = run.backup_every > 0
    check_supported(bundle.plan, bundle.scenario, run.compute, "none", recovers=recovers, checkpoints=checkpoints)
    if run.steps < 1:
        raise InputError(f"{run.steps} steps are not allowed", where="--steps", valid="give 1 or more")


def needed_devices(bundle: RunBundle) -> Devices:
    """Return the numbers of devices that a job needs, by kind: a rank of the job has one each."""
    run, scenario = bundle.run, bundle.scenario
    config = RunConfig(run.compute, run.steps, "none", adapts=run.policy != "none")
    named = scenario.cluster.by_name
    return dict(Counter(named[name].kind for name in rank_devices(scenario, bundle.plan, config)))


def _no_job(problem: str) -> InputError:
    return InputError(f"this is no job: {problem}", valid="send one with 'ropebridge jobs submit'")
