import errno

import pytest

from planner.scenario.datasheet import DATASHEET
from planner.systems.registry import STRATEGIES
from traces.common.errors import nearest_names, unknown_name, unwritable


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("A100", ["a100-40", "a100-80"]),
        ("NVIDIA A100-SXM4-80GB", ["a100-80"]),
        ("Tesla T4", ["t4"]),
        ("GeForce RTX 3090", ["rtx-3090"]),
        ("Raspberry Pi 4", ["raspberry-pi-4"]),
        ("a100-4O", ["a100-40"]),
        ("abacus", []),
    ],
)
def test_a_device_is_found_by_the_names_that_people_give_it(name: str, nearest: list[str]) -> None:
    assert nearest_names(name, DATASHEET) == nearest


def test_a_full_disk_is_known_by_its_number() -> None:
    full = OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")
    assert unwritable(full) == "a file cannot be written: No space left on device; make room, or choose another place"
    assert unwritable(OSError(errno.EROFS, "", "/x")).startswith("/x cannot be written: Read-only file system;")
    assert "File too large" in unwritable(RuntimeError("I/O error: File too large (os error 27)"))
    nowhere = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    assert unwritable(nowhere).startswith("temporary files cannot be written; make room")
    assert unwritable(FileNotFoundError(errno.ENOENT, "")) == unwritable(RuntimeError("(os error 2)")) == ""


def test_all_that_may_be_meant_is_suggested() -> None:
    message = str(unknown_name("device kind", "A100", DATASHEET))
    assert "unknown device kind 'A100'; did you mean 'a100-40' or 'a100-80'? valid: p100, " in message


@pytest.mark.parametrize(
    ("name", "nearest"), [("Megatron", "megatron"), ("asteriod", "asteroid"), ("zb", "zb-h1-equal")]
)
def test_case_and_spelling_do_not_matter_for_other_names(name: str, nearest: str) -> None:
    assert nearest_names(name, STRATEGIES) == [nearest]
