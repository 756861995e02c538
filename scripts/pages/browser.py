"""Drives a headless Chromium through the DevTools protocol, with nothing but Python's standard library.

    with Browser() as browser:
        page = browser.page("file:///tmp/a.html", width=390, height=844)
        page.click("#forward")
        page.key("ArrowLeft")
        assert page.overflow() == 0 and not page.errors
        page.screenshot("a.png")

Commands and answers are JSON texts that end in a zero byte, on descriptors 3 and 4 (--remote-debugging-pipe), so no port is
opened. Every wait has a deadline. CHROMIUM names the program, otherwise chromium, chromium-browser or google-chrome.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
import zlib

DEADLINE = 30.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


class BrowserError(Exception):
    """The browser is not there, does not answer, or says that something is wrong."""


def find():
    """The program, or None."""
    wanted = os.environ.get("CHROMIUM")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self):
        program = find()
        if program is None:
            raise BrowserError("no Chromium here: scripts/setup.sh --chromium")
        self.folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_read, self.to = os.pipe()
        self.back, to_write = os.pipe()
        flags = ["--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
                 f"--user-data-dir={self.folder.name}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium's own sandbox refuses to run as root
        # The shell puts the pipes where the browser looks for them.
        command = ["sh", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}', program, *flags, "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.number = 0
        self.rest = b""
        self.listeners = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.call("Browser.close")
        except (BrowserError, OSError):
            pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.to)
        os.close(self.back)
        self.folder.cleanup()

    def message(self, deadline):
        """The next message from the browser."""
        while b"\0" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.back], [], [], left)[0]:
                raise BrowserError(f"the browser did not answer within {DEADLINE:.0f} s")
            got = os.read(self.back, 1 << 16)
            if not got:
                raise BrowserError(f"the browser ended with status {self.process.wait(5)}")
            self.rest += got
        text, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(text)
        if "method" in message and message.get("sessionId") in self.listeners:
            self.listeners[message["sessionId"]](message)
        return message

    def call(self, method, session=None, **params):
        """Sends a command and gives its result."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        os.write(self.to, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE
        while True:
            message = self.message(deadline)
            if message.get("id") == self.number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error'].get('message')}")
                return message["result"]

    def page(self, url, width=1280, height=800):
        """Opens a page and waits until it is loaded."""
        return Page(self, url, width, height)


class Page:
    def __init__(self, browser, url, width, height):
        self.browser = browser
        self.errors = []
        self.loaded = False
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        browser.listeners[self.session] = self.event
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserError(f"{url}: {answer['errorText']}")
        deadline = time.monotonic() + DEADLINE
        while not self.loaded:
            browser.message(deadline)

    def call(self, method, **params):
        return self.browser.call(method, session=self.session, **params)

    def event(self, message):
        """Keeps what must not happen: exceptions, errors on the console, what could not be loaded."""
        params = message["params"]
        match message["method"]:
            case "Page.loadEventFired":
                self.loaded = True
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Network.loadingFailed":
                self.errors.append(f"could not be loaded: {params['errorText']}")

    def evaluate(self, expression):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    def click(self, selector):
        """A click with the mouse in the middle of an element; fails where something else would get it."""
        where = self.evaluate(
            "(s => { const e = document.querySelector(s); if (!e) return null; e.scrollIntoView({block: 'center'});"
            " const r = e.getBoundingClientRect(), x = r.x + r.width / 2, y = r.y + r.height / 2;"
            f" const hit = document.elementFromPoint(x, y); return [x, y, !!hit && e.contains(hit)]; }})({json.dumps(selector)})")
        if where is None or not where[2]:
            raise BrowserError(f"{selector} cannot be clicked: {where}")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    def key(self, name):
        """Presses a key, such as ArrowLeft."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def overflow(self):
        """CSS pixels by which the page is wider than the window."""
        return self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def screenshot(self, path=None, full=True):
        """PNG of the whole page, or of the window: written to `path`, and given back."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        png = base64.b64decode(answer["data"])
        if path:
            with open(path, "wb") as file:
                file.write(png)
        return png

    def thumbnail(self, selector, width=160):
        """PNG of one element, so many pixels wide."""
        x, y, w, h = self.evaluate(
            f"(r => [r.x + scrollX, r.y + scrollY, r.width, r.height])(document.querySelector({json.dumps(selector)}).getBoundingClientRect())")
        clip = {"x": x, "y": y, "width": w, "height": h, "scale": width / w}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)
        self.browser.listeners.pop(self.session, None)


def colours(png):
    """How many different colours a small picture has (8 bits per channel, not interlaced, as Chromium writes it)."""
    at, data, width, height, channels = 8, b"", 0, 0, 0
    while at < len(png):
        length, kind = int.from_bytes(png[at:at + 4]), png[at + 4:at + 8]
        body = png[at + 8:at + 8 + length]
        if kind == b"IHDR":
            width, height = int.from_bytes(body[0:4]), int.from_bytes(body[4:8])
            channels = {2: 3, 6: 4}[body[9]]
        elif kind == b"IDAT":
            data += body
        at += 12 + length
    raw, stride, seen = zlib.decompress(data), width * channels, set()
    line = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        line = unfilter(raw[start], bytearray(raw[start + 1:start + 1 + stride]), line, channels)
        seen.update(bytes(line[x:x + 3]) for x in range(0, stride, channels))
    return len(seen)


def unfilter(kind, line, above, channels):
    """Undoes a PNG filter (PNG specification, section 9)."""
    if kind == 0:
        return line
    if kind == 2:
        return bytearray((a + b) & 255 for a, b in zip(line, above))
    for x in range(len(line)):
        left = line[x - channels] if x >= channels else 0
        up, corner = above[x], above[x - channels] if x >= channels else 0
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + up) // 2
        else:
            p = left + up - corner
            guess = min((abs(p - left), 0, left), (abs(p - up), 1, up), (abs(p - corner), 2, corner))[2]
        line[x] = (line[x] + guess) & 255
    return line
