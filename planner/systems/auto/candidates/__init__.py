"""Candidate plans of `auto`: pipelines by dynamic programming over device classes or, for few devices, over their sets.

Terms: a device class is a set of interchangeable devices; an option is a way to use a class or set for a stage; a
template is a number of equal pipelines over device classes; a mix is several templates side by side. M is the number of
microbatches of a step.
"""
