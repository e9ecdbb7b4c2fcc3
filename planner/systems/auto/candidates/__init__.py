"""Candidate plans of `auto`: pipelines found by dynamic programming over device classes or, for few devices, over sets.

Terms: a *device class* is a set of interchangeable devices. An *option* is one way to use a class, or a set of devices,
for a stage: tensor-parallel degree, number of replicas, recomputation. A *template* is a number of equal pipelines over
device classes. A *mix* is several templates side by side. M is the number of microbatches of a step.
"""
