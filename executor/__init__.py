"""Backend 2 (backend 1 is the simulator): runs plans on torch.distributed, with one process per device."""

from typing import TYPE_CHECKING

from traces.common.faces import lazy_face

if TYPE_CHECKING:
    from executor.backend import TorchBackend as TorchBackend
else:
    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "executor.backend": ("TorchBackend",),
        },
    )
