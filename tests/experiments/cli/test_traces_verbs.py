import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.verbs import traces as traces_verbs
from traces.common.errors import InputError
from traces.formats import read_trace
from traces.generators.presets import preset


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "recorded"
    path.write_text("time_s,bandwidth_mbps,latency_ms\n0,12,40\n1,0,50\n2,24,40\n")
    return path


def test_show_says_what_is_in_a_file(recorded: Path) -> None:
    lines = traces_verbs.show(recorded, loops=False).splitlines()
    assert lines[0] == str(recorded)
    assert lines[1] == "▄" * 20 + " " * 20 + "█" * 20
    assert lines[2].split(maxsplit=1) == ["duration", "3 s, then the last rate for ever"]
    assert "mean                      12 Mbit/s" in lines
    assert "time at zero              0.333 of the whole" in lines


def test_show_as_json_is_in_si_units(recorded: Path, tmp_path: Path) -> None:
    picture = tmp_path / "rates.png"
    shown = json.loads(traces_verbs.show(recorded, as_json=True, plot=picture))
    assert (shown["path"], shown["loops"], shown["mean_bps"], shown["pieces"]) == (
        str(recorded),
        True,
        12e6,
        3,
    )
    assert picture.exists()


def test_show_describes_pre_emptions_too(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("0,add,node1\n0,add,node2\n6000,remove,node1\n8000,add,node3\n")
    assert traces_verbs.show(path).splitlines() == [
        str(path),
        "duration                  8 s, then who is there stays",
        "nodes                     3, 1.75 at a time (1 to 2)",
        "arrivals                  3",
        "departures                1, one every 8 s",
        "time without any          0 of the whole",
    ]
    assert json.loads(traces_verbs.show(path, as_json=True))["departures"] == 1
    with pytest.raises(InputError, match="no rates to draw"):
        traces_verbs.show(path, plot=tmp_path / "x.png")


def test_convert_goes_by_the_suffix_or_by_name(recorded: Path, tmp_path: Path) -> None:
    said = traces_verbs.convert(recorded, tmp_path / "out.mahi")
    assert said == (
        f"{tmp_path}/out.mahi: mahimahi, 3 s, 3 pieces, mean 12 Mbit/s; "
        "mahimahi has no place for the latency, which is lost"
    )
    traces_verbs.convert(tmp_path / "out.mahi", tmp_path / "out.txt", to="cooked", step_s=1)
    rates_bps = read_trace(tmp_path / "out.txt").bandwidth_bps
    assert rates_bps == pytest.approx(np.array([12e6, 0, 24e6]))
    with pytest.raises(InputError, match=r"the suffix '.txt' stands for no trace format"):
        traces_verbs.convert(recorded, tmp_path / "out.txt")


def test_generate_writes_a_preset_or_a_generator(tmp_path: Path) -> None:
    traces_verbs.generate("lte", tmp_path / "lte.csv", duration_s=30, seed=4)
    assert read_trace(tmp_path / "lte.csv") == preset("lte", duration_s=30, seed=4)
    said = traces_verbs.generate(
        "constant",
        tmp_path / "flat",
        duration_s=30,
        format_name="iperf3",
        parameters={"bandwidth": "5 Mbit/s"},
    )
    assert said == f"{tmp_path}/flat: iperf3, 30 s, 1 pieces, mean 5 Mbit/s"


def test_the_verbs_load_neither_torch_nor_matplotlib_nor_pandas() -> None:
    heavy = "{'torch', 'matplotlib', 'pandas', 'pydantic', 'scipy'}"
    code = f"import sys, experiments.verbs.traces; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
