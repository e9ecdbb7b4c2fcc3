"""The page of runs in a real browser: what it draws, and what happens when somebody points, drags and clicks."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from experiments.benches.report import browser, complaints, missing, open_page
from experiments.report.data.bars import BACKWARD, BAR_KINDS, COMPUTES, FORWARD
from experiments.report.html.run_page import write_run_page
from planner.events.event import Event, EventKind
from tests.helpers.processes.page_runs import on_devices, simulated, slower

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"there is no {missing()}")

BARS = (EventKind.COMPUTE, EventKind.SEND, EventKind.RECEIVE)

# Where a Gantt's frame is in the window, and the seconds that it shows.
FRAME = """
const plot = Bokeh.documents[0].get_model_by_name(`gantt-${arguments[0]}`);
const view = Bokeh.index.get_one(plot);
const canvas = view.canvas_view.el.getBoundingClientRect(), box = view.frame.bbox;
return {left: canvas.left + box.left, top: canvas.top + box.top, width: box.width, height: box.height,
        start_s: plot.x_range.start, end_s: plot.x_range.end};
"""

# Everything that is written in the page's figures, below all shadow roots.
TOOLTIP = """
const found = [];
(function walk(node) {
  if (node.classList && node.classList.contains("bk-Tooltip") && node.checkVisibility()) found.push(node);
  if (node.shadowRoot) walk(node.shadowRoot);
  for (const child of node.children || []) walk(child);
})(document.documentElement);
const text = (node) => node.shadowRoot ? [...node.shadowRoot.children].map(text).join("\\n")
  : node.tagName === "STYLE" || node.tagName === "LINK" ? "" : node.children.length
  ? [...node.children].map(text).join("\\n") : node.textContent;
return found.map(text).join("\\n");
"""

# Colours along a horizontal line of pixels through a Gantt's frame, as #RRGGBB.
PIXELS = """
const plot = Bokeh.documents[0].get_model_by_name(`gantt-${arguments[0]}`);
const view = Bokeh.index.get_one(plot), box = view.frame.bbox;
const layer = view.canvas_view.primary;
const ratio = layer.pixel_ratio;
const y = Math.round((box.top + arguments[1] * box.height) * ratio);
const data = layer.ctx.getImageData(Math.round(box.left * ratio), y, Math.round(box.width * ratio), 1).data;
const hex = (value) => value.toString(16).padStart(2, "0");
return Array.from({length: data.length / 4}, (_, i) =>
  data[4 * i + 3] === 0 ? "" : `#${hex(data[4 * i])}${hex(data[4 * i + 1])}${hex(data[4 * i + 2])}`.toUpperCase());
