"""Receives that are posted ahead of time: all of a step."""

from collections.abc import Callable
from functools import partial

from executor.core.step_program import StepProgram, Transfer
from executor.runtime.action_order import ActionOrder
from executor.transport.receive import RecvHandle
from executor.transport.staging import Ready, Staging
from executor.transport.transport import Transport
from executor.transport.wire_format import sync_tag, transfer_tag
from planner.scenario.training import FLOAT32_BYTES


class PostedStep:
    """All receives of one step, posted at once before the step begins.

    Attributes:
        order: The order of the step's actions, which is informed of arrivals.
        transfers: The receive of each transfer, and the function that waits for its payload.
        exchanges: The receives of gradient sums, by `GradientSync.key` and round.
    """

    def __init__(self, current: StepProgram, order: ActionOrder, transport: Transport, staging: Staging) -> None:
        self.order = order
        self.transfers: dict[Transfer, tuple[RecvHandle, Callable[[], Ready]]] = {}
        self.exchanges: dict[tuple[int, int], RecvHandle] = {}
        step, program = current.step, current.program
        for work in program.work:
            for transfer in work.receives:
                post = partial(
                    transport.post,
                    transfer.source,
                    transfer_tag(step, transfer),
                    transfer.size_bytes,
                    between_stages=True,
                )
                self.transfers[transfer] = staging.receive(current.plan, transfer, post, order.arrival(work))
        for sync in program.synchronisations:
            for exchange in sync.exchanges(program.device):
                if exchange.receive_from is not None:
                    key = (sync.key, exchange.round)
                    size_bytes = exchange.receive_elements * FLOAT32_BYTES
                    source = sync.devices[exchange.receive_from]
                    self.exchanges[key] = transport.post(source, sync_tag(step, *key), size_bytes)
