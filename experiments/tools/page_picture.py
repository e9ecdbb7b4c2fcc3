"""Takes pictures of pages for the documentation: ``python -m experiments.tools.page_picture PAGE PNG [HEIGHT]``."""

import io
import sys
from pathlib import Path

from PIL import Image

from experiments.benches.report import browser, open_page
from traces.common.atomic import write_bytes_atomically

_WIDTH_PIXELS = 1400
_HEIGHT_PIXELS = 1500

# Number of colours in the picture; with so few, enough for a page, the file is a third as large.
_COLOURS = 256


def take_picture(page: Path, picture: Path, height_pixels: int) -> None:
    """Write the top of an HTML page that ``ropebridge report`` wrote into a PNG file, ``height_pixels`` tall.

    Raises:
        InputError: There is no browser, or the picture cannot be written.
    """
    # The window is taller than the picture, since even a headless browser counts a window frame.
    with browser(_WIDTH_PIXELS, height_pixels + 200) as driver:
        open_page(driver, page)
        shot = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    data = io.BytesIO()
    top = shot.crop((0, 0, shot.width, height_pixels))
    top.quantize(_COLOURS, dither=Image.Dither.NONE).save(data, "png", optimize=True)
    write_bytes_atomically(picture, data.getvalue())


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else _HEIGHT_PIXELS)
