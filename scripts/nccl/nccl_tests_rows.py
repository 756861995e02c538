"""What a program of nccl-tests printed, as rows of OUT/runs.csv and OUT/times.csv, and tables of them.

    nccl_tests_rows.py LOG OUT LIBRARY PROGRAM CASE MODE STATUS SECONDS    one run: a line, rows, exit status 1 if it failed
    nccl_tests_rows.py table OUT                                          tables of all runs
    nccl_tests_rows.py medians OUT FIRST SECOND                           times of two libraries, medians over the cases
"""

import collections
import csv
import re
import statistics
import sys


# Size, count, type, operator (hypercube prints none), root, and twice time, two bandwidths and the number of wrong values.
HALF = r"\s+([0-9.e+]+)\s+\S+\s+\S+\s+(\S+)"
LINE = re.compile(r"\s*(\d+)\s+\d+\s+(\w+)\s+(?:([a-z]+)\s+)?(-?\d+)" + HALF + HALF + r"\s*$")


def rows(text):
    """(bytes, type, op, root, out-of-place us, in-place us, wrong values) of each size. N/A: the program does not check that half."""
    found = []
    for line in text.splitlines():
        match = LINE.match(line)
        if match:
            size, type_, op, root, out_us, out_wrong, in_us, in_wrong = match.groups()
            wrong = sum(float(w) for w in (out_wrong, in_wrong) if w != "N/A")
            found.append((int(size), type_, op or "none", root, float(out_us), float(in_us), int(wrong)))
    return found


def why(text, status):
    if status in ("124", "137"):
        return "no end within its limit"
    # nccl-tests says "Test NCCL failure"; a library says WARN.
    said = [line for line in text.splitlines() if "failure" in line or "WARN" in line or "error" in line.lower()]
    return f"exit status {status}: {(said or text.splitlines() or ['no output'])[-1].strip()[:200]}"


def one(log, out, library, program, case, mode, status, seconds):
    with open(log, errors="replace") as file:
        text = file.read()
    found = rows(text)
    wrong = sum(row[-1] for row in found)
    with open(f"{out}/runs.csv", "a", newline="") as file:
        csv.writer(file).writerow([library, program, case, mode, status, seconds, len(found), wrong])
    with open(f"{out}/times.csv", "a", newline="") as file:
        csv.writer(file).writerows([library, program, case, mode, *row] for row in found)
    name = f"{library} {program} {case} {mode}"
    if status != "0":
        print(f"FAILED {name}: {why(text, status)}", flush=True)
    elif wrong:
        print(f"FAILED {name}: {wrong} wrong values", flush=True)
    elif not found:
        print(f"FAILED {name}: it printed no size", flush=True)
    else:
        print(f"ok {name}: {len(found)} rows, 0 wrong, {seconds} s", flush=True)
        return 0
    return 1


def table(out):
    with open(f"{out}/runs.csv") as file:
        runs = list(csv.DictReader(file))
    with open(f"{out}/times.csv") as file:
        times = list(csv.DictReader(file))
    libraries = list(dict.fromkeys(run["library"] for run in runs))
    print("\n| Program | Case | " + " | ".join(f"{library}: wrong of rows" for library in libraries) + " |")
    print("|---|---|" + "---|" * len(libraries))
    cells = collections.defaultdict(dict)
    for run in runs:
        cell = f"{run['wrong']} of {run['rows']}" if run["status"] == "0" else f"exit status {run['status']}"
        cells[run["program"], f"{run['case']}, {run['mode']}"][run["library"]] = cell
    for (program, case), by_library in cells.items():
        print(f"| {program} | {case} | " + " | ".join(by_library.get(library, "") for library in libraries) + " |")

    by_size = collections.defaultdict(dict)
    for row in times:
        if row["type"] in ("float", "int8") and row["op"] in ("sum", "none"):
            key = row["program"], row["case"], row["mode"], int(row["bytes"])
            by_size[key][row["library"]] = float(row["out_us"])
    speed = {key: found for key, found in by_size.items() if key[1] in ("plain", "plain_graph", "window", "window_graphs", "one_process")}
    if speed:
        print("\nout of place, us\n| Program | Case | Bytes | " + " | ".join(libraries) + " | last over first |")
        print("|---|---|---|" + "---|" * (len(libraries) + 1))
        for (program, case, mode, size), found in speed.items():
            first, last = found.get(libraries[0]), found.get(libraries[-1])
            ratio = f"{last / first:.2f}" if first and last else ""
            print(f"| {program} | {case}, {mode} | {size} | " + " | ".join(f"{found[l]:.2f}" if l in found else "" for l in libraries) + f" | {ratio} |")


def medians(out, first, second):
    """Medians of the out-of-place times over all cases of a size, and their ratio."""
    times = collections.defaultdict(lambda: collections.defaultdict(list))
    with open(f"{out}/times.csv") as file:
        for row in csv.DictReader(file):
            times[row["program"], int(row["bytes"])][row["library"]].append(float(row["out_us"]))
    print(f"| Program | Bytes | {first}, us | {second}, us | {first} / {second} |\n|---|--:|--:|--:|--:|")
    for (program, size), found in times.items():
        if size and found[first] and found[second]:
            a, b = statistics.median(found[first]), statistics.median(found[second])
            print(f"| {program} | {size} | {a:.1f} | {b:.1f} | {a / b:.2f} |")


if __name__ == "__main__":
    if len(sys.argv) == 9:
        sys.exit(one(*sys.argv[1:]))
    elif len(sys.argv) == 3 and sys.argv[1] == "table":
        table(sys.argv[2])
    elif len(sys.argv) == 5 and sys.argv[1] == "medians":
        medians(*sys.argv[2:])
    else:
        sys.exit(__doc__)
