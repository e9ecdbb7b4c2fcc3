"""Writes runs as Chrome trace events for ui.perfetto.dev: a process per device, an arrow per message."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from experiments.report.data.labels import device_names, run_names
from experiments.report.data.link_rates import departing, fed_stage, input_from, input_of
from planner.events.event import Event, EventKind
from planner.events.log import as_log
from planner.runs.record import RunRecord
from traces.common.atomic import write_text_atomically

_COMPUTE_THREAD = 1
_RECEIVE_THREAD = 2
_FIRST_SEND_THREAD = 3


def write_perfetto(records: Sequence[RunRecord], path: Path) -> None:
    """Write runs, each with its own processes, into a JSON file for ui.perfetto.dev."""
    write_text_atomically(path, json.dumps(trace_events(records), separators=(",", ":")))


def trace_events(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Convert runs to the Chrome trace-event format.

    Times are microseconds from the start of each run. A process is a device of a run, or the run's policy. A device's
    threads are compute (with all-reduces), waiting for data, and one thread for each device that it sends to. A send
    lasts while its bytes leave. An arrow leads from a send to the compute that uses its bytes.
    """
    processes, flows = count(1), count(1)
    events: list[dict[str, Any]] = []
    for record, name in zip(records, run_names(records), strict=True):
        events += _RunTrace(record, name, processes, flows).events()
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _RunTrace:
    """The trace events of one run; all runs share the counters of process and flow numbers."""

    def __init__(self, record: RunRecord, name: str, processes: Iterator[int], flows: Iterator[int]) -> None:
        self._record = record
        self._name = name
        self._flows = flows
        last_step = max((event.step for event in record.events), default=0)
        syncers = record.plan.synchronisation.outer.syncers
        self._devices = {
            **device_names(record, 0, last_step + 1),
            **{name: f"{name} (outer steps)" for name in syncers},
        }
        self._process = {device: next(processes) for device in self._devices}
        self._policy_process = next(processes)
        self._send_threads: dict[tuple[str, str], int] = {}

    def events(self) -> list[dict[str, Any]]:
        shown = (event for event in self._record.events if event.kind in _THREADS)
        slices = [self._slice(event, event.start_s, _THREADS[event.kind]) for event in shown]
        # The sends determine the threads that `_names` names.
        happened = [*slices, *self._sends(), *self._decisions()]
        return [*self._names(), *happened]

    def _names(self) -> Iterator[dict[str, Any]]:
        for device, label in self._devices.items():
            process = self._process[device]
            yield _metadata("process_name", process, 0, name=f"{self._name}: {label}")
            yield _metadata("process_sort_index", process, 0, sort_index=process)
            yield _metadata("thread_name", process, _COMPUTE_THREAD, name="compute")
            yield _metadata("thread_name", process, _RECEIVE_THREAD, name="waiting for data")
        for (device, peer), thread in self._send_threads.items():
            yield _metadata("thread_name", self._process[device], thread, name=f"send to {peer}")
        if self._record.decisions:
            yield _metadata("process_name", self._policy_process, 0, name=f"{self._name}: policy")
            yield _metadata("thread_name", self._policy_process, _COMPUTE_THREAD, name="decisions")

    def _slice(self, event: Event, start_s: float, thread: int, **more: float) -> dict[str, Any]:
        start_us, end_us = _microseconds(start_s), _microseconds(event.end_s)
        return {
            "name": _name(event),
            "cat": str(event.kind),
            "ph": "X",
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "pid": self._process[event.device],
            "tid": thread,
            "args": {"step": event.step, "microbatch": event.microbatch, "bytes": event.size_bytes, **more},
        }

    def _sends(self) -> Iterator[dict[str, Any]]:
        uses = {input_of(event): event for event in self._record.events if event.kind is EventKind.COMPUTE}
        log = as_log(self._record.events)
        sends, starts_s = departing(log)
        for event, start_s in zip(log.take(sends), starts_s.tolist(), strict=True):
            channel = (event.device, event.peer)
            if channel not in self._send_threads:
                others = sum(device == event.device for device, _ in self._send_threads)
                self._send_threads[channel] = _FIRST_SEND_THREAD + others
            sent = self._slice(
                replace(event, end_s=max(event.end_s, event.arrived_s)),
                start_s,
                self._send_threads[channel],
                queued_us=_microseconds(start_s - event.start_s),
            )
            yield sent
            use = uses.get(input_from(event))
            if use is not None:
                yield from self._arrow(sent, use)

    def _arrow(self, sent: Mapping[str, Any], use: Event) -> Iterator[dict[str, Any]]:
        same = {"name": "input", "cat": "flow", "id": next(self._flows)}
        yield {**same, "ph": "s", "ts": sent["ts"], "pid": sent["pid"], "tid": sent["tid"]}
        process, start_us = self._process[use.device], _microseconds(use.start_s)
        yield {**same, "ph": "f", "bp": "e", "ts": start_us, "pid": process, "tid": _COMPUTE_THREAD}

    def _decisions(self) -> Iterator[dict[str, Any]]:
        times_s = {event.step: event.end_s for event in self._record.events if event.kind is EventKind.DECISION}
        for decision in self._record.decisions:
            if decision.observed_step in times_s:
                yield {
                    "name": decision.change,
                    "cat": "decision",
                    "ph": "i",
                    "s": "t",
                    "ts": _microseconds(times_s[decision.observed_step]),
                    "pid": self._policy_process,
                    "tid": _COMPUTE_THREAD,
                    "args": {"observed_step": decision.observed_step, "first_step": decision.first_step},
                }


_THREADS = {EventKind.COMPUTE: _COMPUTE_THREAD, EventKind.SYNC: _COMPUTE_THREAD, EventKind.RECEIVE: _RECEIVE_THREAD}


def _name(event: Event) -> str:
    """Return the name of an event, such as ``2F0`` (stage 2, forward, microbatch 0), ``wait for 2F0``, ``send 2F0``."""
    if event.kind is EventKind.MIGRATE:
        return "send layers"
    if event.kind is EventKind.BACKUP:
        return "send backup"
    if event.kind is EventKind.SYNC or event.microbatch < 0:
        return "gradient sync" if event.kind is EventKind.SYNC else "send gradients"
    action = f"{event.stage}{event.action}{event.microbatch}"
    if event.kind is EventKind.RECEIVE:
        return f"wait for {action}"
    if event.kind is EventKind.SEND:
        return f"send {fed_stage(event)}{event.action}{event.microbatch}"
    return action


def _metadata(kind: str, process: int, thread: int, **arguments: object) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _microseconds(time_s: float) -> float:
    """Convert seconds to microseconds, rounded to nanoseconds, so that an event ends exactly where the next starts."""
    return round(time_s * 1e6, 3)
