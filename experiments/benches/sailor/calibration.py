"""The constants of a simulated step that no profile and no datasheet gives: three, each with a physical meaning.

Everything else is measured or counted: layer times, activation and parameter bytes, message rates, update times.
"""

from dataclasses import dataclass

from planner.scenario.effects import ComputeEffects, Effects, NetworkEffects
from planner.scenario.memory_effects import MemoryEffects


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of training on GPUs with one stream for compute and communication.

    The defaults are the least mean absolute relative error on half of eth-easl/sailor's 15 measured runs of OPT-350M
    on GH200 nodes of 4 GPUs (DeepSpeed's pipeline engine, fp32, Adam); `ropebridge bench accuracy` fits them anew and
    holds them to the other half.

    Attributes:
        network_share: Share of the rate that a benchmark of an idle network measured between two nodes which training
            gets, in transfers between stages and in sums of gradients: four GPUs of a node send at once, next to other
            jobs, in ranks that are never quite in step.
        framework_bytes: Memory of a GPU that belongs to no tensor of training: the CUDA context, the buffers of
            NCCL's communicators (3 to 4 GB together, as another framework reported on the same machines), the
            allocator's reserve.
        workspace_share: What the backward of one layer holds while it runs, relative to what the layer keeps for it:
            a gradient for each kept activation, and temporaries of softmax, dropout and loss of the same size.
    """

    network_share: float = 0.77
    framework_bytes: int = 4_460_000_000
    workspace_share: float = 2.3

    @property
    def memory(self) -> MemoryEffects:
        """The constants of memory as effects."""
        return MemoryEffects(self.framework_bytes, self.workspace_share)

    def effects(self) -> Effects:
        """Return the constants as effects of a scenario."""
        network, compute = NetworkEffects(share=self.network_share), ComputeEffects(transfers_block=True)
        return Effects(network, compute, self.memory)
