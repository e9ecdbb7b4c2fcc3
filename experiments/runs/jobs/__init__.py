"""The control plane: a server that keeps jobs and hosts, the hosts that run the jobs, and the client of both."""
