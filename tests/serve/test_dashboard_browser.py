"""The live page in headless Chromium, over workers without a model that are processes."""

import os

import psutil
import pytest
from selenium.webdriver.common.keys import Keys
from support.browser import WHY_NOT, browser
from support.live_page import LivePage, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
SIZES = {"phone": (360, 780), "desk": (1280, 900)}
NAMES = ["prefill-0", "decode-0", "decode-1"]
WAIT_S = 20.0


@pytest.fixture(scope="module")
def page():
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    with LivePage(1, 2, kv_bytes=4 << 20) as found:
        yield found
        until(lambda: found.watch.num_watchers == 0, "streams end with their browsers")
    until(lambda: {one.pid for one in psutil.Process().children(recursive=True)} <= before, "ends")


@pytest.fixture(scope="module", params=["light", "dark"])
def is_dark(request):
    return request.param == "dark"


@pytest.fixture(scope="module", params=SIZES, ids=str)
def screen(request, is_dark):
    with browser(*SIZES[request.param], is_dark=is_dark) as found:
        yield found


@pytest.fixture
def seen(page, screen):
    """A browser that shows all workers, and has nothing to complain of."""
    opened(screen, page)
    yield screen
    assert screen.problems() == []


@pytest.fixture
def desk(page):
    with browser(*SIZES["desk"]) as found:
        opened(found, page)
        yield found


def opened(found, page):
    found.get(page.url)
    wait(lambda: len(found.all("canvas.map")) == len(NAMES), "a picture of each worker")


def wait(condition, what):
    return until(condition, what, WAIT_S)


def card(number):
    """A worker's card: prefill first, then by name."""
    return f".worker:nth-child({number + 1})"


def committed(found, number):
    return int(found.run("document.querySelector(arguments[0]).dataset.committed", group(number)))


def group(number):
    return f"{card(number)} .group"


def test_it_shows_every_worker_at_any_width_and_in_either_mode(seen, is_dark):
    assert [one.text for one in seen.all(".worker h3")] == NAMES
    assert seen.run("document.body.dataset.stream") == "live"
    assert seen.text("#stream") == "Live"
    assert seen.text("#summary").startswith("1 prefill · 2 decode · ")
    assert [one.text.split("\n")[0] for one in seen.all("#lanes tbody td:first-child")]
    inner, content = seen.run("[innerWidth, document.documentElement.scrollWidth]")
    assert content <= inner, "nothing to scroll sideways"
    beyond = seen.execute_script(
        "return [...document.querySelectorAll('main *')].filter((one) => "
        "one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)"
    )
    assert beyond == []
    assert (
        brightness(seen, "document.body", "backgroundColor") < 60
        if is_dark
        else (brightness(seen, "document.body", "backgroundColor") > 200)
    )
    for number in range(len(NAMES)):
        assert seen.pixels(f"{card(number)} canvas.addresses", "--registered") > 0
        assert seen.pixels(f"{card(number)} canvas.map", "--free") > 0


def brightness(found, where, name):
    text = found.run(f"getComputedStyle({where})[arguments[0]]", name)
    return sum(int(float(one)) for one in text.strip("rgba()").split(",")[:3]) / 3


CONTRAST = """
  const light = (text) => {
    const parts = text.match(/[0-9.]+/g).slice(0, 3).map((one) => one / 255);
    const [r, g, b] = parts.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const own = getComputedStyle(node).backgroundColor;
    return own !== "rgba(0, 0, 0, 0)" ? own : ground(node.parentElement);
  };
  const texts = [...document.querySelectorAll("h1,h2,h3,p,dt,dd,th,td,li,label,.chart text")];
  return texts.filter((one) => one.textContent.trim() && one.getClientRects().length)
    .map((one) => {
      const style = getComputedStyle(one);
      const own = light(one.closest("svg") ? style.fill : style.color);
      const pair = [own, light(ground(one))].sort((a, b) => b - a);
      return [(pair[0] + 0.05) / (pair[1] + 0.05), one.textContent];
    }).filter(([ratio]) => ratio < 4.5);
"""


def test_all_text_can_be_read(seen):
    assert seen.execute_script(CONTRAST) == []


def test_every_picture_says_in_words_what_it_shows(seen):
    for one in seen.all("canvas"):
        assert " of 512 · 16 tokens" in one.get_attribute("aria-label")
        assert "free" in one.get_attribute("aria-label")


