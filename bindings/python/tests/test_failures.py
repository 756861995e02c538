"""Failures: the outcome on every rank of a process group."""

import datetime
import os
import pathlib
import sys
import tempfile
import threading
import time
import unittest
import warnings

from harness import ranks

try:
    import torch
    import torch.distributed as dist

    from checks import DEVICE
except ImportError:
    torch = DEVICE = None


def join(place, store, seconds=30):
    import tinynccl.torch  # noqa: F401

    warnings.filterwarnings("ignore")
    rank, size = place
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("tinynccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    dist.barrier()
    return rank


def one_ends(place, store, how, which):
    rank = join(place, store)
    if rank == which:
        if how == "killed":
            os._exit(5)
        if how == "exits":
            sys.exit(3)
        raise ValueError("a bug of one rank")
    dist.all_reduce(torch.ones(3))


def shapes_differ(place, store, count):
    rank = join(place, store)
    dist.all_reduce(torch.ones(count + rank), async_op=True).wait()


def types_differ(place, store):
    rank = join(place, store)
    dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][rank]))


def calls_differ(place, store):
    rank = join(place, store)
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), 0)


def messages_differ(place, store, what):
    rank = join(place, store)
    sent = torch.ones(3, dtype=torch.int32 if what == "types" else torch.float32)
    if rank == 0:
        dist.send(sent, 1, tag=7)
    else:
        dist.recv(torch.ones(3 if what == "types" else 4), 0, tag=7)


def nobody_sends(place, store, given_up):
    rank = join(place, store, 1)
    if rank == 0:
        try:
            dist.recv(torch.ones(3))
        finally:
            pathlib.Path(given_up).touch()
    # Rank 1 is there all the while.
    while not os.path.exists(given_up):
        time.sleep(0.01)


def one_of_the_senders_leaves(place, store):
    """A rank that has sent all its messages may leave; one whose messages are awaited is still received from."""
    rank = join(place, store)
    if rank == 1:
        dist.send(torch.ones(1), 0)
        return
    if rank == 2:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.full((1,), 2.0), 0)
        return
    assert dist.recv(torch.zeros(1)) == 1
    later = torch.zeros(1)
    work = dist.irecv(later)
    dist.send(torch.ones(1), 2)
    work.wait()
    assert work._source_rank() == 2 and later == 2, (work._source_rank(), later)


def all_senders_are_killed(place, store):
    rank = join(place, store)
    if rank > 0:
        dist.send(torch.ones(1), 0)
        dist.recv(torch.ones(1), 0)
        os._exit(5)
    for _ in range(2):
        dist.recv(torch.zeros(1))
    works = [dist.irecv(torch.zeros(1)) for _ in range(2)]
    for peer in (1, 2):
        dist.send(torch.ones(1), peer)
    for work in works:
        work.wait()


def from_any_of_another_type(place, store):
    rank = join(place, store)
    if rank == 0:
        dist.recv(torch.ones(4))
    else:
        dist.send(torch.ones(3), 0)


def closed_while_any_may_send(place, store):
    rank = join(place, store)
    if rank == 0:
        work = dist.irecv(torch.ones(4))
        dist.destroy_process_group()
        work.wait()


def sparse_shapes_differ(place, store):
    rank = join(place, store)
    dist.all_reduce(torch.eye(3 + rank).to_sparse())


def late(place, store):
    rank = join(place, store, 1)
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    else:
        time.sleep(3)


def interrupted(place, store, ready, kind):
    rank = join(place, store, 100)
    if rank == 1:
        # Waits for rank 0's end, by another way than the one that is interrupted.
        dist.distributed_c10d._get_default_group().comm.recv(torch.zeros(1), 0)
        return
    # Later, so that the call most likely waits by then; it must end as well if it does not.
    threading.Timer(0.5, pathlib.Path(ready).touch).start()
    if kind == "blocking":
        dist.all_reduce(torch.zeros(100))
    elif kind == "message":
        dist.recv(torch.zeros(100), 1)
    else:
        dist.all_reduce(torch.zeros(100_000), async_op=True).wait()


def destroyed_in_use(place, store):
    """The group is destroyed while calls are in flight: every wait ends, with a result or an exception."""
    join(place, store)
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(4)]
    dist.destroy_process_group()
    for work in works:
        work.wait()


def used_after_its_end(place, store):
    join(place, store)
    group = dist.distributed_c10d._get_default_group()
    group.shutdown()
    try:
        dist.all_reduce(torch.ones(3))
    except ValueError as error:
        return str(error)


def aborted(place, store):
    rank = join(place, store)
    if rank == 1:
        dist.distributed_c10d._get_default_group().abort()
    dist.all_reduce(torch.ones(3))


