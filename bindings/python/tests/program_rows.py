"""Programs that once hung, crashed, leaked, named the wrong rank or gave wrong values."""

import gc
import os
import signal
import socket
import threading
import time
import weakref

import torch
import torch.distributed as dist

from programs import program, said, say

DONE = (0, "^done$")


@program(4, DONE)
def reduces_then_ends(job):
    job.join()
    for _ in range(3):
        dist.reduce(torch.ones(100_000), 0)
    say("done")


@program(2, DONE)
def first_messages_from_two_threads(job):
    job.join()
    got = [torch.zeros(1000) for _ in range(2)]
    gate = threading.Barrier(2)

    def message(index):
        gate.wait()
        if job.rank == 0:
            dist.send(torch.full((1000,), 1.0 + index), 1, tag=index)
        else:
            dist.recv(got[index], 0, tag=index)

    threads = [threading.Thread(target=message, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert job.rank == 0 or [float(one.sum()) for one in got] == [1000.0, 2000.0], got
    say("done")


@program(2, DONE)
def a_handler_makes_a_call_while_its_thread_waits_in_one(job):
    job.join()

    def handler(*_):
        error = []
        for call in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.barrier(), lambda: dist.broadcast(torch.ones(1), 0)):
            try:
                call()
                error.append("made")
            except RuntimeError as refused:
                assert "handler" in str(refused), refused
                error.append("refused")
        job.mark("handled")

    signal.signal(signal.SIGUSR1, handler)
    tensor = torch.ones(5)
    if job.rank == 0:
        me = os.getpid()
        threading.Timer(0.3, os.kill, (me, signal.SIGUSR1)).start()
        dist.all_reduce(tensor)
    else:
        # gloo runs handlers later.
        job.await_mark("handled") if job.backend == "tinynccl" else time.sleep(1)
        dist.all_reduce(tensor)
    assert tensor[0] == 2
    say("done")


@program(2, DONE)
def a_finalizer_makes_calls(job):
    job.join()

    class Last:
        def __del__(self):
            said(dist.all_reduce, torch.ones(1))

    for _ in range(3):
        last = Last()
        last.itself = last
        del last
        dist.all_reduce(torch.ones(1000), async_op=True)
        gc.collect()
    dist.barrier()
    say("done")


@program(2, DONE)
def ends_behind_an_asynchronous_call(job):
    job.join()
    work = dist.all_reduce(torch.ones(10 << 18), async_op=True)  # noqa: F841
    say("done")


@program(2, DONE)
def ends_behind_a_receive_that_never_comes(job):
    job.join()
    work = dist.irecv(torch.zeros(3), 1 - job.rank)  # noqa: F841
    say("done")


@program(2, DONE)
def ends_behind_receives_from_any_rank_and_a_first_message(job):
    job.join()
    if job.rank == 0:
        dist.recv(torch.zeros(1), 1)
    else:
        dist.send(torch.zeros(1), 0)
    works = [dist.irecv(torch.zeros(3)), dist.irecv(torch.zeros(3), 1 - job.rank)]  # noqa: F841
    say("done")


@program(2, [(0, "^done$"), (0, "^sum 300000.0$")])
def ends_behind_a_send(job):
    job.join()
    if job.rank == 0:
        work = dist.isend(torch.ones(300_000), 1)  # noqa: F841
        say("done")
    else:
        got = torch.zeros(300_000)
        dist.recv(got, 0)
        say("sum", float(got.sum()))


KILLED = (-signal.SIGKILL, "")
LOST_2 = (0, "PeerLost: .*lost rank 2")


@program(4, [(0, ""), (0, ""), KILLED, LOST_2])
def receives_from_a_killed_rank(job):
    job.join()
    if job.rank == 2:
        dist.send(torch.ones(1), 3)
        job.await_mark("received")
        os.kill(os.getpid(), signal.SIGKILL)
    if job.rank == 3:
        dist.recv(torch.ones(1), 2)
        job.mark("received")
        said(dist.recv, torch.ones(1), 2)


@program(4, [(0, ""), (0, ""), KILLED, LOST_2])
def receives_a_first_message_from_a_killed_rank(job):
    job.join()
    dist.barrier()
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.rank == 3:
        said(dist.recv, torch.ones(1), 2)
    job.await_end(2)


@program(4, [(0, ""), (0, ""), KILLED, (0, r"PeerLost: .*rank 3 lost rank 2(.|\n)*PeerLost: .*rank 3 lost rank 2")])
def calls_in_a_group_whose_other_rank_was_killed(job):
    job.join()
    group = dist.new_group([2, 3])
    if job.rank in (2, 3):
        dist.all_reduce(torch.ones(1), group=group)
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.rank == 3:
        said(dist.all_reduce, torch.ones(1), group=group)
        said(dist.recv, torch.ones(1), 2, group=group)
    job.await_end(2)


@program(3, [(0, "PeerLost: .*lost rank 2"), (0, "PeerLost: .*lost rank 2"), KILLED])
def makes_a_group_with_a_killed_rank(job):
    job.join()
    dist.barrier()
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    job.await_end(2)
    said(dist.new_group, [0, 1, 2])


@program(3, [(0, "PeerLost: .*lost rank [12]"), (0, "PeerLost: .*lost rank [02]"), (0, "^done$")])
def makes_a_group_with_a_rank_that_has_left(job):
    job.join()
    dist.barrier()
    if job.rank == 2:
        return say("done")
    job.await_end(2)
    said(dist.new_group, [0, 1, 2])


@program(2, (0, "(destroyed|process group is closed|lost rank)(.|\n)*done"))
def destroys_with_receives_pending(job):
    job.join()
    dist.barrier()
    works = [dist.irecv(torch.zeros(3), 1 - job.rank), dist.irecv(torch.zeros(3), 1 - job.rank, tag=5)]
    # torch 1.13 leaves it to the last reference.
    begin = time.monotonic()
    dist.destroy_process_group()
    say(f"destroyed after {time.monotonic() - begin:.1f} s")
    for work in works:
        said(work.wait)
    assert time.monotonic() - begin < 60, "it waited for a message that never came"
    say("done")


def in_a_loop(job, join):
    for turn in range(12):
        join()
        tensor = torch.full((3,), float(job.rank + turn))
        dist.all_reduce(tensor)
        assert tensor[0] == job.size * turn + job.size * (job.size - 1) / 2, (turn, tensor)
        dist.destroy_process_group()
    say("done")


@program(3, DONE)
def joins_and_leaves_in_a_loop_over_one_store(job):
    store = job.tcp_store()
    # torch 1.13 counts in its own keys, which it never removes.
    turn = iter(range(100))
    join = lambda: job.join(store=store if torch.__version__ >= "2" else dist.PrefixStore(str(next(turn)), store))  # noqa: E731
    in_a_loop(job, join)
    # Rank 0's process has the store.
    job.mark(f"over {job.rank}")
    for rank in range(job.size):
        job.await_mark(f"over {rank}")


@program(3, DONE)
def joins_and_leaves_in_a_loop_over_env(job):
    if torch.__version__ < "2":
        # It cannot, over any backend: its own barrier counts on in a server that a rank ahead has reached.
        return say("done")
    if job.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            job.mark(f"port {free.getsockname()[1]}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=job.await_mark("port ").split()[1])
    in_a_loop(job, lambda: job.join(init_method="env://"))


@program(3, (0, "^keys 0$"))
def leaves_no_keys_of_groups_and_messages(job):
    store = job.tcp_store()
    job.join(store=store)
    before = None
    for turn in range(3):
        group = dist.new_group([0, 1, 2])
        dist.all_reduce(torch.ones(1), group=group)
        if job.rank == 0:
            dist.send(torch.ones(1), 1, group=group)
        if job.rank == 1:
            dist.recv(torch.ones(1), 0, group=group)
        dist.barrier(group=group)
        job.mark(f"turn {turn} of {job.rank}")
        for rank in range(job.size):
            job.await_mark(f"turn {turn} of {rank}")
        now = store.num_keys()
        job.mark(f"counted {turn} of {job.rank}")
        for rank in range(job.size):
            job.await_mark(f"counted {turn} of {rank}")
        # torch may add one of its own for a group's barrier; how many more are ours.
        growth, before = 0 if before is None else max(0, now - before - 1), now
    say("keys", growth)
    job.mark(f"over {job.rank}")
    for rank in range(job.size):
        job.await_mark(f"over {rank}")


@program(2, DONE)
def works_that_nobody_waits_for_hold_no_memory(job):
    job.join()
    for how in ("polled", "dropped"):
        tensors = []
        for _ in range(60):
            tensor = torch.ones(1 << 18)
            tensors.append(weakref.ref(tensor))
            work = dist.all_reduce(tensor, async_op=True)
            while how == "polled" and not work.is_completed():
                time.sleep(0.0001)
            alive = sum(one() is not None for one in tensors)
            assert how == "dropped" or alive < 10, f"{how}: {alive} tensors are alive"
            del work, tensor
        dist.barrier()
        alive = sum(one() is not None for one in tensors)
        assert alive < 10, f"{how}: {alive} tensors are alive"
    say("done")


@program(2, DONE)
def all_to_all_with_and_without_lengths(job):
    job.join()
    for turn in range(2):
        got, sent = torch.zeros(4), torch.arange(4.0) + 10 * job.rank
        if job.rank == turn:
            dist.all_to_all_single(got, sent)
        else:
            dist.all_to_all_single(got, sent, [2, 2], [2, 2])
        assert got.tolist() == [2.0 * job.rank, 2 * job.rank + 1, 10 + 2.0 * job.rank, 11 + 2 * job.rank], got
        dist.all_reduce(torch.ones(3)) if job.rank == turn else dist.all_reduce_coalesced([torch.ones(3)])
    say("done")


@program(2, DONE)
def waits_with_any_time_out(job):
    job.join()
    group = dist.distributed_c10d._get_default_group()
    for seconds in (1e19, 1e300, float("inf"), 10**400, 1e-9):
        if job.backend != "tinynccl":
            break
        work = group.comm.all_reduce(torch.ones(100_000), async_op=True)
        try:
            work.wait(seconds) if seconds != 10**400 else work.wait()
        except TimeoutError:
            assert seconds < 1
            work.wait()
        other = group.send([torch.ones(1)], 1, 0) if job.rank == 0 else group.recv([torch.ones(1)], 0, 0)
        other.wait(min(seconds, 1e19) if seconds > 1 else None)
        assert group.comm.probe(1 - job.rank, 1e-3 if seconds < 1 else 0.0) in (True, False)
    say("done")


@program(2, [(4, ""), (0, "PeerLost: .*lost rank 0")])
def receives_while_the_host_of_the_store_exits(job):
    job.join(store=job.tcp_store())
    dist.barrier()
    if job.rank == 0:
        job.await_mark("receives")
        os._exit(4)
    job.mark("receives")
    said(dist.recv, torch.ones(1), 0)
