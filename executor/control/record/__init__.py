"""The record of a run over all its attempts: what each attempt writes as it goes, and how the parts are joined.

A run that is ended, in whatever way, goes on from a checkpoint as another attempt. Each attempt has a folder beside the
checkpoints, ``record/0000`` and so on, in which a process that is killed leaves what it has written:

- ``attempt.json``: the first step, the samples before it, and the plan.
- ``began``: the time of day at second 0 of the attempt.
- ``published.arrows``: the rows of all ranks, if the launcher collects them; else ``events-RANK.arrows``.
- ``losses.jsonl``, ``norms.jsonl``, ``decisions.jsonl`` and ``absences.jsonl``, by the launcher; or
  ``losses-RANK.jsonl``.

An attempt counts up to the first step of the next one that went back to before its own end: the steps after the
checkpoint were lost, and the record has those of the next attempt alone.
"""
