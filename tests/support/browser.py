"""Chromium without a window, as somebody's phone or desk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.remote.webelement import WebElement

BINARY, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WHY_NOT = (
    ""
    if BINARY and DRIVER
    else "no chromium or chromedriver: apt-get install " + ("chromium chromium-driver")
)
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")


class Browser(Chrome):
    """One page."""

    def all(self, css: str) -> list[WebElement]:
        return self.find_elements("css selector", css)

    def text(self, css: str) -> str:
        return self.find_element("css selector", css).text

    def run(self, script: str, *arguments: Any) -> Any:
        return self.execute_script(f"return {script}", *arguments)

    def problems(self) -> list[Mapping[str, Any]]:
        """What its console was told since the last call: errors of scripts, of the policy, of files
        that were not there, and warnings."""
        found: list[Mapping[str, Any]] = self.get_log("browser")
        return found

    def pixels(self, css: str, variable: str) -> int:
        """How many pixels of a canvas have the colour of a CSS variable."""
        count = self.execute_script(
            """
            const canvas = document.querySelector(arguments[0]);
            const { width, height } = canvas;
            const copy = Object.assign(document.createElement("canvas"), { width, height });
            const read = copy.getContext("2d", { willReadFrequently: true });
            const style = getComputedStyle(document.documentElement);
            read.fillStyle = style.getPropertyValue(arguments[1]).trim();
            read.fillRect(0, 0, 1, 1);
            const [r, g, b] = read.getImageData(0, 0, 1, 1).data;
            read.clearRect(0, 0, 1, 1);
            read.drawImage(canvas, 0, 0);
            const data = read.getImageData(0, 0, width, height).data;
            let count = 0;
            for (let at = 0; at < data.length; at += 4) {
              count += data[at] === r && data[at + 1] === g && data[at + 2] === b;
            }
            return count;
            """,
            css,
            variable,
        )
        return int(count)


@contextmanager
def browser(width: int, height: int, *, is_dark: bool = False) -> Iterator[Browser]:
    options = ChromeOptions()
    options.binary_location = BINARY or ""
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = Browser(options=options, service=ChromeService(DRIVER))
    try:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        found.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        found.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield found
    finally:
        found.quit()
