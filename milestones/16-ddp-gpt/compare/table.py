"""A table of the logs that ddp-gpt and torch_gpt.py printed: NAME.SEED.log.

    python3 compare/table.py LOG...
"""

import pathlib
import re
import statistics
import sys

STEPS = (1000, 2000, 3000)


def read(path):
    text = path.read_text()
    validation = {int(s): float(v) for s, v in re.findall(r"^step +(\d+) +validation loss (\S+)", text, re.M)}
    train = {int(s): float(v) for s, v in re.findall(r"^step +(\d+)/\d+ +loss (\S+)", text, re.M)}
    rate = re.search(r"^(\S+) steps/s, (\S+) ms a step(?:; median of \d+ stretches (\S+))?", text, re.M)
    return (train, validation, rate.groups()) if rate else None


def row(name, seed, train, validation, rate):
    at = lambda losses, step: f"{losses[step]:.4f}" if step in losses else ""
    cells = [name, seed, rate[0], rate[2] or "", *(at(train, s) for s in STEPS), *(at(validation, s) for s in STEPS)]
    best = min(validation, key=validation.get)
    return cells + [f"{validation[best]:.4f} at {best}"]


def line(cells):
    print("| " + " | ".join(cells) + " |")


def main():
    losses = [f"{part} {step}" for part in ("train", "validation") for step in STEPS]
    head = ["run", "seed", "steps/s", "median", *losses, "lowest"]
    line(head)
    line(["---"] * len(head))
    last = {}
    for path in map(pathlib.Path, sorted(sys.argv[1:])):
        name, seed = path.name.split(".")[:2]
        run = read(path)
        if run:
            line(row(name, seed, *run))
            last.setdefault(name, []).append(run)
    for name, runs in last.items():
        if len(runs) > 1:
            means = [
                f"{statistics.mean(losses):.4f}"
                for part in (0, 1)
                for s in STEPS
                for losses in [[r[part][s] for r in runs if s in r[part]]]
                if losses
            ]
            line([name, "mean", f"{statistics.mean(float(r[2][0]) for r in runs):.1f}", "", *means, ""])


main()
