"""How long a rank waits for a message."""

from datetime import timedelta

# A link may be out for minutes; whoever waits longer than this for a peer gives up.
PATIENCE = timedelta(minutes=30)
