# SPDX-License-Identifier: Apache-2.0
"""The documentation site is built without a warning, and its search works in a browser."""

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import chromium
from playwright.sync_api import expect, sync_playwright
from scripts import DOCS

pytestmark = pytest.mark.timeout(300)


class Quiet(SimpleHTTPRequestHandler):
    """A file server that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    command += ["--config-file", str(DOCS / "mkdocs.yml")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_site_holds_every_page_of_the_documentation(site: Path) -> None:
    pages = [page.stem for page in DOCS.glob("*.md")]
    assert len(pages) > 10
    for page in pages:
        assert (site / "docs" / page / "index.html").is_file(), page
    assert (site / "DESIGN" / "index.html").is_file()


def test_search_finds_a_page_and_nothing_comes_from_another_host(address: str) -> None:
    hosts: set[str] = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        # The search takes no input before its worker and index are there.
        page.goto(address, wait_until="networkidle")
        expect(page.get_by_role("heading", name="sglang-sparse", level=1)).to_be_visible()
        picture = page.locator("img[src$='time-per-token.svg']")
        assert picture.evaluate("image => image.complete && image.naturalWidth > 0")
        # It listens to keys, and `fill` presses none.
        page.get_by_placeholder("Search").first.press_sequentially("custom_params")
        found = page.locator(".md-search-result__link", has_text="Options of one request")
        expect(found.first).to_be_visible(timeout=30_000)
        found.first.click()
        expect(page.get_by_role("heading", name="Options of one request").first).to_be_visible()
        browser.close()
    assert hosts == {address.removeprefix("http://")}
