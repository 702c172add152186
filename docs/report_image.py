"""Take the README's picture: the top of a study's report, as a browser shows it.

.venv/bin/python docs/report_image.py REPORT.html     # writes docs/images/report.png
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGE = Path(__file__).with_name("images") / "report.png"


def main(report: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 2250})
        page.goto(Path(report).resolve().as_uri())
        page.screenshot(path=IMAGE)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
