"""Backend 2: the same plans on torch.distributed, one process per device."""
