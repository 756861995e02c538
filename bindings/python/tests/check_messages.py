"""Messages between two ranks."""

import torch
import torch.distributed as dist

from checks import check, device, equal, full


@check("test_send_recv", "test_send_recv_with_tag (in order)", "test_send_recv_all_to_all")
def send_recv(rank, n):
    right, left = (rank + 1) % n, (rank - 1) % n
    for size in (0, 1, 1000, 300_000):
        mine, theirs = full(size, float(rank)), full(size, -1.0)
        if rank == 0:
            dist.send(mine, right)
            assert dist.recv(theirs, left) == left
        else:
            dist.recv(theirs, left)
            dist.send(mine, right)
        equal(theirs, float(left))


@check("test_isend", "test_irecv", "test_batch_isend_irecv_gloo", "test_batch_isend_irecv_ring_exchange_nccl", "test_batch_isend_irecv_self_nccl (not to itself)")
def isend_irecv(rank, n):
    others = [r for r in range(n) if r != rank]
    inputs = {r: full(400_000, -1.0) for r in others}
    # All send first, more than any buffer holds.
    works = [dist.isend(full(400_000, float(rank)), r) for r in others]
    works += [dist.irecv(inputs[r], r) for r in others]
    for work in works:
        work.wait()
    for r in others:
        equal(inputs[r], float(r))
    right, left = (rank + 1) % n, (rank - 1) % n
    theirs = full(3, -1.0)
    ops = [dist.P2POp(dist.isend, full(3, float(rank)), right), dist.P2POp(dist.irecv, theirs, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    equal(theirs, float(left))


@check("streams of messages")
def message_behind_its_stream(rank, n):
    """A message waits for the stream that was current when it was posted, not for that of its wait."""
    if device().type == "cpu":
        return
    right, left = (rank + 1) % n, (rank - 1) % n
    other, data, got = torch.cuda.Stream(), full(1 << 20, -1.0), full(1 << 20, -2.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)
        data.fill_(float(rank))
        sent = dist.isend(data, right)
    received = dist.irecv(got, left)
    received.wait()
    sent.wait()
    equal(got, float(left))


@check("test_reduce_scatter, uneven lengths beside other work")
def uneven_reduce_scatter_keeps_its_copies(rank, n):
    lengths = [100_000 + r for r in range(n)]
    parts, output = [full(length, 1.0) for length in lengths], full(lengths[rank], 0.0)
    work = dist.reduce_scatter(output, parts, async_op=True)
    # The allocator must not give these the memory of the copies.
    later = [full(length, 7.0) for length in lengths * 4]
    work.wait()
    equal(output, float(n))
    for tensor in later:
        equal(tensor, 7.0)


@check("test_irecv, posted before anything is sent")
def receives_first(rank, n):
    """The first messages of all pairs; none is sent before its sender's own receive was posted."""
    if rank == 0:
        receives = {r: (full(3, -1.0), r) for r in range(1, n)}
        works = [dist.irecv(tensor, r) for tensor, r in receives.values()]
        for r in range(1, n):
            dist.send(full(3, 1.0), r)
        for work in works:
            work.wait()
        for tensor, r in receives.values():
            equal(tensor, float(r), f"from {r}")
    else:
        got = full(3, 0.0)
        dist.recv(got, 0)
        dist.send(got * rank, 0)


@check("test_send_recv_any_source", "test_send_recv_any_source_autograd_profiler (the calls)")
def recv_any_source(rank, n):
    """From all, one message each, as they come; then all from all."""
    if rank == 0:
        for _ in range(3):
            found = set()
            for _ in range(n - 1):
                got = full(1, 0.0)
                source = dist.recv(got)
                equal(got, float(source))
                found.add(source)
            assert found == set(range(1, n)), found
            for r in range(1, n):
                dist.send(full(1, 0.0), r)
    else:
        for _ in range(3):
            dist.send(full(1, float(rank)), 0)
            # The next round begins when rank 0 has heard everybody.
            dist.recv(full(1, 1.0), 0)
    works = [dist.isend(full(100_000, float(rank)), r, tag=r) for r in range(n) if r != rank]
    found = []
    for _ in range(n - 1):
        got = full(100_000, -1.0)
        found.append(dist.recv(got, tag=rank))
        equal(got, float(found[-1]))
    assert sorted(found) == [r for r in range(n) if r != rank], found
    for work in works:
        work.wait()


@check("test_send_recv_any_source and test_send_recv_with_tag together")
def any_source_and_named(rank, n):
    """Receives of all kinds posted together take each message once, in the order of their posts where several fit."""
    others = [r for r in range(n) if r != rank]
    if rank == 0:
        any_of_5, any_of_6 = full(1, 0.0), full(1, 0.0)
        named = {r: full(1, 0.0) for r in others}
        first = dist.irecv(any_of_5, tag=5)
        works = [dist.irecv(named[r], r, tag=4) for r in others]
        second = dist.irecv(any_of_6, tag=6)
        dist.barrier()
        for work in [first, second, *works]:
            work.wait()
        equal(any_of_5, 5.0)
        assert first._source_rank() == 1, first._source_rank()
        equal(any_of_6, 6.0)
        assert second._source_rank() == n - 1, second._source_rank()
        for r in others:
            equal(named[r], 4.0 + r)
        # Receives that lost have taken nothing: these come from where they lay.
        for r in others:
            got = full(1, 0.0)
            assert dist.recv(got, r, tag=7) == r
            equal(got, 7.0 + r)
        # Two that anybody may answer, and one message of each.
        pair = [full(1, 0.0), full(1, 0.0)]
        works = [dist.irecv(tensor, tag=8) for tensor in pair[: len(others)]]
        for work in works:
            work.wait()
        for tensor, work in zip(pair, works):
            equal(tensor, 8.0 + work._source_rank())
        assert len({work._source_rank() for work in works}) == len(works)
    else:
        dist.barrier()
        works = [dist.isend(full(1, 7.0 + rank), 0, tag=7)]
        if rank == 1:
            works.append(dist.isend(full(1, 5.0), 0, tag=5))
        if rank == n - 1:
            works.append(dist.isend(full(1, 6.0), 0, tag=6))
        works.append(dist.isend(full(1, 4.0 + rank), 0, tag=4))
        works.append(dist.isend(full(1, 8.0 + rank), 0, tag=8))
        for work in works:
            work.wait()


@check("test_send_recv_with_tag (out of order)")
def tags_out_of_order(rank, n):
    right, left = (rank + 1) % n, (rank - 1) % n
    sizes = {1: 3, 2: 100_000, 3: 0, 4: 3}
    works = [dist.isend(full(size, float(tag)), right, tag=tag) for tag, size in sizes.items()]
    works += [dist.isend(full(1, 5.0, torch.float64), right, tag=1)]
    found = {tag: full(sizes[tag], 0.0) for tag in (4, 2, 3, 1)}
    works += [dist.irecv(tensor, left, tag=tag) for tag, tensor in found.items()]
    second = full(1, 0.0, torch.float64)
    works += [dist.irecv(second, left, tag=1)]
    for work in works:
        work.wait()
    for tag, tensor in found.items():
        equal(tensor, float(tag), f"tag {tag}")
    equal(second, 5.0, "the second of tag 1")
    # Tag 6 comes before anybody has asked for it.
    works = [dist.isend(full(3, float(tag)), right, tag=tag) for tag in (6, 7)]
    for tag in (7, 6):
        tensor = full(3, 0.0)
        dist.recv(tensor, left, tag=tag)
        equal(tensor, float(tag), f"tag {tag}")
    for work in works:
        work.wait()
