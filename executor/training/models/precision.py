"""Number formats of a run: torch's autocast over the layers of a step, and the type of what passes between layers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# The precision in which matrix products and activations are bfloat16; in the others that runs train in, float32.
_BF16 = "bf16"


def boundary_dtype(precision: str) -> torch.dtype:
    """Return the type of the outputs that pass between layers, and of their gradients.

    Also between two layers of one stage: training then does not depend on where the plan cuts the model.
    """
    return torch.bfloat16 if precision == _BF16 else torch.float32


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which torch computes layers in a precision of `executor.validate.check_precision`.

    Parameters stay float32; torch converts them where they are used.
    """
    return torch.autocast(device.type, torch.bfloat16) if precision == _BF16 else nullcontext()


@contextmanager
def shared_copies() -> Iterator[None]:
    """Return a context for all passes of a step, in which the microbatches share one converted copy of each parameter.

    Otherwise each forward would make copies, which its microbatch would hold until backward.
    """
    # Torch drops its copies when the outermost of nested contexts ends.
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def use_tensor_cores(precision: str) -> None:
    """Have matrix products and convolutions of float32 numbers on GPUs use TF32 in precision ``tf32`` only.

    By default torch uses TF32 in convolutions. The setting is one of the process: `StageModule.start_step` makes it, so
    that training and measurements of a model compute alike.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
