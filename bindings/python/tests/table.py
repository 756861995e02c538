"""The table of docs/pytorch.md: how every check ends over tinynccl and over torch's own backend, on two ranks.

Each check runs in processes of its own: a backend that has failed in one may fail in all that follow.
"""

import os
import tempfile

import torch

import checks
from harness import ranks


def end(name, backend):
    """The outcome of one check: passed, or the error of the first rank that failed."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = ranks(2, checks.run_check, name, backend, os.path.join(folder, "store"), 10, join=False)
    for outcome in outcomes:
        if outcome.kind != "returned":
            return (str(outcome.value).strip().splitlines() or [outcome.kind])[-1] if outcome.kind == "raised" else outcome.kind
    return outcomes[0].value[name]


def table():
    backends = ["tinynccl", "gloo"] if checks.DEVICE == "cpu" else ["tinynccl", "nccl"]
    checks.load()
    print(f"torch {torch.__version__}, {checks.DEVICE}, 2 ranks\n")
    print("| Calls | Upstream's tests that make them | " + " | ".join(backends) + " |")
    print("|---|---|" + "---|" * len(backends))
    for name, _, upstream, sizes in checks.CHECKS:
        ends = [end(name, backend)[:110].replace("|", "/") if 2 in sizes else "not run" for backend in backends]
        print(f"| {name} | {', '.join(upstream)} | " + " | ".join(ends) + " |", flush=True)


if __name__ == "__main__":
    table()
