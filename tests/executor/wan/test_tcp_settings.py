"""Network namespaces: the TCP settings of the relay's hosts, and what making a namespace demands."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from executor.wan import linux as tcp_settings
from executor.wan.linux import WIDE_AREA, as_on, read_tcp, set_tcp
from executor.wan.testbed import missing

HOST = {"tcp_congestion_control": "bbr", "tcp_slow_start_after_idle": "1", "tcp_wmem": "4096 16384 4194304"}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tcp_settings, "_FOLDER", tmp_path)
    for name, value in HOST.items():
        (tmp_path / name).write_text(value.replace(" ", "\t") + "\n")
    return tmp_path


def test_a_host_that_may_be_set(host: Path) -> None:
    assert read_tcp() == HOST
    assert set_tcp(WIDE_AREA) == []
    assert read_tcp() == {**HOST, "tcp_congestion_control": "cubic", "tcp_slow_start_after_idle": "0"}


def test_a_host_that_may_not_be_set_says_so(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert set_tcp(WIDE_AREA) == [
        "tcp_congestion_control is bbr, not cubic or reno (Read-only file system)",
        "tcp_slow_start_after_idle is 1, not 0 (Read-only file system)",
    ]
    assert set_tcp(as_on(HOST)) == []
    assert set_tcp(as_on({"tcp_wmem": "1 2 3", "tcp_rmem": "4 5 6"})) == [
        "tcp_wmem is 4096 16384 4194304, not 1 2 3 (Read-only file system)",
        "tcp_rmem is unknown, not 4 5 6 (Read-only file system)",
    ]


# In a network of its own: differs from what the kernel gives a new one, and starts the next program in such a one.
DIFFERENT = """
import os, sys
from pathlib import Path
settings = Path("/proc/sys/net/ipv4")
(settings / "tcp_slow_start_after_idle").write_text("0")
(settings / "tcp_wmem").write_text("4096 20000 3000000")
(settings / "tcp_congestion_control").write_text("reno")
python, parent, program = sys.executable, *sys.argv[1:]
os.execv(python, [python, "-m", "executor.wan.linux", "run", parent, python, "-c", program])
"""

COPY = """
import json, os
from executor.wan.linux import enter_new_network
from executor.wan.linux import HOST_TCP, as_on, read_tcp, set_tcp
enter_new_network()
host, before = json.loads(os.environ[HOST_TCP]), read_tcp()
misses = set_tcp(as_on(host))
print(json.dumps([host, before, misses, read_tcp()]))
"""


def test_a_new_network_gets_the_settings_of_the_one_that_was_left() -> None:
    lack = missing()
    if lack is not None:
        pytest.skip(lack)
    me = str(os.getpid())
    command = [sys.executable, "-m", "executor.wan.linux", "run", me, sys.executable, "-c", DIFFERENT, me, COPY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    host, before, misses, after = json.loads(done.stdout)
    assert (host["tcp_slow_start_after_idle"], host["tcp_wmem"]) == ("0", "4096 20000 3000000")
    assert before["tcp_slow_start_after_idle"] == "1"
    assert (misses, after) == ([], host)


def test_what_makes_a_user_namespace_has_one_thread() -> None:
    """The kernel demands it of ordinary users; libraries such as NumPy start threads when they are imported."""
    program = "import os, executor.wan.linux; print(len(os.listdir('/proc/self/task')))"
    # BLAS libraries start no threads on a machine with one core.
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}; print('numpy' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "False"]


# Sends packets that nobody reads yet, and counts those that were there, and those that the kernel says it dropped.
UNREAD = """
import json, os, socket, sys
from executor.wan.linux import dropped_packets, open_traffic_counts, open_tun
tun, counts = open_tun("wan0", "10.99.0.1", "255.255.0.0"), open_traffic_counts()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for _ in range(int(sys.argv[1])):
        sender.sendto(b"x", ("10.99.0.2", 5000))
read = 0
try:
    while True:
        read += b"\\x0a\\x63\\x00\\x02" in os.read(tun, 65600)
except BlockingIOError:
    print(json.dumps([read, dropped_packets(counts, "wan0")]))
"""


@pytest.mark.parametrize(("sent", "dropped"), [(20_000, 0), (70_000, 70_000 - 65_536)])
def test_a_host_drops_no_packet_of_a_window_that_leaves_at_once(sent: int, dropped: int) -> None:
    """The kernel's own queue of a TUN device has 500 packets."""
    if missing() is not None:
        pytest.skip(str(missing()))
    isolated = [sys.executable, "-m", "executor.wan.linux", "run", str(os.getpid()), sys.executable]
    done = subprocess.run([*isolated, "-c", UNREAD, str(sent)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    read, counted = json.loads(done.stdout)
    assert (read + counted, counted) == (sent, pytest.approx(dropped, abs=10))
