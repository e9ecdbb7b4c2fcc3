"""Example models. Like a user's own, each file stands alone: scenarios load it by its path.

A model file defines ``build(**arguments)``, which returns an object with

- ``layers``: a list of ``torch.nn.Module``; each takes the one tensor that the layer before it returns,
- ``loss(outputs, targets)``: a scalar tensor, the mean over the samples,
- ``samples(first, count)``: inputs and targets of the samples ``first`` to ``first + count - 1``; sample i
  depends on i alone, so that any split of a batch into microbatches trains on the same data.

A model of a data set, which ends, has two other attributes in place of ``samples``:

- ``size``: how many samples there are to train on,
- ``select(indices)``: inputs and targets of these samples; ``indices`` is a tensor of int64, each 0 to ``size - 1``.

It is then trained in epochs, each in an order of its own that follows from the scenario's seed.
"""
