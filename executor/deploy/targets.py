"""All targets, by name."""

from collections.abc import Mapping

from executor.deploy.kubernetes import KUBERNETES
from executor.deploy.skypilot import SKYPILOT
from executor.deploy.slurm import SLURM
from executor.deploy.ssh import SSH
from executor.deploy.target import Target
from executor.deploy.torchrun import TORCHRUN

TARGETS: Mapping[str, Target] = {target.name: target for target in (TORCHRUN, SSH, SLURM, KUBERNETES, SKYPILOT)}
