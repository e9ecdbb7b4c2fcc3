"""What a partner of a tensor-parallel group does is in the rows of its first device, as in a simulation."""

from executor.row_log import RowLog
from planner.events import Event


class PartnerRows(RowLog):
    """Writes a file without rows."""

    def log(self, event: Event) -> None:
        """Drop a row."""