"""


@pytest.fixture(scope="module")
def driver() -> Iterator["WebDriver"]:
    with browser(1400, 1000) as started:
        yield started


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "both.html"
    write_run_page([simulated(), slower(simulated())], ["simulated", "paced"], path)
    return path


@pytest.fixture
def page(driver: "WebDriver", page_file: Path) -> "WebDriver":
    complaints(driver)
    open_page(driver, page_file)
    return driver


def ask(page: "WebDriver", script: str, *arguments: object) -> Any:
    return page.execute_script(script, *arguments)


def settled(page: "WebDriver") -> None:
    """Two frames later: what was asked for is drawn."""
    page.execute_async_script(
        "const answer = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(answer, 30)))"
    )


def press(page: "WebDriver", button: str) -> None:
    ask(page, "document.querySelector(`button[data-does=${arguments[0]}]`).click()", button)
    settled(page)


def drawn(page: "WebDriver", run: int) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = ask(
        page,
        "const data = Bokeh.documents[0].get_model_by_name(`drawn-${arguments[0]}`).data;"
        "return Object.fromEntries(Object.entries(data).map(([name, column]) => [name, Array.from(column)]))",
        run,
    )
    return columns


def kinds(page: "WebDriver", run: int) -> list[int]:
    return list(
        ask(
            page,
            "const bars = Bokeh.documents[0].get_model_by_name(`bars-${arguments[0]}`).data;"
            "return Array.from(bars.kind)",
            run,
        )
    )


def window(page: "WebDriver", run: int) -> tuple[float, float]:
    frame = ask(page, FRAME, run)
    return frame["start_s"], frame["end_s"]


def inside(event: Event, start_s: float, end_s: float) -> bool:
    return event.start_s < end_s and event.end_s >= start_s


def test_the_page_opens_without_a_complaint_and_loads_nothing(page: "WebDriver") -> None:
    assert complaints(page) == []
    loaded = ask(page, "return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    names = ask(page, "return [...document.querySelectorAll('section')].map((section) => section.id)")
    assert names == ["runs", "pipeline", "steps", "links", "decisions", "memory", "devices"]
    assert "3.8% shorter" in ask(page, "return document.querySelector('.verdict').textContent")


def test_all_bars_are_in_the_page_and_those_of_the_window_are_drawn(page: "WebDriver") -> None:
    for run, record in enumerate((simulated(), slower(simulated()))):
        assert len(kinds(page, run)) == sum(event.kind in BARS for event in record.events)
        start_s, end_s = window(page, run)
        computes = [each for each in record.events if each.kind is EventKind.COMPUTE and inside(each, start_s, end_s)]
        of_kind = kinds(page, run)
        shown = [bar for bar in drawn(page, run)["bar"] if of_kind[int(bar)] in COMPUTES]
        assert len(shown) == len(computes) > 20


def test_every_bar_of_work_can_be_seen(page: "WebDriver") -> None:
    """Runs of coloured pixels along each device's row are the computes of the step, one by one."""
    press(page, "step")
    start_s, end_s = window(page, 0)
    for row, device in enumerate(("device-0", "device-1")):
        pixels = ask(page, PIXELS, 0, (row + 0.5 + BAR_KINDS[FORWARD].offset - 0.25) / 2)
        names = {BAR_KINDS[FORWARD].colour: "F", BAR_KINDS[BACKWARD].colour: "B"}
        seen = "".join(names.get(colour, ".") for colour in pixels)
        of_device = [
            each
            for each in simulated().events
            if each.kind is EventKind.COMPUTE and each.device == device and inside(each, start_s, end_s)
        ]
        wanted = "".join(event.action for event in sorted(of_device, key=lambda event: event.start_s))
        assert len(wanted) >= 16
        # Neighbours of a kind touch and are one run of pixels.
        assert squeezed(seen.replace(".", "")) == squeezed(wanted)
        busy_s = sum(min(end_s, each.end_s) - max(start_s, each.start_s) for each in of_device)
        assert sum(mark != "." for mark in seen) / len(seen) == pytest.approx(busy_s / (end_s - start_s), abs=0.02)


def squeezed(text: str) -> str:
    return "".join(mark for place, mark in enumerate(text) if place == 0 or mark != text[place - 1])


def test_pointing_at_a_bar_says_exactly_what_it_is(page: "WebDriver") -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    press(page, "step")
    ask(page, "document.getElementById('pipeline').scrollIntoView()")
    settled(page)
    frame = ask(page, FRAME, 0)
    start_s, end_s = frame["start_s"], frame["end_s"]
    event = next(
        each
        for each in simulated().events
        if (each.kind, each.device, each.action, each.microbatch) == (EventKind.COMPUTE, "device-1", "B", 3)
        and start_s < each.start_s < each.end_s < end_s
    )
    middle_s = (event.start_s + event.end_s) / 2
    x = frame["left"] + frame["width"] * (middle_s - start_s) / (end_s - start_s)
    y = frame["top"] + frame["height"] * (1.5 + BAR_KINDS[BACKWARD].offset) / 2
    mouse = ActionBuilder(page)
    mouse.pointer_action.move_to_location(int(x) + 1, int(y) + 1)
    mouse.pointer_action.move_to_location(int(x), int(y))
    mouse.perform()
    settled(page)
    text = ask(page, TOOLTIP)
    assert "backward 1B3: stage 1, microbatch 3" in text
    assert "device-1 (stage 1, region-1)" in text
    assert f"from {event.start_s:.6f} s to {event.end_s:.6f} s" in text
    ActionChains(page).reset_actions()


