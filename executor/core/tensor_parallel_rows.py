"""What a partner of a tensor-parallel group does is in the rows of its first device, as in a simulation."""

from collections.abc import Callable

from executor.core.row_log import EventRecorder
from planner.events.events import Event


class PartnerRows(EventRecorder):
    """Writes a file without rows."""

    def log(self, event: Event) -> None:
        """Drop a row."""

    def sending(self, step: int, row: Callable[[float, float], Event], start_s: float) -> Callable[[float], None]:
        """Open nothing: the row that would close it is dropped, and its step would never be published."""
        return lambda end_s: None
