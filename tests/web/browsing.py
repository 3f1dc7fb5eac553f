"""The explorer in a real browser: a server on a free port, and a page that must not complain."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

READY = "#view[aria-busy=false] *"

# What can be used or seen and has no name; text whose contrast with its ground is below 4.5 : 1.
NAMELESS = """() => [...document.querySelectorAll("button, input, select, canvas[role], img, [role=tabpanel]")]
  .filter((one) => one.offsetParent !== null)
  .filter((one) => !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") || one.innerText?.trim() ||
    one.labels?.[0]?.innerText.trim() || one.hasAttribute("alt")))
  .map((one) => one.outerHTML.slice(0, 100))"""

PALE = """() => {
  const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (one) => { for (; one; one = one.parentElement) { const colour = getComputedStyle(one).backgroundColor;
    if (!/, 0\\)|transparent/.test(colour)) return colour; } return "rgb(255, 255, 255)"; };
  return [...document.querySelectorAll("body *")].filter((one) => one.offsetParent !== null && !one.disabled &&
      [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()))
    .map((one) => { const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.textContent.slice(0, 30)]; })
    .filter(([ratio]) => ratio < 4.5);
}"""


@contextlib.contextmanager
def serving(app):
    """The address at which an application is served."""
    import uvicorn

    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{door.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(10)


@contextlib.contextmanager
def watched_page(browser, address):
    """The page at desktop width; it must neither complain in the console nor ask another server."""
    context = browser.new_context(viewport={"width": 1300, "height": 900}, accept_downloads=True)
    page = context.new_page()
    complaints, strangers, home = [], [], address.partition("#")[0]
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda asked: strangers.append(asked.url) if home not in asked.url else None)
    page.complaints = complaints
    page.goto(address)
    page.wait_for_selector(READY)
    yield page
    context.close()
    assert [url for url in strangers if not url.startswith(("data:", "blob:", "about:"))] == []
    assert page.complaints == []


@contextlib.contextmanager
def visitor(browser, **options):
    """`visit(address, width)`: the page at some width, again and again with one memory, as a visitor comes back."""
    context = browser.new_context(**options)
    page = context.new_page()

    def visit(address, width=1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("about:blank")
        page.goto(address)
        page.wait_for_selector(READY)
        page.wait_for_selector(".chart:not([data-drawn])", state="detached")
        return page

    yield visit
    context.close()


def settle(page):
    page.wait_for_selector(READY)


def open_view(page, name):
    page.get_by_role("tab", name=name).click()
    settle(page)


def pixels_of(page, canvas="#view canvas"):
    return page.locator(canvas).first.evaluate("canvas => canvas.toDataURL()")
