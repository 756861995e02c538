"""What happens to the ranks of a process group when something goes wrong."""

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


def one_ends(place, store, how):
    rank = join(place, store)
    if rank == 1:
        if how == "killed":
            os._exit(5)
        if how == "exits":
            sys.exit(3)
        raise ValueError("a bug of rank 1")
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
    """The group is destroyed while calls are in flight: what is waited for ends, with a result or an exception."""
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
    def launch(self, target, *args, **how):
        with tempfile.TemporaryDirectory() as folder:
            return ranks(2, target, os.path.join(folder, "store"), *args, join=False, **how)

    def test_one_ends(self):
        for how, exitcode in (("killed", 5), ("exits", None), ("raises", None)):
            outcomes = self.launch(one_ends, how)
            self.assertRegex(outcomes[0].value, "PeerLost: .*rank 0 lost rank 1", how)
            self.assertEqual(outcomes[0].exitcode, 0)
            if exitcode:
                self.assertEqual(outcomes[1].exitcode, exitcode)

    def all_name(self, outcomes, *words):
        """Both know of it, at least one by what it saw itself; the other may have been told by the abort."""
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
