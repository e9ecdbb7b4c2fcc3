"""The receives of one step: all of them posted at once, before the step begins."""

from executor.core.step_program import StepProgram, Transfer
from executor.runtime.action_order import ActionOrder
from executor.transport.receive import RecvHandle
from executor.transport.tags import sync_tag, transfer_tag
from executor.transport.transport import Transport
from planner.cost.allreduce import GradientSync


class PostedStep:
    """A step whose receives are posted.

    Args:
        current: The step.
        order: Who may want to hear of arrivals.
        transport: Takes the receives.
        element_bytes: Of one number of a gradient.
    """

    def __init__(self, current: StepProgram, order: ActionOrder, transport: Transport, element_bytes: int) -> None:
        self.order = order
        self._transfers: dict[Transfer, RecvHandle] = {}
        self._exchanges: dict[tuple[int, int], RecvHandle] = {}
        step, program = current.step, current.program
        for work in program.work:
            for transfer in work.receives:
                tag = transfer_tag(step, transfer)
                self._transfers[transfer] = transport.post(
                    transfer.source, tag, transfer.size_bytes, order.arrival(work)
                )
        for sync in program.synchronisations:
            for exchange in sync.exchanges(program.device):
                if exchange.receive_from is not None:
                    key = (sync.first_layer, exchange.round)
                    size_bytes = exchange.receive_elements * element_bytes
                    source = sync.devices[exchange.receive_from]
                    self._exchanges[key] = transport.post(source, sync_tag(step, *key), size_bytes)

    def transfer(self, transfer: Transfer) -> RecvHandle:
        """Return the receipt of a transfer, which is then forgotten."""
        return self._transfers.pop(transfer)

    def exchange(self, sync: GradientSync, number: int) -> RecvHandle:
        """Return the receipt of a round of a sum of gradients, which is then forgotten."""
        return self._exchanges.pop((sync.first_layer, number))
