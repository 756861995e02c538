"""torch 2.15's contract for fault tolerance: init_process_group(enable_reconfigure=True), _get_reconfigure_handle, _reconfigure."""

import datetime
import os
import signal
import tempfile
import unittest

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import tinynccl
import tinynccl.torch
from harness import ranks, skip

LIMIT = datetime.timedelta(seconds=60)
SHORT = datetime.timedelta(seconds=1)


class Place:
    """A process of a trial: its name, and files by which the processes tell each other their handles."""

    def __init__(self, place, folder):
        self.me, self.size = place
        self.store = dist.FileStore(f"{folder}/store", self.size)
        self.store.set_timeout(LIMIT)
        # Every process begins by itself: whom it meets say the handles alone.
        own = dist.FileStore(f"{folder}/store-of-{self.me}", 1)
        dist.init_process_group("tinynccl", store=own, rank=0, world_size=1, timeout=LIMIT, enable_reconfigure=True)
        self.handle = dist._get_reconfigure_handle()
        self.store.set(f"handle-{self.me}", self.handle)

    def handles(self, *names):
        return [self.store.get(f"handle-{name}").decode() for name in names]

    def meets(self, uuid, *names, limit=LIMIT):
        dist._reconfigure(uuid, self.handles(*names), timeout=limit).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (names.index(self.me), len(names)), (dist.get_rank(), names)
        self.works_with(*names)

    def fails(self, uuid, *names, limit=LIMIT):
        """The error, which is to be the same on all ranks."""
        try:
            self.meets(uuid, *names, limit=limit)
        except tinynccl.Error as error:
            return type(error).__name__, str(error)
        raise AssertionError("no error")

    def works_with(self, *names):
        """Collectives and messages, in this order of ranks."""
        gathered = [torch.zeros(1) for _ in names]
        dist.all_gather(gathered, torch.tensor([float(self.me)]))
        assert [int(one) for one in gathered] == list(names), (gathered, names)
        if len(names) > 1 and self.me in names[:2]:
            data = torch.tensor([7.0 if self.me == names[0] else 0.0])
            (dist.send if self.me == names[0] else dist.recv)(data, 1 - dist.get_rank())
            assert data == 7.0, data

    def waits_for(self, *names):
        """The end of all of them."""
        self.store.set(f"end-{self.me}", "1")
        for name in names:
            self.store.get(f"end-{name}")


def orders(place, folder):
    here = Place(place, folder)
    try:
        dist.all_reduce(torch.ones(1))
        raise AssertionError("a call before the first _reconfigure")
    except tinynccl.InvalidArgument:
        pass
    here.meets(1, 0, 1, 2)
    here.meets(2, 2, 0, 1)
    # A set has no order: all ranks take the same one.
    dist._reconfigure(3, set(here.handles(0, 1, 2)), timeout=LIMIT).wait()
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    assert total == 3, total
    # One is left out, and lives; it is a group of its own, and joins again.
    here.meets(*((4, 1, 0) if here.me != 2 else (5, 2)))
    here.meets(6, 1, 2, 0)
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        one = torch.ones(1)
        dist.all_reduce(one, group=pair)
        assert one == 2, one
    here.waits_for(0, 1, 2)
    dist.destroy_process_group()
    return "went on"


def lost_and_gained(place, folder):
    here = Place(place, folder)
    # Process 3 comes later.
    if here.me < 3:
        here.meets(1, 0, 1, 2)
        try:
            while True:
                one = torch.ones(1000)
                dist.all_reduce(one)
                assert one[0] == 3, one
                if here.me == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        except RuntimeError:
            pass
        # The one that died is among them: as the rank that leads, and as another.
        first, second = here.fails(2, 0, 1, 2), here.fails(3, 1, 0, 2)
        assert (first[0], second[0]) == ("PeerLost", "PeerLost"), (first, second)
        here.meets(4, 2, 1)
    # The newcomer leads.
    here.meets(5, 3, 1, 2)
    here.waits_for(1, 2, 3)
    dist.destroy_process_group()
    return "went on" if here.me == 3 else second


def ends_meanwhile(place, folder):
    """Processes that are asked for, and die while the others wait for them: the last rank, then the new rank 0."""
    here = Place(place, folder)
    here.meets(1, 0, 1, 2, 3)
    for uuid, lost, names in ((2, 3, (0, 1, 2, 3)), (3, 2, (2, 0, 1))):
        here.store.set(f"asks-{uuid}-{here.me}", "1")
        if here.me == lost:
            for name in names:
                here.store.get(f"asks-{uuid}-{name}")
            os.kill(os.getpid(), signal.SIGKILL)
        kind, text = here.fails(uuid, *names)
        assert kind == "PeerLost", text
    here.meets(4, 1, 0)
    here.waits_for(0, 1)
    return "went on"


