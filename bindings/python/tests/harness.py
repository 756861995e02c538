"""Ranks as processes: each runs one function of a test module and reports what it returned or raised."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback

import tinynccl

LIMIT = float(os.environ.get("TEST_LIMIT", "120"))


class Outcome:
    """The outcome of a rank."""

    def __init__(self, kind, value, exitcode=0):
        self.kind, self.value, self.exitcode = kind, value, exitcode

    def __repr__(self):
        return f"{self.kind} (exit code {self.exitcode}): {self.value}"


def _rank(target, rank, size, unique_id, timeout, answers, args):
    # A background job of a shell ignores SIGINT, and so would this interpreter.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where it stands, before it is killed.
    faulthandler.dump_traceback_later(LIMIT * 0.9, exit=False)
    comm = None
    try:
        if unique_id is not None:
            comm = tinynccl.Comm(unique_id, rank, size, timeout=timeout)
        value = target(comm if comm is not None else (rank, size), *args)
        answers.put((rank, "returned", value))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, AssertionError):
            text = traceback.format_exc()
        answers.put((rank, "raised", text))
        if isinstance(error, KeyboardInterrupt):
            answers.close()
            answers.join_thread()
            raise
    finally:
        if comm is not None:
            comm.close()


def ranks(size, target, *args, timeout=30.0, join=True, interrupt=None):
    """Runs ``target(comm, *args)`` on each rank (without ``join``: ``target((rank, size), *args)``); outcomes by rank.

    ``interrupt``: (rank, path): sends SIGINT to that rank once the file is there.
    """
    context = multiprocessing.get_context("spawn")
    server = tinynccl.Server(size) if join else None
    answers = context.Queue()
    unique_id = server.unique_id if server else None
    processes = [
        context.Process(target=_rank, args=(target, rank, size, unique_id, timeout, answers, args)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    if interrupt is not None:
        rank, path = interrupt
        while not os.path.exists(path) and time.monotonic() < end and processes[rank].is_alive():
            time.sleep(0.01)
        os.kill(processes[rank].pid, signal.SIGINT)
    found = {}
    try:
        while len(found) < size and time.monotonic() < end:
            try:
                rank, kind, value = answers.get(timeout=0.2)
                found[rank] = Outcome(kind, value)
            except Exception:
                if not any(process.is_alive() for process in processes) and answers.empty():
                    break
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
    finally:
        for rank, process in enumerate(processes):
            if process.is_alive():
                process.kill()
                process.join()
                found[rank] = Outcome("hung", found.get(rank))
            outcome = found.setdefault(rank, Outcome("vanished", None))
            outcome.exitcode = process.exitcode
        if server is not None:
            server.close()
    return [found[rank] for rank in range(size)]


def skip(reason):
    print(f"SKIPPED: {reason}", file=sys.stderr)
