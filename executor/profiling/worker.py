"""One rank of a profile: measures the layers that it would train, while the other ranks measure theirs.

Started as ``python -m executor.profiling.worker AGENT_PID JOB_FOLDER``; leaves ``layers-RANK.json`` there.
"""

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from executor.core.job import JobFolder
from executor.core.subprocesses import die_with_parent
from executor.profiling.layer_times import measure_layers
from executor.training.device import compute_device, keep_freed_memory, threads_of_a_rank
from executor.training.models.loading import load_with_sizes
from executor.wan.testbed import enter_device_network

REPEATS = 15
_PATIENCE = timedelta(minutes=10)


def main(agent: str, folder: str) -> None:
    """Measure this rank's layers with each size of its microbatches."""
    die_with_parent(int(agent))
    keep_freed_memory()
    enter_device_network()
    job, rank = JobFolder(Path(folder)), int(os.environ["RANK"])
    scenario, plan, _ = job.read()
    torch.set_num_threads(threads_of_a_rank(len(plan.devices)))
    dist.init_process_group("gloo", timeout=_PATIENCE)
    assert scenario.code is not None, "there is something to measure"
    loaded = load_with_sizes(scenario.code, scenario.training.seed)
    device = plan.devices[rank]
    where = compute_device(scenario.cluster.by_name[device].kind, "real")
    measured = []
    # Together, so that each measures while the others compute, as they will.
    dist.barrier()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica, samples in zip(stage.replicas, stage.most_samples(pipeline.microbatches), strict=True):
                if replica.device == device:
                    layers = stage.layers
                    measured += measure_layers(loaded, layers, samples, scenario.training, REPEATS, where)
    dist.barrier()
    (job.path / f"layers-{rank}.json").write_text(json.dumps([asdict(each) for each in measured]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
