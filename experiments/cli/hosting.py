"""``ropebridge host``: one host's part in a job that was deployed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from executor.backend import TorchBackend
from executor.control.member import run_member
from executor.core.hosts import Hosts
from executor.deploy.bundle import Bundle, read_bundle
from executor.recovery.resuming import CheckpointConfig
from experiments.cli.run import checkpoint_orders, resumed_plan
from experiments.runs.carry_out import carry_out, present
from experiments.runs.live import telling
from experiments.runs.scenario import Ordering
from traces.common.errors import InputError
from traces.common.names import find_by_name


def host(folder: Path, name: str, address: str | None, resume: bool, tell: Callable[[str], None]) -> str:
    """Run a host's part to its end; return what to print.

    Args:
        folder: Of the job, on this host.
        name: The host's.
        address: Of the head, where that was not known before.
        resume: Whether to go on from the newest checkpoint; the head's to know.
        tell: Called with lines about the progress.

    Raises:
        InputError: The folder is not that of a job, or has no such host.
        RunError: The run failed.
    """
    bundle = read_bundle(folder)
    parts = {part.name: part for part in bundle.hosts.parts}
    find_by_name(name, parts, "host", where=str(folder / "hosts.json"))
    hosts = replace(bundle.hosts, address=address or bundle.hosts.address)
    if not hosts.address:
        raise InputError("where the head is, is not known", where="--head", valid="give its address")
    if name == hosts.head:
        return _lead(bundle, hosts, folder / "run", resume, tell)
    tell(f"host {name}: ranks {', '.join(map(str, parts[name].ranks))}, head at {hosts.address}:{hosts.port}")
    run_member(hosts, name, bundle.code)
    return f"host {name} has done its part"


def _lead(bundle: Bundle, hosts: Hosts, output: Path, resume: bool, tell: Callable[[str], None]) -> str:
    run, scenario, plan = bundle.run, bundle.scenario, bundle.plan
    folder = Path(run.checkpoint) if run.checkpoint else None
    if resume and folder is None:
        raise InputError("this job writes no checkpoints", where="--resume", valid="deploy it with '--checkpoint'")
    checkpoints: CheckpointConfig | None
    checkpoints, had = checkpoint_orders(folder, run.checkpoint_every or None, resume, scenario, run.steps, tell)
    if had is not None:
        plan = resumed_plan(had, scenario, Ordering())

    def backend(place: Path | None) -> TorchBackend:
        return TorchBackend(
            run.compute,
            parameters=place / "parameters.safetensors" if place is not None else None,
            resources=place,
            backup_every=run.backup_every,
            checkpoints=checkpoints,
            hosts=lambda _: hosts,
            watch=telling(tell),
            tell=tell,
        )

    return present(carry_out(scenario, plan, run.policy, run.steps, output, backend), as_json=False)
