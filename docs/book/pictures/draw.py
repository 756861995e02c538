#!/usr/bin/env python3
"""Draws the book's pictures: docs/book/pictures/draw.py writes NAME.svg beside itself, --check compares."""

import sys
from pathlib import Path

from chapters import CHAPTERS
from topics import TOPICS


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit("usage: draw.py [--check]")
    stale = []
    for name, draw in {**CHAPTERS, **TOPICS}.items():
        file = Path(__file__).with_name(f"{name}.svg")
        text = draw().svg()
        if check and (not file.exists() or file.read_text() != text):
            stale.append(file.name)
        elif not check:
            file.write_text(text)
    if stale:
        sys.exit(f"not as docs/book/pictures/draw.py draws them: {', '.join(stale)}")


main()
