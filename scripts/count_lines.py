#!/usr/bin/env python3
"""Counts the lines of production code of a revision, as SPEC.md's table has them.

    scripts/count_lines.py [REVISION]      default: HEAD

Production code is Rust without blank lines, comments and tests: no files of tests, benches and fuzz targets, and no items
under #[cfg(test)], nor modules that such an item names. The last line has all lines of all text files.
"""
import collections
import re
import subprocess
import sys


def git(*arguments):
    return subprocess.check_output(["git", *arguments], text=True, errors="replace")


def is_test(path):
    parts = path.split("/")
    name = parts[-1]
    return parts[0] == "fuzz" or {"tests", "benches"} & set(parts) or name == "tests.rs" or name.endswith("_tests.rs")


def without_literals(line):
    line = re.sub(r"//.*", "", line)
    return re.sub(r"\"(\\.|[^\"\\])*\"|'(\\.|[^'\\])'", "", line)


def end_of_item(lines, i):
    """The line behind the item that begins at line i: behind its closing brace, or its semicolon."""
    depth, opened = 0, False
    while i < len(lines):
        code = without_literals(lines[i])
        depth += code.count("{") - code.count("}")
        opened |= "{" in code
        i += 1
        if (opened and depth <= 0) or (not opened and code.rstrip().endswith(";")):
            break
    return i


def test_modules(path, text):
    """The files and folders of the modules that only tests build."""
    folder = path.rsplit("/", 1)[0]
    if path.rsplit("/", 1)[-1] not in ("mod.rs", "lib.rs", "main.rs"):
        folder = path.removesuffix(".rs")
    for name in re.findall(r"^#\[cfg\((?:test|a(?:ll|ny)\(test)[^\n]*\n(?:#\[[^\n]*\n)*(?:pub(?:\(crate\))? )?mod (\w+);", text, re.M):
        yield f"{folder}/{name}.rs"
        yield f"{folder}/{name}/"


def code_lines(text):
    if re.search(r"^#!\[cfg\(test\)\]", text, re.M):
        return 0
    lines, i, count = text.split("\n"), 0, 0
    while i < len(lines):
        line = lines[i].strip()
        if line.startswith(("#[cfg(test)]", "#[cfg(all(test")):
            i = end_of_item(lines, i + 1)
            continue
        count += bool(line) and not line.startswith("//")
        i += 1
    return count


def main():
    revision = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    rooms, every = collections.Counter(), 0
    texts = {path: git("show", f"{revision}:{path}") for path in git("ls-tree", "-r", "--name-only", revision).splitlines()}
    tests = tuple(module for path, text in texts.items() if path.endswith(".rs") for module in test_modules(path, text))
    for path, text in texts.items():
        every += text.count("\n")
        if path.endswith(".rs") and not is_test(path) and not path.startswith(tests):
            rooms["/".join(path.split("/")[:2])] += code_lines(text)
    for room, lines in rooms.most_common():
        print(f"{lines:7} {room}")
    print(f"{sum(rooms.values()):7} lines of production code, {every} lines in all")


if __name__ == "__main__":
    main()
