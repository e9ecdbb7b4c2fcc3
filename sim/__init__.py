"""Backend 1: a SimPy model of devices, links and gradient synchronisation."""

from typing import TYPE_CHECKING

from traces.common.faces import lazy_face

if TYPE_CHECKING:
    from sim.simulator import Simulator as Simulator
    from sim.step_gate import StopCondition as StopCondition
else:
    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "sim.simulator": ("Simulator",),
            "sim.step_gate": ("StopCondition",),
        },
    )
