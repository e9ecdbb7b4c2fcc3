"""Tells when the gradients of buckets of layers are complete, while backward still goes on."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn


class GradBucketHooks:
    """The buckets that are complete when one last backward is.

    Args:
        buckets: The parameters of each, by its number.
        complete: Told of each once, with its number.
    """

    def __init__(self, buckets: Mapping[int, Iterable[nn.Parameter]], complete: Callable[[int], None]) -> None:
        self._bucket = {parameter: number for number, own in buckets.items() for parameter in own}
        self._open = list(buckets)
        self._missing: Counter[int] = Counter()
        self._complete = complete

    @contextmanager
    def autograd(self) -> Iterator[None]:
        """Around a backward that gives every trained parameter its gradient."""
        trained = [parameter for parameter in self._bucket if parameter.requires_grad]
        self.expect(trained)
        hooks = [each.register_post_accumulate_grad_hook(self.arrived) for each in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of whose gradients are still to come, once for each time they are added to."""
        self._missing.update(self._bucket[parameter] for parameter in parameters if parameter in self._bucket)

    def arrived(self, parameter: nn.Parameter) -> None:
        """Take note that something was added to a gradient."""
        number = self._bucket.get(parameter)
        if number is None:
            return
        self._missing[number] -= 1
        if not self._missing[number]:
            self._close(number)

    def close(self) -> None:
        """The backward is over; parameters that took no part in it get no gradient."""
        for number in list(self._open):
            self._close(number)

    def _close(self, number: int) -> None:
        if number in self._open:
            self._open.remove(number)
            self._complete(number)