@pytest.mark.parametrize("size", SIZES)
def test_the_picture_grows_with_the_cache_and_shows_who_uses_it(page, size):
    decode = 1 if size == "phone" else 2
    maps = f"{card(decode)} canvas.map"
    with browser(*SIZES[size]) as found:
        opened(found, page)
        before = committed(found, decode)
        free, ribbon = found.pixels(maps, "--free"), f"{card(decode)} canvas.addresses"
        registered = found.pixels(ribbon, "--registered")
        page.ask(700, 900, decode - 1)
        wait(lambda: committed(found, decode) > before, "growth in the picture")
        wait(lambda: found.pixels(maps, "--used") > 0, "blocks in use in the picture")
        wait(lambda: found.pixels(ribbon, "--used") > 0, "addresses in use in the picture")
        wait(lambda: found.all(".bar.moving") or found.all(".bar.failed"), "a transfer")
        wait(lambda: found.all("#requests .bar.decode"), "a request that decodes")
        page.finish()
        wait(lambda: found.pixels(maps, "--used") == 0, "nothing in use any more")
        assert found.pixels(maps, "--free") > free
        assert found.pixels(ribbon, "--registered") > registered
        assert not found.all(".bar.failed")
        assert found.run("document.documentElement.scrollWidth <= innerWidth")
        assert found.problems() == []


def test_details_by_pointer_and_by_keyboard(page, desk):
    page.ask(60, 5)
    page.finish()
    wait(lambda: desk.all(".bar.moving") and desk.all("#requests .row"), "a request and its KV")
    desk.find_element("css selector", f"{card(1)} canvas.map").send_keys(Keys.ARROW_RIGHT)
    desk.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    told = desk.text(f"{card(1)} .detail")
    assert told.startswith(("Block 1: free", "Block 1: kept")), told  # as prompts before left it
    desk.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    assert desk.text(f"{card(1)} .detail").startswith("Block 0: the null block")
    point(desk, f"{card(1)} canvas.addresses", 0.5, 3)
    told = desk.text(f"{card(1)} .detail")
    assert told.startswith("0x") and "committed and registered. Block 0" in told
    point(desk, ".bar.moving", 0.5, 3)
    assert desk.text("#transfers-detail").startswith("prefill-0 → decode-")
    row = desk.all("#requests .row")[0]
    desk.execute_script("arguments[0].focus()", row)
    told = desk.text("#requests-detail")
    assert "length after" in told and "first token after" in told and "decode" in told


def point(found, css, x, y):
    """As a pointer at a place of an element does."""
    found.execute_script(
        "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
        "for (const name of ['pointerover', 'pointermove']) document.querySelector(arguments[0])"
        ".dispatchEvent(new PointerEvent(name, { bubbles: true, clientX: box.left + arguments[1],"
        " clientY: box.top + arguments[2] }))",
        css, x, y,
    )  # fmt: skip


def test_requests_from_their_arrival(page, desk):
    page.ask(60, 5)
    page.finish()
    wait(lambda: desk.all("#requests .row"), "a request")
    desk.find_element("css selector", "#align input[value=arrival]").click()
    axis = [one.text for one in desk.all("#requests .axis text")]
    assert axis[0] == "0 s" and axis[-1].endswith(" s")
    wait(lambda: desk.all("#requests .bar.decode"), "its bars")


def test_it_says_that_the_router_is_lost_and_finds_it_again(page, desk):
    page.stop()
    wait(lambda: desk.run("document.body.dataset.stream") == "lost", "loss")
    assert "The router has not been heard for" in desk.text("#stream")
    assert len(desk.all("canvas.map")) == len(NAMES), "what was known last stays"
    page.serve()
    wait(lambda: desk.run("document.body.dataset.stream") == "live", "the router again")
    page.ask(60, 5)
    page.finish()
    wait(lambda: desk.all("#requests .row"), "what came after")


def test_a_worker_that_died_is_shown_to_be_away(page, desk):
    """The last one: it ends a worker."""
    os.kill(page.workers["decode-1"].process.pid, 9)
    wait(lambda: len(desk.all(".worker.away")) == 1, "a worker that is not there")
    assert "does not reach it" in desk.text(f"{card(2)} .note")
    assert not desk.all(f"{card(2)} .account:not([hidden])")
    assert desk.text("#summary").startswith("1 prefill · 1 decode")
    assert desk.problems() == []
