"""Hooks that tell when the gradients of a bucket of layers are complete, while backward goes on."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn


class GradBucketHooks:
    """The buckets whose gradients are complete after the last backward that adds to them.

    Args:
        buckets: The parameters of each bucket, by its number.
        complete: Called once with the number of each bucket when its gradients are complete.
    """

    def __init__(self, buckets: Mapping[int, Iterable[nn.Parameter]], complete: Callable[[int], None]) -> None:
        self._bucket = {parameter: number for number, own in buckets.items() for parameter in own}
        self._open = set(buckets)
        self._missing: Counter[int] = Counter()
        self._complete = complete

    @contextmanager
    def autograd(self) -> Iterator[None]:
        """Observe a backward that gives every trained parameter its gradient."""
        trained = [parameter for parameter in self._bucket if parameter.requires_grad]
        self.expect(trained)
        hooks = [each.register_post_accumulate_grad_hook(self.added) for each in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note gradients that are still to be added to, once for each time."""
        self._missing.update(self._bucket[parameter] for parameter in parameters if parameter in self._bucket)

    def added(self, parameter: nn.Parameter) -> None:
        """Note that a parameter's gradient was added to."""
        number = self._bucket.get(parameter)
        if number is not None:
            self._missing[number] -= 1
            if not self._missing[number]:
                self._close(number)

    def close(self) -> None:
        """Note that backward is over: parameters that took no part in it get no gradient."""
        for number in sorted(self._open):
            self._close(number)

    def _close(self, number: int) -> None:
        if number in self._open:
            self._open.remove(number)
            self._complete(number)
