"""Example models. Like a user's own, each file stands alone: scenarios load it by its path.

A model file defines ``build(**arguments)``, which returns an object with

- ``layers``: a list of ``torch.nn.Module``; each takes the tensor that the previous layer returns,
- ``loss(outputs, targets)``: a scalar tensor, the mean over the samples,
- ``samples(first, count)``: inputs and targets of the samples ``first`` to ``first + count - 1``; sample i
  depends on i alone, so that any split of a batch into microbatches trains on the same data.

A model of a finite data set has two other attributes in place of ``samples``:

- ``size``: the number of samples to train on,
- ``select(indices)``: inputs and targets of these samples; ``indices`` is a tensor of int64, each 0 to ``size - 1``.

Such a model is trained in epochs; the scenario's seed determines the order of the samples in each epoch.
"""
