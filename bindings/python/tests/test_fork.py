"""Processes that a rank forks, as the workers of a data loader: they live, make calls, drop what they inherited."""

import os
import signal
import tempfile
import time
import unittest

import numpy

import tinynccl
from harness import LIMIT, ranks

DEADLINE = 3600.0


def fork(child):
    """Runs ``child`` in a forked process, which ends with its outcome and runs nothing else; its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if child() else 1)
        except BaseException as error:
            print(f"the forked child: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(2)
    return pid


def add(comm, value):
    data = numpy.full(4, value, dtype="i8")
    comm.all_reduce(data)
    assert (data == comm.size * value).all(), data


def calls_of_a_child(comm):
    add(comm, 1)
    if comm.rank == 0:
        work = comm.all_reduce(numpy.ones(3), async_op=True)

        def child():
            calls = [
                lambda: comm.all_reduce(numpy.ones(3)),
                lambda: comm.barrier(),
                lambda: comm.send(numpy.ones(3), 1),
                lambda: comm.split(0, 0),
                lambda: comm.all_reduce(numpy.ones(3), async_op=True),
                lambda: work.wait(),
            ]
            for call in calls:
                try:
                    call()
                except tinynccl.errors.InvalidArgument as error:
                    assert "forked" in str(error) and str(os.getppid()) in str(error), error
                else:
                    return False
            comm.abort("from a child")
            comm.close()
            return True

        assert os.waitpid(fork(child), 0)[1] == 0
        work.wait()
    else:
        comm.all_reduce(numpy.ones(3))
    for value in range(20):
        add(comm, value)


def killed_before_its_child(comm, folder):
    add(comm, 1)
    noticed = [os.path.join(folder, str(rank)) for rank in (0, 2)]
    if comm.rank == 1:

        def child():
            end = time.monotonic() + LIMIT
            while not all(map(os.path.exists, noticed)) and time.monotonic() < end:
                time.sleep(0.01)

        fork(child)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for value in range(1 << 60):
            add(comm, value)
    except tinynccl.errors.PeerLost as error:
        open(os.path.join(folder, str(comm.rank)), "w").close()
        return error.peer


class Forked(unittest.TestCase):
    def test_a_call_of_a_child_is_an_error_and_nobody_else_notices(self):
        for outcome in ranks(2, calls_of_a_child, timeout=DEADLINE):
            self.assertEqual(outcome.kind, "returned", outcome)

    def test_a_killed_rank_is_noticed_though_its_child_lives(self):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = ranks(3, killed_before_its_child, folder, timeout=DEADLINE)
        for rank in (0, 2):
            self.assertEqual((outcomes[rank].kind, outcomes[rank].value), ("returned", 1), outcomes[rank])


if __name__ == "__main__":
    unittest.main()
