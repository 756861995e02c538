"""Programs over the backend "tinynccl", each rank a process that ends as a script does; arguments choose among them.

    test_programs.py [NAME...]           each as expected, or what was not
    test_programs.py --judge [NAME...]   over gloo, too: a table of both; fails where gloo is right and we are not
"""

import sys

try:
    import torch

    import program_exits  # noqa: F401
    import program_rows  # noqa: F401
    from programs import PROGRAMS, judge, run
except ImportError:
    torch = None


def main(arguments):
    judges = "--judge" in arguments
    names = [name for name in arguments if name != "--judge"] or list(PROGRAMS)
    failed = 0
    if judges:
        print("| Program | tinynccl | gloo |\n|---|---|---|", flush=True)
    for name in names:
        one, cells = PROGRAMS[name], []
        for backend in ("tinynccl", "gloo") if judges else ("tinynccl",):
            outcomes = run(one, backend)
            if outcomes is None:
                return None
            wrong = judge(one, outcomes)
            slowest = max(outcome.seconds for outcome in outcomes)
            ends = ", ".join(f"{outcome.status}" for outcome in outcomes)
            cells.append(f"{'as expected' if not wrong else 'not as expected'}: {ends} after {slowest:.1f} s")
            if backend == "tinynccl" and wrong:
                failed += 1
                print(f"{name}:", *wrong, sep="\n", file=sys.stderr, flush=True)
        print("| " + " | ".join([name, *cells]) + " |" if judges else f"{name}: {cells[0]}", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    if torch is None:
        print("SKIPPED: no torch here", file=sys.stderr)
        sys.exit(0)
    torch.set_num_threads(1)
    found = main(sys.argv[1:])
    # A rank ends as its program left it.
    if found is not None:
        sys.exit(found > 0)
