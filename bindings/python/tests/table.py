"""The table of docs/pytorch.md: how every check ends over tinynccl and over torch's own backend, on two ranks."""

import os
import tempfile

import torch

import checks
from harness import ranks


def table():
    """How every check ends over both backends; what tinynccl does not do in processes of its own."""
    backends = ["tinynccl", "gloo"] if checks.DEVICE == "cpu" else ["tinynccl", "nccl"]
    checks.load()
    cells = {}
    for backend in backends:
        for name in ["all", *sorted(checks.NOT_OURS)]:
            with tempfile.TemporaryDirectory() as folder:
                outcomes = ranks(2, checks.run_check, name, backend, os.path.join(folder, "store"), 10, join=False)
            for outcome in outcomes:
                if outcome.kind == "returned":
                    for one, result in outcome.value.items():
                        if cells.get((one, backend), "passed") == "passed":
                            cells[one, backend] = result
                elif (name, backend) not in cells:
                    why = outcome.value if outcome.kind == "raised" else outcome.kind
                    cells[name, backend] = str(why).strip().splitlines()[-1]
    print(f"torch {torch.__version__}, {checks.DEVICE}, 2 ranks\n")
    print("| Calls | Upstream's tests that make them | " + " | ".join(backends) + " |")
    print("|---|---|" + "---|" * len(backends))
    for name, _, upstream, _ in checks.CHECKS:
        ends = [cells.get((name, backend), "not run")[:110].replace("|", "/") for backend in backends]
        print(f"| {name} | {', '.join(upstream)} | " + " | ".join(ends) + " |", flush=True)


if __name__ == "__main__":
    table()