@unittest.skipIf(torch is None or DEVICE != "cpu", "on the CPU, with torch")
class Failures(unittest.TestCase):
    def launch(self, target, *args, size=2, **how):
        with tempfile.TemporaryDirectory() as folder:
            return ranks(size, target, os.path.join(folder, "store"), *args, join=False, **how)

    def test_one_ends(self):
        for how, exitcode in (("killed", 5), ("exits", None), ("raises", None)):
            # The rendezvous ends with rank 0.
            for which in (1, 0):
                outcomes = self.launch(one_ends, how, which)
                other = 1 - which
                self.assertRegex(outcomes[other].value, f"PeerLost: .*rank {other} lost rank {which}", how)
                self.assertEqual(outcomes[other].exitcode, 0)
                if exitcode:
                    self.assertEqual(outcomes[which].exitcode, exitcode)

    def all_name(self, outcomes, *words):
        """Both ranks fail; at least one saw the cause itself, the other may only see the abort."""
        texts = [outcome.value for outcome in outcomes]
        self.assertTrue(any(text.startswith("Mismatch") for text in texts), texts)
        for text in texts:
            self.assertRegex(text, "^(Mismatch|Aborted)")
            for word in words:
                self.assertRegex(text, word)

    def test_what_differs_is_named(self):
        for count in (3, 100_000):
            self.all_name(self.launch(shapes_differ, count), f"{count}.*{count + 1}|{count + 1}.*{count}")
        self.all_name(self.launch(types_differ), "f32", "i32")
        self.all_name(self.launch(calls_differ), "all_reduce", "broadcast")

    def test_messages_that_differ(self):
        for what, words in (("lengths", "16 bytes.*12 bytes"), ("types", "torch.float32.*torch.int32")):
            outcomes = self.launch(messages_differ, what)
            # The sender's part may have been over before.
            self.assertRegex(outcomes[1].value, f"^Mismatch: recv: rank 1 and rank 0 disagree: .*{words}")

    def test_from_any(self):
        outcomes = self.launch(from_any_of_another_type)
        self.assertRegex(outcomes[0].value, "^Mismatch: recv: rank 0 and rank 1 disagree: .*16 bytes.*12 bytes")
        outcomes = self.launch(closed_while_any_may_send)
        self.assertRegex(outcomes[0].value, "^Error: recv: rank 0: the process group is closed")
        for rank, outcome in enumerate(self.launch(one_of_the_senders_leaves, size=3)):
            self.assertEqual((outcome.kind, outcome.exitcode), ("returned", 0), f"rank {rank}: {outcome}")
        outcomes = self.launch(all_senders_are_killed, size=3)
        self.assertRegex(outcomes[0].value, "^PeerLost: .*lost rank")

    def test_from_any_when_nobody_sends(self):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = self.launch(nobody_sends, os.path.join(folder, "given-up"))
        self.assertRegex(outcomes[0].value, "^Timeout: recv: rank 0 made no progress for 1.0 s: .*not arrived: one of ranks 1")

    def test_sparse_shapes_that_differ(self):
        for outcome in self.launch(sparse_shapes_differ):
            self.assertRegex(outcome.value, r"^Mismatch: .*disagree: .*\[3, 3\].*\[4, 4\]|\[4, 4\].*\[3, 3\]")

    def test_late(self):
        outcomes = self.launch(late)
        self.assertRegex(outcomes[0].value, r"Timeout: all_reduce.*not arrived: rank 1")

    def test_interrupt(self):
        for kind in ("blocking", "async", "message"):
            with tempfile.TemporaryDirectory() as folder:
                ready = os.path.join(folder, "ready")
                outcomes = self.launch(interrupted, ready, kind, interrupt=(0, ready))
                self.assertTrue(outcomes[0].value.startswith("KeyboardInterrupt"), f"{kind}: {outcomes}")
                self.assertEqual(outcomes[0].exitcode, 1, "the interpreter's own end")
                self.assertRegex(outcomes[1].value, "rank 0", kind)

    def test_destroyed_in_use(self):
        for outcome in self.launch(destroyed_in_use):
            self.assertTrue(outcome.kind == "returned" or "tinynccl" in outcome.value or "abort" in outcome.value, outcome)
            self.assertEqual(outcome.exitcode, 0)

    def test_used_after_its_end(self):
        for rank, outcome in enumerate(self.launch(used_after_its_end)):
            self.assertEqual(outcome.kind, "returned", outcome)
            self.assertIn(f"all_reduce: rank {rank}: the communicator is closed", outcome.value)

    def test_aborted(self):
        for outcome in self.launch(aborted):
            self.assertRegex(outcome.value, "^Aborted: .*rank 1: abort was called on the process group")


if __name__ == "__main__":
    unittest.main(verbosity=2)
