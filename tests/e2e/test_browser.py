"""What a person sees, in a real browser: the report, the API's page, and MLflow's comparison."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from service.client import Client
from tests.e2e.test_study import finish, submit

expect.set_options(timeout=30_000)  # a busy machine is not a fault
CHROMIUM = Path("/usr/bin/chromium")
if not CHROMIUM.exists() and not os.environ.get("CI"):
    pytest.skip("needs Debian's chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)


@pytest.fixture(scope="module")
def study(client: Client) -> Any:
    ended = finish(client, submit(client, name="seen", description="<b>bold</b> & plain", seeds=3))
    assert ended["state"] == "COMPLETED"
    return client.get(ended["id"])


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    yield opened
    opened.close()


@pytest.mark.parametrize("width", [1200, 400])
def test_report_stands_alone_and_fits(browser: Browser, client: Client, study: Any, tmp_path: Path, width: int):
    file = tmp_path / "report.html"
    file.write_bytes(client.report(study["id"]))
    page = browser.new_page(viewport={"width": width, "height": 900})
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(file.as_uri())
    assert requested == [file.as_uri()]
    expect(page.get_by_role("heading", name="seen")).to_be_visible()
    expect(page.get_by_text("<b>bold</b> & plain", exact=True)).to_be_visible()
    expect(page.get_by_role("heading", name="Exclusions")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg").count() >= 3
    page.close()


def test_api_page_needs_no_internet(page: Page, urls: dict[str, str]):
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(f"{urls['api']}/docs")
    expect(page.get_by_text("/v1/studies", exact=True).first).to_be_visible()
    assert {url for url in requested if not url.startswith((urls["api"], "data:"))} == set()


def test_mlflow_compares_selected_trials_without_further_work(page: Page, client: Client, study: Any):
    deadline = time.monotonic() + 60
    while client.get(study["id"])["tracking"] != "current":
        assert time.monotonic() < deadline
        page.wait_for_timeout(200)
    page.goto(client.get(study["id"])["links"]["mlflow_experiment"] or "")
    boxes = page.locator(".ag-row .ag-checkbox-input")
    expect(boxes).to_have_count(1 + study["plan"]["trials"])
    for column in ("metrics.`validation_accuracy`", "params.`batch_size`"):  # the table is ready to be read
        expect(page.locator(f".ag-header-cell[col-id='{column}']").first).to_be_visible()
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("button", name="Compare").first.click()
    expect(page.get_by_text("Comparing 2 Runs from 1 Experiment")).to_be_visible()
    compared = page.inner_text("body")
    for word in ("normaliser", "batch_size", "learning_rate", "seed", "test_accuracy", "normstudy.state"):
        assert word in compared
    assert len(re.findall(r"(none|norm_like) B(64|128) lr0\.[13] seed[012]", compared)) == 2
