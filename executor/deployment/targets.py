"""All targets, by name."""

from collections.abc import Mapping

from executor.deployment.kubernetes import KUBERNETES
from executor.deployment.skypilot import SKYPILOT
from executor.deployment.slurm import SLURM
from executor.deployment.ssh import SSH
from executor.deployment.target import Target
from executor.deployment.torchrun import TORCHRUN

TARGETS: Mapping[str, Target] = {target.name: target for target in (TORCHRUN, SSH, SLURM, KUBERNETES, SKYPILOT)}
