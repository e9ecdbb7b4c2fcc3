"""Control of a job: the head's server and coordinator, and the agents that start, check and end processes."""
