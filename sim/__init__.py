"""Backend 1: a SimPy model of devices, links and gradient synchronisation."""
