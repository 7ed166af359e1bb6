"""A real browser, Debian's Chromium without a window; what it shows is kept as pictures."""

from __future__ import annotations

import base64
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from board.conftest import board  # noqa: F401  (fixtures)

if TYPE_CHECKING:  # it is installed where these tests are run, and need not be where they are not
    from selenium import webdriver
    from selenium.webdriver.remote.webelement import WebElement

TAB, DOWN, ENTER = "\ue004", "\ue015", "\ue007"
CSS, XPATH = "css selector", "xpath"

# The ratio of each text to what lies behind it, where it is too low to be read by all.
FAINT = """
const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => {
  const f = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !node.getClientRects().length) continue;
  if (node.closest(".skip, option")) continue;
  const style = getComputedStyle(node);
  const ink = parse(node.ownerSVGElement ? style.fill : style.color);
  let ground = node;
  while (ground && (parse(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0)
    ground = ground.parentElement;
  const paper = ground ? parse(getComputedStyle(ground).backgroundColor) : [255, 255, 255];
  const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${node.tagName} ${node.className} ${node.textContent.trim().slice(0, 40)}`);
}
return found;
"""  # noqa: E501


class Browser:
    """What a person sees and does."""

    def __init__(self, driver: webdriver.Chrome, pictures: Path) -> None:
        self.driver, self.pictures = driver, pictures
        self.address = ""
        self.looks(dark=False, wide=1280)

    def looks(self, *, dark: bool, wide: int) -> None:
        """Choose the colours that the person prefers, and how wide the window is."""
        chosen = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": chosen})
        size = {"width": wide, "height": 900, "deviceScaleFactor": 1, "mobile": wide < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def go(self, path: str) -> None:
        self.driver.get(self.address.rstrip("/") + path)

    @property
    def text(self) -> str:
        found: str = self.driver.find_element(CSS, "body").text
        return found

    def shows(self, words: str) -> bool:
        """Whether the page says so, once a click has led to it."""
        from selenium.common.exceptions import StaleElementReferenceException

        ends_at = time.monotonic() + 10
        while time.monotonic() < ends_at:
            with suppress(StaleElementReferenceException):  # of the page that was left
                if words in self.text:
                    return True
            time.sleep(0.02)
        return False

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(CSS, css)

    def click(self, text: str) -> None:
        """Press the button, follow the link or tick the box that says so."""
        path = f"//*[self::button or self::a or self::label][contains(normalize-space(), '{text}')]"
        self.driver.find_element(XPATH, path).click()

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def tab_to(self, css: str) -> None:
        """Come to an element with the keyboard alone."""
        for _ in range(80):
            self.keys(TAB)
            if self.driver.execute_script(
                "return document.activeElement.matches(arguments[0])", css
            ):
                return
        raise AssertionError(f"{css} is not reached with the keyboard")

    def faint(self) -> list[str]:
        """The texts that are too faint."""
        found: list[str] = self.driver.execute_script(FAINT)
        return found

    def picture(self, name: str) -> None:
        """Keep what is shown, the whole page; and look whether all of it can be read."""
        assert self.faint() == [], name
        wide, room = self.driver.execute_script(
            "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
        )
        assert wide <= room, f"{name}: the page is {wide} wide, the window {room}"
        shot = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"}
        )
        (self.pictures / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[Any]:
        """What the browser's console says: a policy that was broken, a file that is missing."""
        found: list[Any] = self.driver.get_log("browser")
        return found


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for pictures: that of `--pictures`, else one of pytest's own."""
    given = request.config.getoption("--pictures")
    folder = Path(given).absolute() if given else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """The browser of this run."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert program and driver, "apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    profile = tmp_path_factory.mktemp("chromium")
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage",
                     "--hide-scrollbars", f"--user-data-dir={profile}"):  # fmt: skip
        options.add_argument(argument)
    if os.getuid() == 0:
        options.add_argument("--no-sandbox")  # which root may not have
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield started
    finally:
        started.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome, pictures: Path) -> Iterator[Browser]:
    """The browser, as a new visitor, who sees no complaint of it."""
    chromium.delete_all_cookies()
    chromium.get_log("browser")
    visitor = Browser(chromium, pictures)
    yield visitor
    assert visitor.complaints() == []

