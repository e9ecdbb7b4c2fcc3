"""A browser without a window, to look at pages with."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from traces.common.errors import InputError

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
_DRIVER = "chromedriver"

# What a page of ours sets when it has drawn everything; the answer is when that was, in ms since the page was opened.
_WHEN_READY = """
const answer = arguments[0];
(function look() {
  if (document.documentElement.dataset.ready) requestAnimationFrame(() => setTimeout(() => answer(performance.now())));
  else setTimeout(look, 5);
})();
"""
_PATIENCE_S = 60


def missing() -> str:
    """Return what is missing for `browser`, in words; nothing if all is there."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium, pip install 'ropebridge[dev]'"
    if not any(map(shutil.which, _CHROMIUM)):
        return "Chromium (Debian: apt install chromium)"
    return "" if shutil.which(_DRIVER) else "chromedriver (Debian: apt install chromium-driver)"


@contextmanager
def browser(width_pixels: int = 1400, height_pixels: int = 1000) -> Iterator["WebDriver"]:
    """Give a browser with a window of this size, which is closed at the end.

    Raises:
        InputError: Something that it needs is missing.
    """
    lacking = missing()
    if lacking:
        raise InputError(f"a browser cannot be started: there is no {lacking}", valid="install it")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(next(filter(None, map(shutil.which, _CHROMIUM))))
    # Its own sandbox does not work in containers; it opens nothing but our own files.
    arguments = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars")
    for argument in (*arguments, f"--window-size={width_pixels},{height_pixels}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(shutil.which(_DRIVER)))
    try:
        driver.set_script_timeout(_PATIENCE_S)
        yield driver
    finally:
        driver.quit()


def open_page(driver: "WebDriver", page: Path) -> float:
    """Open a page of ours; return how long it took until everything in it was drawn, seconds."""
    driver.get(page.resolve().as_uri())
    return float(driver.execute_async_script(_WHEN_READY)) / 1000


def complaints(driver: "WebDriver") -> list[str]:
    """Return what the page has complained about since this was asked last."""
    entries = driver.get_log("browser")  # type: ignore[no-untyped-call]
    return [str(entry["message"]) for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
