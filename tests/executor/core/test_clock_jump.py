"""A wall clock that jumps, as when a device hears of the time late: nobody is given up for it, nothing is lost."""

import mmap
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from executor.backend import TorchBackend
from executor.core.liveness import beat_path
from tests.helpers.processes.blows import await_step
from tests.helpers.processes.training import assert_trained, chain, train_in_one_process

STEPS = 24
HOUR_S = 3600.0

# Stands before libc: what every process reads as the time of day is off by what stands in a file, and who waits until
# a time of day, as gloo does, waits by that clock.
_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static double offset_s(void) {
    static volatile double *shared;
    if (!shared) {
        int file = open(getenv("JUMPING_CLOCK"), O_RDONLY);
        shared = mmap(0, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
        close(file);
    }
    return *shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += (time_t)offset_s();
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

typedef int (*timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

/* A look every 20 ms at whether the time has come. Times since the machine's start are left alone: they are small. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static timedwait real;
    if (!real) real = (timedwait)dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = (timedwait)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    if (until->tv_sec < 1000000000) return real(condition, mutex, until);
    struct timespec now, look;
    clock_gettime(CLOCK_REALTIME, &now);
    if (now.tv_sec > until->tv_sec || (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec)) return ETIMEDOUT;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &look);
    look.tv_nsec += 20000000;
    if (look.tv_nsec >= 1000000000) look.tv_sec++, look.tv_nsec -= 1000000000;
    int status = real(condition, mutex, &look);
    /* Who waits looks again for what it waits for, and comes back. */
    return status == ETIMEDOUT ? 0 : status;
}
"""


def jumping_clock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> mmap.mmap:
    """What all processes started from now on are off by, seconds, as a double that can be written."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a clock that jumps is compiled, and this machine has no C compiler")
    source, library, offset = folder / "clock.c", folder / "clock.so", folder / "offset"
    source.write_text(_CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    offset.write_bytes(struct.pack("d", 0.0))
    monkeypatch.setenv("JUMPING_CLOCK", str(offset))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with offset.open("r+b") as file:
        return mmap.mmap(file.fileno(), 8)


@pytest.mark.slow
def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, far back, and while a rank is lost."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    clock = jumping_clock(tmp_path, monkeypatch)
    read = subprocess.run(["date", "+%s"], capture_output=True, check=True)
    assert abs(int(read.stdout) - time.time()) < 60

    def meddle() -> None:
        for step, offset_s in ((3, HOUR_S), (6, -HOUR_S), (9, 24 * HOUR_S)):
            job = await_step(tmp_path, 0, step)
            clock[:] = struct.pack("d", offset_s)
        os.kill(int(beat_path(job, 1).read_text()), signal.SIGKILL)

    meddler = threading.Thread(target=meddle, daemon=True)
    meddler.start()
    scenario, plan = chain()
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target, backup_every=1).run(scenario, plan, None, STEPS)
    meddler.join(0)
    assert not meddler.is_alive()
    read = subprocess.run(["date", "+%s"], capture_output=True, check=True)
    assert int(read.stdout) - time.time() == pytest.approx(24 * HOUR_S, abs=60), "the clock has not jumped"
    assert_trained(record, target, train_in_one_process(scenario, STEPS))