def test_the_wheel_with_control_zooms_where_the_pointer_is_and_numbers_appear(page: "WebDriver") -> None:
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    press(page, "everything")
    ask(page, "document.getElementById('pipeline').scrollIntoView()")
    frame = ask(page, FRAME, 0)
    before = frame["end_s"] - frame["start_s"]
    x, y = int(frame["left"] + frame["width"] / 2), int(frame["top"] + frame["height"] / 2)
    numbered = "return Bokeh.documents[0].get_model_by_name('numbers-0').data.text.length"
    few = ask(page, numbered)
    for _ in range(8):
        pointed = ScrollOrigin.from_viewport(x, y)
        ActionChains(page).key_down(Keys.CONTROL).scroll_from_origin(pointed, 0, -300).key_up(Keys.CONTROL).perform()
        settled(page)
    start_s, end_s = window(page, 0)
    assert end_s - start_s < before / 8
    middle_s = (frame["start_s"] + frame["end_s"]) / 2
    assert start_s < middle_s < end_s
    assert ask(page, numbered) > few
    assert complaints(page) == []


def test_dragging_moves_all_runs_to_the_same_steps(page: "WebDriver") -> None:
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    ask(page, "document.getElementById('pipeline').scrollIntoView()")
    frame = ask(page, FRAME, 0)
    mouse = ActionBuilder(page)
    y = int(frame["top"] + frame["height"] / 2)
    mouse.pointer_action.move_to_location(int(frame["left"] + 600), y).pointer_down()
    mouse.pointer_action.move_to_location(int(frame["left"] + 500), y).move_to_location(int(frame["left"] + 300), y)
    mouse.pointer_action.pointer_up()
    mouse.perform()
    settled(page)
    (start_s, end_s), (real_start_s, real_end_s) = window(page, 0), window(page, 1)
    width_s = frame["end_s"] - frame["start_s"]
    assert start_s == pytest.approx(frame["start_s"] + 300 / frame["width"] * width_s, rel=0.02)
    assert real_end_s - real_start_s == pytest.approx(end_s - start_s)
    # The other run is 4 % slower in everything.
    assert real_start_s == pytest.approx(1.04 * start_s, rel=1e-6)


def test_clicking_a_decision_shows_its_first_step_and_the_one_before(page: "WebDriver") -> None:
    step = simulated().decisions[0].first_step
    ask(page, "document.querySelector('tr[data-step]').click()")
    settled(page)
    start_s, end_s = window(page, 0)
    computes = [event for event in simulated().events if event.kind is EventKind.COMPUTE]
    first_s = min(event.start_s for event in computes if event.step == step - 1)
    next_s = min(event.start_s for event in computes if event.step == step + 1)
    assert (start_s, end_s) == pytest.approx((first_s, next_s), abs=0.05 * (next_s - first_s))


def test_buttons_go_step_by_step(page: "WebDriver") -> None:
    press(page, "step")
    before, _ = window(page, 0)
    press(page, "later")
    after, _ = window(page, 0)
    press(page, "earlier")
    assert after > before
    assert window(page, 0)[0] == pytest.approx(before)
    wide = window(page, 0)
    press(page, "closer")
    assert (window(page, 0)[1] - window(page, 0)[0]) == pytest.approx((wide[1] - wide[0]) / 2)


def test_forty_devices_and_narrow_windows_are_drawn_without_a_complaint(driver: "WebDriver", tmp_path: Path) -> None:
    write_run_page([on_devices(40)], ["<b>forty</b>"], tmp_path / "page.html")
    driver.set_window_size(700, 900)
    complaints(driver)
    try:
        open_page(driver, tmp_path / "page.html")
        assert complaints(driver) == []
        assert ask(driver, "return document.querySelectorAll('b').length") == 0
        assert ask(driver, "return document.documentElement.scrollWidth <= 700")
    finally:
        driver.set_window_size(1400, 1000)
