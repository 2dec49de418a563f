"""Each state of a cache's memory and blocks has a mark of its own on the live page, in light and in
dark mode, and a word for it: in headless Chromium."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.browser import WHY_NOT, Browser, browser
from support.live_page import LivePage, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
LEGEND = {
    "reserved": "reserved",
    "registered": "registered",
    "free": "committed, free",
    "cached": "prefix cache",
    "used": "in use",
    "in-flight": "in flight",
    "quarantined": "quarantined",
}
STATES = {"free": 1, "cached": 2, "used": 3, "quarantined": 4, "in-flight": 5}
"""As kvxfer.cache.block_states numbers them."""
LEAST_RATIO = 1.5
"""Of the luminances of a state's colour and of the lines on it."""
DRAW = """
  const [kind, state, cell, done] = arguments;
  import("/ui/blocks.js").then(({ drawAddresses, drawMap }) => {
    const place = document.createElement("div");
    place.style.width = `${cell * 8}px`;
    document.body.append(place);
    const canvas = place.appendChild(document.createElement("canvas"));
    const blocks = 8;
    const bytes = blocks * 4096;
    const group = {
      kind: "full", layout: "LBHNC", block_size: 16, block_bytes: 8192, offset: 0, num_segments: 2,
      segment_bytes: bytes, segment_block_bytes: 4096, capacity: blocks, committed: blocks,
      usable: blocks, counts: [], blocks_per_cell: 1, cells: [[state, blocks]],
    };
    const cache = { committed: [[0, 2 * bytes]], registered: [[0, bytes]], base_address: 0 };
    if (kind === "map") drawMap(canvas, group, null);
    else drawAddresses(canvas, cache, group);
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const found = [];
    for (let at = 0; at < data.length; at += 4) {
      found.push([data[at], data[at + 1], data[at + 2], data[at + 3]].join());
    }
    place.remove();
    done(found);
  });
"""


@pytest.fixture(scope="module")
def page() -> Iterator[LivePage]:
    with LivePage(1, 1, kv_bytes=4 << 20, options=("--lane", "push")) as found:
        yield found


@pytest.fixture(params=["light", "dark"])
def seen(page: LivePage, request: pytest.FixtureRequest) -> Iterator[Browser]:
    with browser(1280, 900, is_dark=request.param == "dark") as found:
        found.get(page.url)
        until(lambda: len(found.all("canvas.map")) == 2, "a picture of each worker", 20)
        yield found
        assert found.problems() == []


def shape(seen: Browser, kind: str, state: int, cell: int) -> tuple[bool, ...]:
    """Where a drawing of such blocks alone has the colour that most of it has: whatever that is."""
    pixels: list[str] = seen.execute_async_script(DRAW, kind, state, cell)
    most = max(set(pixels), key=pixels.count)
    return tuple(pixel == most for pixel in pixels)


@pytest.mark.parametrize("kind", ["map", "addresses"])
def test_each_state_has_a_mark_that_is_not_its_colour(seen: Browser, kind: str) -> None:
    """Reduced to where a drawing has its main colour no two states that hold KV look the same."""
    shapes = {name: shape(seen, kind, state, 14) for name, state in STATES.items()}
    del shapes["free"]  # solid, as blocks in use: told apart by how light they are
    names = sorted(shapes)
    assert len(set(shapes.values())) == len(names), {name: sum(shapes[name]) for name in names}


def test_free_and_used_differ_by_more_than_hue(seen: Browser) -> None:
    assert contrast(seen, "--free", "--used") > LEAST_RATIO
    assert contrast(seen, "--card", "--in-flight") > LEAST_RATIO
    assert contrast(seen, "--card", "--quarantined") > LEAST_RATIO
    assert contrast(seen, "--card", "--cached") > LEAST_RATIO


def contrast(seen: Browser, first: str, second: str) -> float:
    return float(seen.execute_script(
        """
        const style = getComputedStyle(document.documentElement);
        const light = (name) => {
          const text = style.getPropertyValue(name).trim();
          const parts = [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16) / 255);
          const [r, g, b] =
            parts.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const [a, b] = [light(arguments[0]), light(arguments[1])].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
        """,
        first, second,
    ))  # fmt: skip


def test_the_legend_has_every_state_in_words_with_a_sign_of_its_own(seen: Browser) -> None:
    keys = {
        one.find_element("css selector", ".key").get_attribute("class").split()[1]: one.text
        for one in seen.all("#caches-legend li")
    }
    assert keys == LEGEND
    signs = {
        name: seen.execute_script(
            "const key = document.querySelector(arguments[0]);"
            "const all = [getComputedStyle(key), getComputedStyle(key, '::after')];"
            "return [...all.map((one) => one.backgroundImage.replace(/rgb[^)]*[)]/g, 'c')),"
            "all[0].height].join()",
            f"#caches-legend .key.{name}",
        )
        for name in LEGEND
    }
    plain = {signs.pop("free"), signs.pop("used")}
    assert len(set(signs.values())) == len(signs), signs
    assert not plain & set(signs.values())
    for one in seen.all(".worker"):
        told = [term.text for term in one.find_elements("css selector", ".account dt")]
        assert {"reserved", "committed", "registered", "free", "cached", "in use", "in flight",
                "quarantined"} <= set(told)  # fmt: skip


def test_blocks_in_flight_and_in_quarantine_are_seen_where_they_are(
    page: LivePage, seen: Browser
) -> None:
    """Prefill stops while it is to write to decode's blocks, and is given up: they stay in
    quarantine until it says that it writes no more."""
    decode = ".worker:nth-child(2)"
    maps, addresses = f"{decode} canvas.map", f"{decode} canvas.addresses"
    page.ask(60, 4)
    page.finish()
    until(lambda: seen.pixels(maps, "--in-flight") == 0, "the blocks to have arrived", 20)
    pid = page.workers["prefill-0"].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        page.ask(100, 4)  # for which there are blocks: growth would wait for prefill
        until(lambda: seen.pixels(maps, "--in-flight") > 0, "blocks in flight", 20)
        until(lambda: seen.pixels(addresses, "--in-flight") > 0, "addresses in flight", 20)
        until(lambda: seen.pixels(maps, "--quarantined") > 0, "blocks in quarantine", 30)
        until(lambda: seen.pixels(addresses, "--quarantined") > 0, "addresses in quarantine", 20)
        assert " quarantined" in seen.find_element("css selector", maps).get_attribute("aria-label")
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: seen.pixels(maps, "--quarantined") == 0, "the quarantine's end", 60)
    until(lambda: seen.pixels(maps, "--in-flight") == 0, "nothing in flight", 20)
    until(lambda: all(one.finished for one in page.asked), "the answer, whatever it is")
    page.asked.clear()
