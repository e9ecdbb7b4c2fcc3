"""``ropebridge report``: pictures of runs, and a file for Perfetto."""

from collections.abc import Sequence
from pathlib import Path

from experiments.figures.run_figure import draw_runs
from experiments.perfetto import write_perfetto
from experiments.run_folder import read_record
from traces.errors import InputError


def report(folders: Sequence[Path], output: Path | None) -> str:
    """Draw the runs in ``folders`` into one picture and one Perfetto file; return where they are.

    Args:
        folders: Run folders; a folder of several runs stands for all of them.
        output: The picture, a PNG file; None for ``report.png`` in the first folder.
    """
    if output is not None and output.suffix != ".png":
        raise InputError(f"'{output}' is not a PNG file", where="--output", valid="let its name end in .png")
    records = [read_record(run) for folder in folders for run in _runs(folder)]
    picture = output if output is not None else folders[0] / "report.png"
    draw_runs(records, picture)
    write_perfetto(records, picture.with_suffix(".perfetto.json"))
    return f"{picture}\n{picture.with_suffix('.perfetto.json')}"


def _runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in it."""
    if (folder / "summary.json").is_file() or not folder.is_dir():
        return [folder]
    return sorted(summary.parent for summary in folder.glob("*/summary.json")) or [folder]
