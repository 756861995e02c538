"""Groups that lose ranks and take in others: revoke, agree, shrink, grow, from_ticket."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import numpy
import torch
import torch.distributed as dist

import tinynccl
import tinynccl.torch
from harness import ranks

NEWCOMER = """
import sys, numpy, tinynccl
comm = tinynccl.Comm.from_ticket(sys.argv[1], timeout=30.0)
total = numpy.full(5, 100.0)
comm.all_reduce(total)
print(comm.rank, comm.size, total.tolist(), flush=True)
comm.close()
"""


def sum_of(comm, value):
    total = numpy.full(5, value, dtype=numpy.float64)
    comm.all_reduce(total)
    return total.tolist()


def one_is_killed(comm, lost):
    me = comm.rank
    try:
        # The last one of the rank that is lost may be one that the others did not finish.
        assert sum_of(comm, me + 1) == [6.0] * 5
        if me == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            sum_of(comm, me + 1)
    except tinynccl.Error as error:
        comm.revoke()
        what = type(error).__name__
    value, alive = comm.agree(0b110 if me == 0 else 0b011)
    others = [rank for rank in range(3) if rank != lost]
    assert alive == others and value == (0b010 if 0 in others else 0b011), (value, alive)
    smaller = comm.shrink()
    assert (smaller.rank, smaller.size) == (others.index(me), 2), smaller
    assert sum_of(smaller, me + 1) == [sum(rank + 1.0 for rank in others)] * 5
    try:
        sum_of(comm, 1)
    except (tinynccl.Aborted, tinynccl.PeerLost):
        smaller.close()
        return what
    raise AssertionError("a revoked communicator made a call")


def one_joins(comm):
    newcomer = None
    if comm.rank == 0:
        command = [sys.executable, "-c", NEWCOMER, comm.ticket()]
        newcomer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    waiting = numpy.zeros(1, dtype=numpy.int64)
    while waiting[0] == 0:
        waiting[0] = comm.waiting
        comm.all_reduce(waiting)
    larger = comm.grow(8)
    assert larger.size == 3 and larger.rank == comm.rank, larger
    assert sum_of(larger, comm.rank + 1) == [103.0] * 5
    if newcomer:
        said, _ = newcomer.communicate(timeout=60)
        assert said == f"2 3 {[103.0] * 5}\n", said
    larger.close()


STEPS = 12


def begin(place, port):
    """The default group of ``place``, whose store rank 0 hosts; the others read its port from a file."""
    rank, size = place
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pathlib.Path(port).with_suffix(".new").write_text(str(store.port))
        os.rename(pathlib.Path(port).with_suffix(".new"), port)
    else:
        while not os.path.exists(port):
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(pathlib.Path(port).read_text()), is_master=False, wait_for_workers=False)
    dist.init_process_group("tinynccl", store=store, rank=rank, world_size=size)


class Training:
    """A linear model that every rank trains on samples of its own; ``step`` counts the steps that all ranks have done."""

    def __init__(self):
        torch.manual_seed(7)
        self.model, self.step = torch.nn.Linear(6, 2), 0
        self.wrap()

    def wrap(self):
        """After the group has changed: the parameters and the step of rank 0, which was in the group before."""
        self.ddp = torch.nn.parallel.DistributedDataParallel(self.model)
        step = torch.tensor([self.step])
        dist.broadcast(step, 0)
        self.step = int(step)

    def run(self, until, lost=None):
        while self.step < until:
            if self.step == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.manual_seed(1000 * self.step + dist.get_rank())
            self.ddp(torch.randn(8, 6)).square().mean().backward()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            self.step += 1

    def same_everywhere(self):
        flat = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        all_of_them = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of_them, flat)
        return all(torch.equal(flat, other) for other in all_of_them)


def ddp_loses_one(place, port, lost):
    begin(place, port)
    training = Training()
    try:
        training.run(STEPS, 5 if place[0] == lost else None)
        return "no rank was lost"
    except RuntimeError:
        tinynccl.torch.shrink()
    assert dist.get_world_size() == 2 and dist.get_rank() == place[0] - (place[0] > lost), (dist.get_rank(), place)
    training.wrap()
    training.run(STEPS)
    assert training.same_everywhere()
    # Messages meet through the new store.
    got = torch.zeros(3)
    (dist.send if dist.get_rank() else dist.recv)(torch.full((3,), 5.0) if dist.get_rank() else got, 1 - dist.get_rank())
    assert dist.get_rank() or got.tolist() == [5.0] * 3, got
    dist.destroy_process_group()
    return "went on"


def ddp_takes_one_in(place, port, ticket):
    if place[0] == 2:
        while not os.path.exists(ticket):
            time.sleep(0.01)
        tinynccl.torch.join(pathlib.Path(ticket).read_text(), timeout=30.0)
        training = Training()
    else:
        begin((place[0], 2), port)
        training = Training()
        training.run(3)
        if place[0] == 0:
            pathlib.Path(ticket).with_suffix(".new").write_text(tinynccl.torch.ticket())
            os.rename(pathlib.Path(ticket).with_suffix(".new"), ticket)
        waiting = torch.zeros(1)
        while waiting == 0:
            waiting.fill_(tinynccl.torch.waiting())
            dist.all_reduce(waiting)
        tinynccl.torch.grow(3)
        training.wrap()
    assert (dist.get_world_size(), dist.get_rank()) == (3, place[0]), (dist.get_world_size(), dist.get_rank(), place)
    assert training.step == 3, training.step
    training.run(STEPS)
    assert training.same_everywhere()
    dist.destroy_process_group()
    return "went on"


def gpus_lose_one(place, port):
    torch.cuda.set_device(place[0] % torch.cuda.device_count())
    begin(place, port)
    data = torch.empty(1 << 20, device="cuda")
    try:
        for step in range(1 << 30):
            dist.all_reduce(data.fill_(place[0] + 1))
            torch.cuda.synchronize()
            assert data[0] == 6 and data[-1] == 6, data
            if step == 3 and place[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError:
        tinynccl.torch.shrink()
    dist.all_reduce(data.fill_(place[0] + 1))
    torch.cuda.synchronize()
    assert data[0] == 5 and data[-1] == 5, data
    dist.destroy_process_group()
    return "went on"


class Survive(unittest.TestCase):
    def test_a_rank_is_killed(self):
        for lost in (0, 1):
            outcomes = ranks(3, one_is_killed, lost)
            for rank, outcome in enumerate(outcomes):
                if rank != lost:
                    self.assertEqual(outcome.kind, "returned", f"rank {rank}, {lost} lost: {outcome}")

    def test_a_process_joins(self):
        for rank, outcome in enumerate(ranks(2, one_joins)):
            self.assertEqual(outcome.kind, "returned", f"rank {rank}: {outcome}")

    def test_ddp_loses_a_rank(self):
        for lost in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                outcomes = ranks(3, ddp_loses_one, f"{folder}/port", lost, join=False)
            for rank, outcome in enumerate(outcomes):
                if rank != lost:
                    self.assertEqual(outcome.value, "went on", f"rank {rank}, {lost} lost: {outcome}")

    @unittest.skipUnless(os.environ.get("TEST_DEVICE") == "cuda", "needs a GPU: TEST_DEVICE=cuda")
    def test_gpus_lose_a_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = ranks(3, gpus_lose_one, f"{folder}/port", join=False)
        self.assertEqual([outcome.value for outcome in outcomes[1:]], ["went on"] * 2, outcomes)

    def test_ddp_takes_a_process_in(self):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = ranks(3, ddp_takes_one_in, f"{folder}/port", f"{folder}/ticket", join=False)
        self.assertEqual([outcome.value for outcome in outcomes], ["went on"] * 3, outcomes)

    def test_a_text_that_is_no_ticket(self):
        with self.assertRaises(tinynccl.ConfigError):
            tinynccl.Comm.from_ticket("nonsense")


if __name__ == "__main__":
    unittest.main()
