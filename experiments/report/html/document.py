"""Builds an HTML page from Bokeh figures and a template: one file that loads nothing else."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import ColumnDataSource, DataRange1d, HoverTool, Model, PanTool, Range1d, ResetTool, WheelZoomTool
from bokeh.plotting import figure
from bokeh.resources import Resources
from bokeh.themes import Theme
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments.report.data.labels import GREY

INK = "#1F2933"
FAINT = "#E4E7EB"
BUBBLE = "#EEF1F4"
CAPACITY = "#DDE2E8"
WINDOW = "#0072B2"

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_RIGHT_PIXELS = 16

THEME = Theme(
    json={
        "attrs": {
            "Plot": {"background_fill_color": None, "border_fill_color": None, "outline_line_color": None},
            "Axis": {
                "axis_line_color": "#9AA5B1",
                "major_tick_line_color": "#9AA5B1",
                "minor_tick_line_color": None,
                "major_tick_in": 0,
                "major_tick_out": 4,
                "major_label_text_color": "#3E4C59",
                "major_label_text_font": _FONT,
                "major_label_text_font_size": "12px",
                "axis_label_text_color": "#52606D",
                "axis_label_text_font": _FONT,
                "axis_label_text_font_size": "12px",
                "axis_label_text_font_style": "normal",
                "axis_label_standoff": 6,
            },
            "Grid": {"grid_line_color": FAINT},
            "Title": {
                "text_color": INK,
                "text_font": _FONT,
                "text_font_size": "13px",
                "text_font_style": "bold",
                "offset": 0,
                "standoff": 6,
            },
            "ColorBar": {
                "background_fill_color": None,
                "title_text_color": "#52606D",
                "title_text_font": _FONT,
                "title_text_font_size": "12px",
                "title_text_font_style": "normal",
                "major_label_text_font": _FONT,
                "major_label_text_font_size": "12px",
            },
            "Legend": {
                "border_line_color": None,
                "background_fill_color": None,
                "label_text_font": _FONT,
                "label_text_font_size": "12px",
                "label_text_color": INK,
                "padding": 0,
                "margin": 2,
                "spacing": 14,
                "label_standoff": 6,
                "glyph_height": 14,
            },
            "Text": {"text_font": {"value": _FONT}},
        }
    }
)


def panel(
    name: str,
    height_pixels: int,
    left_pixels: int,
    *,
    x_range: Range1d,
    y_range: Range1d | DataRange1d | None = None,
    title: str | None = None,
    labels: tuple[str, str] = ("", ""),
    ticks: int | None = None,
) -> figure:
    """Return an empty figure as wide as the page, whose frame begins ``left_pixels`` from the left.

    Dragging pans the figure. The wheel zooms with Ctrl only, since the wheel alone scrolls the page.

    Args:
        name: Name of the figure, unique in the page.
        height_pixels: Height of the figure with its axes, pixels.
        left_pixels: Width of the room for the vertical axis, pixels.
        x_range: Horizontal range, which is shared by panels that pan and zoom together.
        y_range: Vertical range, or None for a range from 0 to the largest value.
        title: Text above the frame.
        labels: Labels of the horizontal and of the vertical axis.
        ticks: Approximate number of ticks of the vertical axis; None for Bokeh's choice.
    """
    made = figure(
        name=name,
        height=height_pixels,
        sizing_mode="stretch_width",
        x_range=x_range,
        y_range=y_range if y_range is not None else DataRange1d(start=0, range_padding=0.08),
        title=title,
        tools=[PanTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers="ctrl"), ResetTool()],
        toolbar_location=None,
        # Bokeh would leave out bars while the figure is dragged.
        lod_threshold=None,
        min_border_left=left_pixels,
        min_border_right=_RIGHT_PIXELS,
    )
    made.xgrid.grid_line_color = None
    if any(labels):
        made.xaxis.axis_label, made.yaxis.axis_label = labels
    if ticks is not None:
        made.yaxis.ticker.desired_num_ticks = ticks
    return made


def bokeh_dash(line: str) -> str:
    """Translate a line style of `experiments.report.data.labels` into Bokeh's name for it."""
    return {"-": "solid", "--": "dashed", ":": "dotted", "-.": "dotdash"}[line]


def centred_text(made: figure, source: ColumnDataSource, colour: str, size_pixels: int) -> None:
    """Draw the texts of a source's column ``text`` at its columns ``x`` and ``y``; ``colour`` names a column, too."""
    looks = {"text_font_size": f"{size_pixels}px", "text_align": "center", "text_baseline": "middle"}
    made.text(x="x", y="y", text="text", text_color=colour, source=source, **looks)


def hover(drawn: object, rows: dict[str, str], **options: object) -> HoverTool:
    """Return a tooltip for drawn elements; ``rows`` maps each row's name to its value in Bokeh's notation."""
    return HoverTool(renderers=drawn if isinstance(drawn, list) else [drawn], tooltips=_tooltip(rows), **options)


def _tooltip(rows: dict[str, str]) -> str:
    cells = "".join(
        f'<div style="color:{GREY}">{name}</div><div style="color:{INK}">{value}</div>' for name, value in rows.items()
    )
    return (
        f'<div style="display:grid;grid-template-columns:auto auto;gap:2px 10px;max-width:420px;'
        f'font:12px {_FONT.replace(chr(39), "")}">{cells}</div>'
    )


_ASSETS = Path(__file__).parent / "assets"


def document(template: str, program: str | None, known: str, figures: Mapping[str, Model], **values: object) -> str:
    """Return the text of an HTML page.

    Args:
        template: Name of the page's template, which refers to the figures as ``figures``.
        program: Name of the page's JavaScript file; None if it needs none.
        known: JSON data that the page's JavaScript reads.
        figures: The page's figures by name.
        values: Further values for the template.
    """
    whole = Document()
    # Else Bokeh looks through all figures anew for each that is added.
    with whole.models.freeze():
        for each in figures.values():
            whole.add_root(each)
    script, divisions = components(dict(figures), theme=THEME)
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined)
    return environment.get_template(template).render(
        figures={name: Markup(division) for name, division in divisions.items()},
        version=version("ropebridge"),
        style=Markup((_ASSETS / "page.css").read_text()),
        program=Markup("" if program is None else (_ASSETS / program).read_text()),
        library=Markup(Resources(mode="inline", components=["bokeh"]).render()),
        # Escaped, since "</script>" inside the data would end the script element.
        known=Markup(known.replace("<", "\\u003c")),
        script=Markup(script),
        **values,
    )
