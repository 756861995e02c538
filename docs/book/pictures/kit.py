"""Shapes of the book's drawn pictures: SVG whose colours and type come from docs/book/theme/book.css."""

import math
from html import escape

WIDTH = 720


class Picture:
    """A picture that grows by calls, with a sentence for readers who do not see it."""

    def __init__(self, height, told):
        self.height, self.told, self.parts = height, told, []

    def raw(self, text):
        self.parts.append(text)

    def text(self, x, y, words, kind="", anchor="middle"):
        self.raw(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def rect(self, x, y, w, h, kind, radius=4):
        self.raw(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius}" class="{kind}"/>')

    def box(self, x, y, w, h, words, kind="pale", under=""):
        """A box with a line of words in its middle, and perhaps a smaller one below."""
        self.rect(x, y, w, h, kind)
        on = " on" if kind.startswith("full") else ""
        middle = y + h / 2 + 5 - (9 if under else 0)
        self.text(x + w / 2, middle, words, "b" + on)
        if under:
            self.text(x + w / 2, middle + 19, under, "s" + on)

    def frame(self, x, y, w, h, words=""):
        """A frame around other shapes, with its name at the top."""
        self.rect(x, y, w, h, "frame", 8)
        if words:
            self.text(x + w / 2, y + 22, words, "b")

    def cell(self, x, y, w, h, words, rank, pale=False):
        """A part of a buffer in the colour of a rank."""
        self.rect(x, y, w, h, f"{'pale' if pale else 'full'} r{rank % 4}", 2)
        if words:
            self.text(x + w / 2, y + h / 2 + 5, words, "s" if pale else "s on")

    def line(self, points, kind="line"):
        self.raw(f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in points)}" class="{kind}"/>')

    def arrow(self, *points, kind="line", words="", above=True):
        """A line along the points that ends in a head, with words at its middle."""
        (x0, y0), (x1, y1) = points[-2], points[-1]
        turn = math.atan2(y1 - y0, x1 - x0)
        back = [(x1 - 9 * math.cos(turn + a), y1 - 9 * math.sin(turn + a)) for a in (0.42, -0.42)]
        tip = (x1 - 7 * math.cos(turn), y1 - 7 * math.sin(turn))
        self.line([*points[:-1], tip], kind)
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x1, y1), *back])
        self.raw(f'<polygon points="{corners}" class="head {kind}"/>')
        if words:
            (ax, ay), (bx, by) = points[0], points[-1]
            self.text((ax + bx) / 2, (ay + by) / 2 + (-8 if above else 18), words, "s")

    def dot(self, x, y, radius, kind):
        self.raw(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{kind}"/>')

    def svg(self):
        body = "\n".join(self.parts)
        told = escape(self.told, quote=True)
        return f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{told}">\n{body}\n</svg>\n'


class Axes:
    """Two logarithmic axes over a frame of the picture."""

    def __init__(self, picture, frame, xs, ys):
        self.picture, self.frame, self.xs, self.ys = picture, frame, xs, ys
        x, y, w, h = frame
        picture.line([(x, y), (x, y + h), (x + w, y + h)])

    def at(self, x, y):
        left, top, w, h = self.frame
        share = lambda value, ends: math.log(value / ends[0]) / math.log(ends[1] / ends[0])
        return left + w * share(x, self.xs), top + h * (1 - share(y, self.ys))

    def ticks(self, along_x, along_y):
        left, top, w, h = self.frame
        for value, words in along_x:
            x, _ = self.at(value, self.ys[0])
            self.picture.line([(x, top + h), (x, top + h + 5)])
            self.picture.text(x, top + h + 21, words, "s")
        for value, words in along_y:
            _, y = self.at(self.xs[0], value)
            self.picture.line([(left, y), (left + w, y)], "grid")
            self.picture.text(left - 8, y + 5, words, "s", "end")

    def curve(self, points, kind):
        self.picture.line([self.at(x, y) for x, y in points], kind)
