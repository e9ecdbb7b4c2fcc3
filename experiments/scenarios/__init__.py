"""The scenarios that come with ropebridge."""

from pathlib import Path

READY_FOLDER = Path(__file__).parent


def ready_scenarios() -> dict[str, Path]:
    """Return the files of the ready scenarios, by name; their model files are in the same folder."""
    found = {path.stem: path for path in sorted(READY_FOLDER.glob("*.yaml"))}
    return {name: path for name, path in found.items() if "\ncluster:" in path.read_text()}
