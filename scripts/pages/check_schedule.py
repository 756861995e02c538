"""Checks pages that `tinynccl-cli schedule --format html` made, in a browser, at the width of a desktop and of a phone.

    check_schedule.py PICTURES PAGE...     pictures of each page go into the folder PICTURES

Exit status: 0 all is right, 1 something is wrong, 77 no browser here.
"""

import pathlib
import sys

from browser import Browser, BrowserError, colours, find

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
SHOWN = "[...document.querySelectorAll('.frame')].map((f, i) => getComputedStyle(f).display === 'none' ? -1 : i).filter(i => i >= 0)"
TOTAL = "[...document.querySelectorAll('td[data-link$=all]')].reduce((all, td) => all + Number(td.textContent.replaceAll(',', '')), 0)"


class Wrong(Exception):
    pass


def expect(what, got, expected):
    if got != expected:
        raise Wrong(f"{what}: expected {expected!r}, got {got!r}")


def check(browser, path, name, width, height, pictures):
    total = None
    page = browser.page(path.resolve().as_uri(), width, height)
    try:
        # The bytes that the page was made with, before its script counts.
        rounds = page.evaluate("document.querySelectorAll('.frame').length") - 1
        planned = page.evaluate("sent.flat().reduce((all, [from, to, bytes]) => all + bytes, 0)")
        if rounds < 1 or planned < 1:
            raise Wrong(f"{rounds} rounds and {planned} bytes")
        expect("at the start, frames shown", page.evaluate(SHOWN), [0])
        expect("at the start, bytes sent", page.evaluate(TOTAL), 0)
        overflow = page.overflow()
        if overflow > 0:
            raise Wrong(f"{overflow} px wider than the window")
        before = 0
        for at in range(1, rounds + 1):
            page.click("#forward") if at % 2 else page.key("ArrowRight")
            expect(f"after {at} steps, frames shown", page.evaluate(SHOWN), [at])
            total = page.evaluate(TOTAL)
            if total < before:
                raise Wrong(f"bytes sent fell from {before} to {total} in round {at}")
            before = total
            if page.overflow() > 0:
                raise Wrong(f"{page.overflow()} px wider than the window in round {at}")
            if at == (rounds + 1) // 2:
                page.screenshot(pictures / f"{path.stem}-{name}.png")
                if (seen := colours(page.thumbnail("svg"))) < 8:
                    raise Wrong(f"the picture has {seen} colours: nothing was drawn")
        expect("at the end, bytes sent", total, planned)
        expect("the button Forward at the end is disabled", page.evaluate("document.querySelector('#forward').disabled"), True)
        page.key("ArrowLeft")
        expect("after a step back, frames shown", page.evaluate(SHOWN), [rounds - 1])
        page.click("#back")
        expect("after Back, frames shown", page.evaluate(SHOWN), [max(rounds - 2, 0)])
        page.key("End")
        expect("after End, frames shown", page.evaluate(SHOWN), [rounds])
        page.key("Home")
        expect("after Home, frames shown", page.evaluate(SHOWN), [0])
        page.click("#play")
        expect("while it plays, the button says", page.evaluate("document.querySelector('#play').textContent"), "Stop")
        page.click("#play")
        expect("when it has stopped, the button says", page.evaluate("document.querySelector('#play').textContent"), "Play")
        if page.errors:
            raise Wrong("errors on the console: " + "; ".join(page.errors))
        return rounds
    finally:
        page.close()


def main():
    if find() is None:
        print("pages: no Chromium here: scripts/setup.sh --chromium", file=sys.stderr)
        return 77
    pictures = pathlib.Path(sys.argv[1])
    pictures.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with Browser() as browser:
        for path in map(pathlib.Path, sys.argv[2:]):
            for name, (width, height) in SIZES.items():
                try:
                    rounds = check(browser, path, name, width, height, pictures)
                    print(f"ok      {path.name} {name}: {rounds} rounds")
                except (Wrong, BrowserError) as error:
                    wrong += 1
                    print(f"FAILED  {path.name} {name}: {error}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
