"""Ranks of one job that have been given unlike documents and environments.

`main` is what each rank runs, by the list in the folder: for each rank a folder with its documents, and what its
environment has besides.
"""

import json
import os
import sys
from pathlib import Path

from executor.core.job import JobFolder
from executor.rank import worker

UNLIKE = "unlike.json"


def main(agent: str, folder: str) -> None:
    """Run this process's rank."""
    place, variables = json.loads((Path(folder) / UNLIKE).read_text())[int(os.environ["RANK"])]
    os.environ.update(variables)
    if "PYTHONPATH" in variables:
        sys.path.insert(0, variables["PYTHONPATH"])
    JobFolder._document = lambda self, name: Path(place) / f"{name}.json"  # type: ignore[method-assign]
    worker.main(agent, folder)
