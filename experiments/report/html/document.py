"""From figures and a template to a page that opens from a disk and loads nothing."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from bokeh.embed import components
from bokeh.models import Model
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments.report.html.theme import THEME

_ASSETS = Path(__file__).parent / "assets"


def document(template: str, program: str, known: str, figures: Mapping[str, Model], **values: object) -> str:
    """Return a page.

    Args:
        template: Name of its template, which finds the figures under ``figures``.
        program: Name of its JavaScript.
        known: What this must know, as JSON.
        figures: By name.
        values: What else the template needs.
    """
    script, divisions = components(dict(figures), theme=THEME)
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined)
    return environment.get_template(template).render(
        figures={name: Markup(division) for name, division in divisions.items()},
        version=version("ropebridge"),
        style=Markup((_ASSETS / "page.css").read_text()),
        program=Markup((_ASSETS / program).read_text()),
        library=Markup(Resources(mode="inline", components=["bokeh"]).render()),
        # Inside a script nothing may look like the script's end.
        known=Markup(known.replace("<", "\\u003c")),
        script=Markup(script),
        **values,
    )
