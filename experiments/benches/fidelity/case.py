"""A case of the fidelity bench, and what makes it hard: shared links, traces, unequal replicas, the hosts' own TCP."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from executor.core.job import Tcp
from executor.wan.linux import read_tcp
from planner.check.paths import communicating_pairs, used_links
from planner.plan.plan import Plan
from planner.scenario.effects import TCP, WIDE_AREA_TCP, NetworkEffects
from planner.scenario.scenario import Scenario

STEPS = 8
STEPS_ON_TRACES = 12

# Linux' default limit of the send buffer, with which the window of `TCP` was measured, bytes.
_MEASURED_BUFFER_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration to run in both backends.

    Attributes:
        scenario: The scenario, without effects on the network: these follow from ``tcp``.
        tcp: TCP settings of the hosts in the real run: ``wide-area`` as the test bed prefers them, ``as-is`` as this
            machine has them.
        backup_every: Number of steps between two copies of the state; 0 for no copies.
        runs: Number of real runs; 0 for as many as of most cases.
    """

    name: str
    scenario: Scenario
    plan: Plan
    policy: str = "none"
    steps: int = STEPS
    tcp: Tcp = "wide-area"
    backup_every: int = 0
    runs: int = 0

    @property
    def simulated_scenario(self) -> Scenario:
        """The scenario with the effects of the TCP that the real run has."""
        network = WIDE_AREA_TCP if self.tcp == "wide-area" else tcp_effects(read_tcp())
        return replace(self.scenario, effects=replace(self.scenario.effects, network=network))

    @property
    def ranks(self) -> int:
        """Number of devices of the plan."""
        return len(self.plan.devices)

    @property
    def has_shared_links(self) -> bool:
        """Whether two pairs of devices of the plan send over the same link between regions, in the same direction."""
        cluster = self.scenario.cluster
        pairs = dict.fromkeys(communicating_pairs(self.plan, self.scenario))
        users = Counter(link.name for pair in pairs for link in cluster.path(*pair) if link.source != link.target)
        return max(users.values(), default=0) > 1

    @property
    def has_traces(self) -> bool:
        """Whether the rate of a link that the plan uses changes."""
        return any(link.trace is not None for link in used_links(self.plan, self.scenario))

    @property
    def has_unequal_replicas(self) -> bool:
        """Whether the replicas of a stage take unequal parts of a microbatch."""
        return any(len({replica.share for replica in stage.replicas}) > 1 for stage in self.plan.stages)


def tcp_effects(settings: Mapping[str, str]) -> NetworkEffects:
    """Return the effects of the TCP of hosts with the given Linux settings (`executor.wan.linux.read_tcp`).

    Windows of idle connections stay open without ``tcp_slow_start_after_idle``, and also with BBR, which has a pacing
    of its own (Linux, ``tcp_slow_start_after_idle_check``). The largest window is in proportion to the send buffer.
    """
    closes = settings.get("tcp_slow_start_after_idle", "1") != "0" and settings.get("tcp_congestion_control") != "bbr"
    buffer_bytes = int(settings.get("tcp_wmem", str(_MEASURED_BUFFER_BYTES)).split()[-1])
    window_bytes = TCP.window_bytes * buffer_bytes / _MEASURED_BUFFER_BYTES
    return replace(TCP, window_bytes=window_bytes, idle_s=TCP.idle_s if closes else math.inf)