def failures(place, folder):
    here = Place(place, folder)
    found = []
    here.meets(1, 0, 1)
    # Wrong on its face, on every rank.
    for handles in ([], ["nonsense"], here.handles(0, 1) + ["tinynccl;localhost;port;key"], here.handles(0, 0, 1), here.handles(1 - here.me)):
        try:
            dist._reconfigure(2, handles, timeout=LIMIT)
            raise AssertionError(f"took {handles}")
        except tinynccl.InvalidArgument:
            pass
    here.works_with(0, 1)
    # On one rank alone: the other has never seen this uuid.
    if here.me == 1:
        here.meets(3, 1)
        here.store.set("used", "1")
    here.store.get("used")
    found.append(here.fails(3, 0, 1))
    # Other handles than the other rank's.
    found.append(here.fails(4, *((0, 1) if here.me == 0 else (0, 1, 2))))
    # A process that lives, and does not call.
    found.append(here.fails(5, 0, 1, 2, limit=SHORT))
    here.meets(6, 1, 0)
    here.meets(7, 0, 1)
    # The group that a failed call leaves is the one before.
    found.append(here.fails(8, 1, 0, 2, limit=SHORT))
    here.works_with(0, 1)
    here.waits_for(0, 1)
    return found


def failures_of_two(place, folder):
    if place[0] == 2:
        here = Place(place, folder)
        # Lives until the others are done.
        here.waits_for(0, 1)
        return None
    return failures(place, folder)


def stale(place, folder):
    """A process gives its group up, and makes another: what it was is not taken for what it is."""
    here = Place(place, folder)
    if here.me == 0:
        dist.destroy_process_group()
        own = dist.FileStore(f"{folder}/second", 1)
        dist.init_process_group("tinynccl", store=own, rank=0, world_size=1, timeout=LIMIT, enable_reconfigure=True)
        here.store.set("handle-new", dist._get_reconfigure_handle())
    here.store.get("handle-new")
    if here.me == 1:
        kind, _ = here.fails(1, 0, 1)
        assert kind == "PeerLost", kind
    dist._reconfigure(2, here.handles("new", 1), timeout=LIMIT).wait()
    here.works_with(0, 1)
    here.waits_for(0, 1)
    return "went on"


@unittest.skipUnless(hasattr(c10d, "ReconfigureOptions"), f"torch {torch.__version__} has no _reconfigure; torch 2.15 has")
class Reconfigure(unittest.TestCase):
    def outcomes(self, size, target):
        with tempfile.TemporaryDirectory() as folder:
            return ranks(size, target, folder, join=False)

    def test_the_order_is_the_callers(self):
        outcomes = self.outcomes(3, orders)
        self.assertEqual([outcome.value for outcome in outcomes], ["went on"] * 3, outcomes)

    def test_one_is_lost_and_one_gained(self):
        _, *others = outcomes = self.outcomes(4, lost_and_gained)
        self.assertEqual([outcome.kind for outcome in others], ["returned"] * 3, outcomes)
        self.assertEqual(others[0].value, others[1].value, outcomes)

    def test_one_dies_meanwhile(self):
        outcomes = self.outcomes(4, ends_meanwhile)
        self.assertEqual([outcome.value for outcome in outcomes[:2]], ["went on"] * 2, outcomes)

    def test_failures_are_the_same_on_all_ranks(self):
        first, second, third = outcomes = self.outcomes(3, failures_of_two)
        self.assertEqual([outcome.kind for outcome in outcomes], ["returned"] * 3, outcomes)
        self.assertEqual(first.value, second.value, outcomes)
        self.assertEqual([kind for kind, _ in first.value], ["InvalidArgument", "Mismatch", "Timeout", "Timeout"], outcomes)
        self.assertIn("already used", first.value[0][1])
        self.assertIn("not arrived: ranks 2", first.value[2][1])

    def test_a_handle_of_an_earlier_group(self):
        outcomes = self.outcomes(2, stale)
        self.assertEqual([outcome.value for outcome in outcomes], ["went on"] * 2, outcomes)


if __name__ == "__main__":
    if not hasattr(c10d, "ReconfigureOptions"):
        skip(f"test_reconfigure.py: torch {torch.__version__} has no _reconfigure; torch 2.15 has")
    unittest.main()
