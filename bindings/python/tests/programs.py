"""Small programs over a process group, and how each of their ranks ends.

A program is a function of (job) that every rank runs in a process of its own, forked from one that has imported torch. After
it the interpreter ends as that of a script does. ``expected`` has, by rank, the exit status and a pattern of what it printed.
"""

import faulthandler
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback

import datetime

import torch
import torch.distributed as dist

PROGRAMS = {}
# Seconds until a program's rank counts as hung.
LIMIT = float(os.environ.get("TEST_LIMIT", "90"))


class Program:
    def __init__(self, function, size, expected):
        self.name, self.function, self.size = function.__name__, function, size
        self.expected = [expected] * size if isinstance(expected, tuple) else expected


def program(size, expected):
    """``expected``: (status, pattern) of every rank, or a list of them."""

    def add(function):
        PROGRAMS[function.__name__] = Program(function, size, expected)
        return function

    return add


class Job:
    """One rank's view: its number, where the ranks meet, and marks by which they wait for each other outside of torch."""

    def __init__(self, backend, rank, size, folder):
        self.backend, self.rank, self.size, self._folder = backend, rank, size, folder

    def join(self, seconds=600, store=None, **how):
        if store is None and not how:
            how = {"init_method": f"file://{self._folder}/store"}
        elif store is not None:
            how = {"store": store}
        dist.init_process_group(
            self.backend, rank=self.rank, world_size=self.size, timeout=datetime.timedelta(seconds=seconds), **how
        )
        return self

    def tcp_store(self):
        """torch's usual store, in rank 0's process."""
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, self.size, True, wait_for_workers=False)
            self.mark(f"port {store.port}")
            return store
        port = self.await_mark("port ").split()[1]
        return dist.TCPStore("127.0.0.1", int(port), self.size, False, wait_for_workers=False)

    def mark(self, name):
        open(os.path.join(self._folder, name), "w").close()

    def await_mark(self, name):
        """The mark that begins so, once it is there."""
        while True:
            for found in os.listdir(self._folder):
                if found.startswith(name):
                    return found
            time.sleep(0.005)

    def await_end(self, rank):
        """Waits until that rank's process has ended, which its parent says."""
        self.await_mark(f"ended {rank}")


def say(*words):
    print(*words, flush=True)


def said(call, *arguments, **how):
    """Makes a call and says its error, if it raises one."""
    try:
        return call(*arguments, **how)
    except Exception as error:
        say(f"{type(error).__name__}: {error}".splitlines()[0])


class Ended:
    """How a rank has ended."""

    def __init__(self, status, text, seconds):
        self.status, self.text, self.seconds = status, text, seconds

    def __repr__(self):
        return f"status {self.status} after {self.seconds:.1f} s\n{self.text}"


def run(one, backend):
    """The ranks' ends. A child returns None, to end as a script does: its caller must return to the top at once."""
    # Not a context, which a child would leave, too.
    folder = tempfile.mkdtemp()
    begin, left, outcomes = time.monotonic(), {}, [None] * one.size
    for rank in range(one.size):
        pid = os.fork()
        if pid == 0:
            return _child(one, backend, rank, folder)
        left[pid] = rank
    while left and time.monotonic() - begin < LIMIT:
        for pid, rank in list(left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del left[pid]
                open(os.path.join(folder, f"ended {rank}"), "w").close()
                outcomes[rank] = (os.waitstatus_to_exitcode(status), time.monotonic() - begin)
        time.sleep(0.005)
    for pid, rank in left.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        outcomes[rank] = ("hung", time.monotonic() - begin)
    texts = []
    for rank in range(one.size):
        with open(os.path.join(folder, f"output {rank}"), errors="replace") as file:
            texts.append(file.read())
    shutil.rmtree(folder)
    return [Ended(status, text, seconds) for (status, seconds), text in zip(outcomes, texts)]


def _child(one, backend, rank, folder):
    output = os.open(os.path.join(folder, f"output {rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A crash leaves its stack in the output.
    faulthandler.enable()
    if backend == "tinynccl":
        import tinynccl.torch  # noqa: F401
    try:
        one.function(Job(backend, rank, one.size, folder))
    except Exception:
        # As the interpreter does, whose hook the parent may have changed.
        traceback.print_exc()
        sys.exit(1)


def judge(one, outcomes):
    """What is not as expected; empty: all is."""
    wrong = []
    for rank, (outcome, (status, pattern)) in enumerate(zip(outcomes, one.expected)):
        statuses = status if isinstance(status, tuple) else (status,)
        if outcome.status not in statuses or not re.search(pattern, outcome.text, re.MULTILINE):
            wrong.append(f"rank {rank}: expected {status} and /{pattern}/, got {outcome}")
    return wrong
