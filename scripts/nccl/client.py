"""What the clients share: the loaded libnccl, a line per check, a limit for each, and processes as ranks.

A check ends as `ok NAME`, `skipped NAME: why` or `FAILED NAME: rank R: why`. All ranks make the same checks in the same order;
they tell each other their outcomes by files, so a broken library cannot take the report with it.
"""

import argparse
import ctypes
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback

SIZE = 2


class Skipped(Exception):
    """The check does not apply here."""


def loaded():
    """Paths of every libnccl that this process has mapped. One that was preloaded may have any name."""
    preloaded = [os.path.realpath(path) for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
    paths = []
    with open("/proc/self/maps") as file:
        for line in file:
            path = line.split(maxsplit=5)[5].strip() if line.count("/") else ""
            if path not in paths and ("libnccl.so" in os.path.basename(path) or path in preloaded):
                paths.append(path)
    return paths


class _Symbol(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def _linked():
    """The file whose ncclGetVersion the process's own references reach; None if no loaded file offers one to all."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "ncclGetVersion"):
        return None
    symbol = _Symbol()
    address = ctypes.cast(process.ncclGetVersion, ctypes.c_void_p)
    return os.path.realpath(os.fsdecode(symbol.path)) if process.dladdr(address, ctypes.byref(symbol)) else None


def say_which(program, linked=False):
    """Prints the libraries of this process. Two are a mistake, because a call may reach either, unless the program is
    linked to one: its calls then reach the first in the loader's order."""
    paths = [path for path in loaded() if hasattr(ctypes.CDLL(path), "ncclGetVersion")]
    reached = _linked() if linked else None
    for path in paths:
        version = ctypes.c_int()
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version))
        other = ", loaded beside it and not called" if reached and os.path.realpath(path) != reached else ""
        print(f"{program}: {path}, version {version.value}{other}", flush=True)
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return len(paths) == 1 or bool(reached) and reached in map(os.path.realpath, preloaded)


def arguments(doc, **more):
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--only", default="", help="checks by name, comma-separated")
    parser.add_argument("--skip", default="", help="checks by name, comma-separated")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each check")
    for name, keywords in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    return parser.parse_args()


class Checks:
    """The checks of one rank."""

    def __init__(self, rank, size, folder, options):
        self.rank, self.size, self.folder, self.options = rank, size, folder, options
        self.failed, self.number = 0, 0

    def run(self, name, function, *args):
        if self.options.only and name not in self.options.only.split(",") or name in self.options.skip.split(","):
            return
        self.number += 1
        limit = self.options.limit
        timer = threading.Timer(limit, self._too_long, (name,))
        timer.daemon = True
        timer.start()
        # If a call holds the interpreter's lock the timer cannot run; this can.
        faulthandler.dump_traceback_later(limit + 20, exit=True)
        try:
            function(*args)
            outcome = "ok"
        except Skipped as why:
            outcome = f"skipped {why}"
        except Exception as error:
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            outcome = f"{type(error).__name__}: {text} ({os.path.basename(where.filename)}:{where.lineno})"
        timer.cancel()
        self._tell(name, outcome)
        self._report(name)
        faulthandler.cancel_dump_traceback_later()

    def end(self):
        """The exit status. Rank 0 comes last: then nobody reads an outcome any more."""
        open(os.path.join(self.folder, f"left.{self.rank}"), "w").close()
        until = time.monotonic() + self.options.limit
        others = [os.path.join(self.folder, f"left.{rank}") for rank in range(self.size)] if self.rank == 0 else []
        while not all(map(os.path.exists, others)) and time.monotonic() < until:
            time.sleep(0.002)
        if self.rank == 0:
            print(f"{self.number} checks, {self.failed} failed", flush=True)
        return 1 if self.failed or not self.number else 0

    def _path(self, rank):
        return os.path.join(self.folder, f"{self.number}.{rank}")

    def _tell(self, name, outcome):
        with open(f"{self._path(self.rank)}.new", "w") as file:
            file.write(outcome)
        os.rename(f"{self._path(self.rank)}.new", self._path(self.rank))

    def _report(self, name):
        """Waits for the others' outcomes; rank 0 prints what all say."""
        end = time.monotonic() + self.options.limit + 5
        outcomes = []
        for rank in range(self.size):
            while not os.path.exists(self._path(rank)) and time.monotonic() < end:
                time.sleep(0.002)
            try:
                with open(self._path(rank)) as file:
                    outcomes.append(file.read())
            except FileNotFoundError:
                outcomes.append("this rank said nothing")
        bad = [(rank, o) for rank, o in enumerate(outcomes) if o != "ok" and not o.startswith("skipped")]
        self.failed += bool(bad)
        if self.rank == 0:
            skipped = [o for o in outcomes if o.startswith("skipped")]
            if bad:
                print(f"FAILED {name}: " + "; ".join(f"rank {rank}: {o}" for rank, o in bad), flush=True)
            elif skipped:
                print(f"skipped {name}: {skipped[0].removeprefix('skipped ')}", flush=True)
            else:
                print(f"ok {name}", flush=True)
        if any(o.startswith("no end") or "said nothing" in o for _, o in bad):
            # The library is in the middle of a call on some rank: nothing after that means anything.
            os._exit(3)

    def _too_long(self, name):
        faulthandler.dump_traceback(all_threads=True)
        self._tell(name, f"no end within {self.options.limit:.0f} s")
        self._report(name)
        os._exit(3)


def _rank(function, rank, size, folder, options):
    checks = Checks(rank, size, folder, options)
    function(checks)
    # Without the destructors of a library that a failed check left in the middle of something.
    sys.stdout.flush()
    os._exit(checks.end())


def ranks(function, options, size=SIZE):
    """Runs `function(checks)` in `size` processes; the exit status."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(function, rank, size, folder, options)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    codes = [process.exitcode for process in processes]
    for rank, code in enumerate(codes):
        if code not in (0, 1, 3):
            print(f"FAILED rank {rank}: exit status {code}", flush=True)
    return max(abs(code) for code in codes)


def share(checks, name, make):
    """What rank 0 makes (bytes), on all ranks."""
    return share_of(checks, name, 0, make)


def share_of(checks, name, owner, make=bytes):
    """What rank `owner` makes (bytes), on all ranks."""
    path = os.path.join(checks.folder, f"share.{name}.{owner}")
    if checks.rank == owner:
        with open(f"{path}.new", "wb") as file:
            file.write(make())
        os.rename(f"{path}.new", path)
    end = time.monotonic() + checks.options.limit
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise TimeoutError(f"{name} of rank {owner} did not come")
        time.sleep(0.002)
    with open(path, "rb") as file:
        return file.read()
