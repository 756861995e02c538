"""``Comm`` over numpy arrays: every call, type and shape; what is refused; what happens to the others."""

import array
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import numpy

import tinynccl
from harness import ranks

TYPES = ["f4", "f8", "f2", "i1", "u1", "i4", "u4", "i8", "u8"]
SHAPES = [(0,), (1,), (3,), (7, 3), (1000,), (5, 1, 4001)]
OPS = {"sum": numpy.add, "prod": numpy.multiply, "min": numpy.minimum, "max": numpy.maximum}


def make(rank, shape, dtype, salt=0):
    """Small whole numbers: sums and products of four ranks are exact in every type."""
    count = int(numpy.prod(shape, dtype=int))
    return ((numpy.arange(count) + rank + salt) % 3 + 1).astype(dtype).reshape(shape)


def check(got, want, what):
    assert got.dtype == want.dtype and numpy.array_equal(got, want), f"{what}: {got} is not {want}"


def every_collective(comm):
    rank, n = comm.rank, comm.size
    calls = 0
    for dtype, shape in itertools.product(TYPES, SHAPES):
        inputs = [make(r, shape, dtype) for r in range(n)]
        mine, what = inputs[rank], f"{dtype} {shape} rank {rank} of {n}"
        for name, function in OPS.items():
            want = inputs[0]
            for other in inputs[1:]:
                want = function(want, other)
            output = numpy.zeros_like(mine)
            comm.all_reduce(mine, output, op=name)
            check(output, want, f"all_reduce {name} {what}")
            in_place = mine.copy()
            comm.all_reduce(in_place, op=name)
            check(in_place, want, f"all_reduce {name} in place {what}")
            output = numpy.zeros_like(mine)
            comm.reduce(mine, output if rank == n - 1 else None, op=name, root=n - 1)
            if rank == n - 1:
                check(output, want, f"reduce {name} {what}")
            wide = [numpy.stack([make(r, shape, dtype, salt=s) for s in range(n)]) for r in range(n)]
            want = wide[0][rank]
            for other in wide[1:]:
                want = function(want, other[rank])
            output = numpy.zeros_like(mine)
            comm.reduce_scatter(wide[rank], output, op=name)
            check(output, want, f"reduce_scatter {name} {what}")
            calls += 4
        for root in range(n):
            buffer = mine.copy() if rank == root else numpy.zeros_like(mine)
            comm.broadcast(buffer, root)
            check(buffer, inputs[root], f"broadcast from {root} {what}")
            everyone = numpy.zeros((n, *shape), dtype) if rank == root else None
            comm.gather(mine, everyone, root)
            if rank == root:
                check(everyone, numpy.stack(inputs), f"gather {what}")
            output = numpy.zeros_like(mine)
            comm.scatter(numpy.stack(inputs) if rank == root else None, output, root)
            check(output, mine, f"scatter {what}")
            calls += 3
        everyone = numpy.zeros((n, *shape), dtype)
        comm.all_gather(mine, everyone)
        check(everyone, numpy.stack(inputs), f"all_gather {what}")
        wide = [numpy.stack([make(r, shape, dtype, salt=s) for s in range(n)]) for r in range(n)]
        comm.all_to_all(wide[rank], everyone)
        check(everyone, numpy.stack([wide[r][rank] for r in range(n)]), f"all_to_all {what}")
        calls += 2
    comm.barrier()
    return calls


def other_kinds(comm):
    """bool, types that only move, lengths per rank, messages, groups, asynchronous calls, split, other exporters."""
    rank, n = comm.rank, comm.size
    flags = numpy.array([rank == 0, True, False])
    comm.all_reduce(flags)
    check(flags, numpy.array([True, True, False]), "any")
    flags = numpy.array([rank == 0, True, False])
    comm.all_reduce(flags, op="min")
    check(flags, numpy.array([n == 1, True, False]), "all")

    complex_numbers = numpy.full(3, 1 + 2j) if rank == 0 else numpy.zeros(3, complex)
    comm.broadcast(complex_numbers)
    check(complex_numbers, numpy.full(3, 1 + 2j), "complex broadcast")
    shorts = numpy.zeros((n, 2), numpy.int16)
    comm.all_gather(numpy.full(2, rank, numpy.int16), shorts)
    check(shorts, numpy.repeat(numpy.arange(n, dtype=numpy.int16), 2).reshape(n, 2), "int16 all_gather")

    counts = [r % 3 for r in range(n)]
    output = numpy.full(sum(counts), -1)
    comm.all_gather(numpy.full(counts[rank], rank), output, counts)
    check(output, numpy.repeat(numpy.arange(n), counts), "all_gather of different lengths")
    send, recv = [rank + 1] * n, [r + 1 for r in range(n)]
    output = numpy.full(sum(recv), -1)
    comm.all_to_all(numpy.full(sum(send), rank), output, send, recv)
    check(output, numpy.repeat(numpy.arange(n), recv), "all_to_all of different lengths")

    mine, theirs = numpy.full(300_000, rank), numpy.zeros(300_000, int)
    with comm.group():
        comm.send(mine, (rank + 1) % n)
        comm.recv(theirs, (rank - 1) % n)
    assert (theirs == (rank - 1) % n).all()
    if n > 1:
        assert not comm.probe((rank - 1) % n), "nothing was sent"
        comm.barrier()
        comm.send(mine[:5], (rank + 1) % n)
        assert comm.probe((rank - 1) % n, 30.0)
        comm.recv(theirs[:5], (rank - 1) % n)
    pairs = [numpy.full(4, rank, "f4") for _ in range(20)]
    with comm.group(async_op=True) as group:
        for pair in pairs:
            comm.all_reduce(pair)
    group.work.wait()
    assert all((pair == n * (n - 1) / 2).all() for pair in pairs)

    works = [comm.all_reduce(numpy.ones(size, "f4"), async_op=True) for size in (1, 100_000, 3)]
    late = numpy.full(1, rank)
    comm.all_reduce(late)
    assert all(work.is_completed() and work.exception() is None for work in works), "a blocking call comes after them"
    told = threading.Event()
    comm.barrier(async_op=True).add_done_callback(told.set)
    assert told.wait(30)

    half = comm.split(rank % 2, key=-rank)
    one = numpy.array([rank])
    half.all_reduce(one)
    assert one[0] == sum(range(rank % 2, n, 2)) and half.rank == half.size - 1 - rank // 2, (one, half)
    half.close()
    assert comm.split(None if rank else 0) is None or rank == 0

    plain = array.array("d", [rank + 0.5])
    comm.all_reduce(plain)
    assert plain[0] == n * (n - 1) / 2 + n / 2
    raw = bytearray([rank])
    comm.broadcast(raw, n - 1)
    assert raw[0] == n - 1


class OnlyDlpack:
    """An object whose only way to its memory is DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **_):
        return self._array.__dlpack__()


def dlpack(comm):
    memory = numpy.full((2, 3), float(comm.rank))
    comm.all_reduce(OnlyDlpack(memory))
    check(memory, numpy.full((2, 3), comm.size * (comm.size - 1) / 2.0), "DLPack")


def refused(comm):
    """Nothing is sent: the communicator works on. Each message names our rank and what was wrong."""
    n, rank = comm.size, comm.rank
    f4 = lambda *shape: numpy.zeros(shape, "f4")  # noqa: E731
    frozen = f4(3)
    frozen.flags.writeable = False
    cases = [
        (lambda: comm.all_reduce(f4(3), f4(4)), ["all_reduce", "the input has 3 elements, the output 4"]),
        (lambda: comm.all_reduce(f4(3), numpy.zeros(3)), ["f32 on cpu", "f64 on cpu"]),
        (lambda: comm.all_reduce(f4(4, 4).T), ["not contiguous", "strides (4, 16)"]),
        (lambda: comm.all_reduce(f4(8)[::2]), ["not contiguous"]),
        (lambda: comm.all_reduce(frozen), ["read-only"]),
        (lambda: comm.all_reduce(numpy.zeros(2, complex)), ["sum of a type of 16 bytes that cannot be reduced"]),
        (lambda: comm.all_reduce(numpy.zeros(2, "c8")), ["cannot be reduced"]),
        (lambda: comm.all_reduce(numpy.zeros(2, ">f4")), ["byte order"]),
        (lambda: comm.all_reduce(numpy.array(["a"])), ["format"]),
        (lambda: comm.all_reduce(numpy.zeros(2, bool), op="avg"), ["avg of bool"]),
        (lambda: comm.all_reduce(f4(2), op="xor"), ["unknown operator 'xor'"]),
        (lambda: comm.all_reduce([1.0, 2.0]), ["list has no memory that can be reached"]),
        (lambda: comm.broadcast(f4(1), n), [f"root is {n}", f"0..{n}"]),
        (lambda: comm.broadcast(f4(1), -1), ["root is -1"]),
        (lambda: comm.all_gather(f4(2), f4(2 * n + 1)), [f"{2 * n + 1} elements, expected {n} ranks x 2"]),
        (lambda: comm.reduce_scatter(f4(1), f4(1)) if n > 1 else comm.reduce_scatter(f4(2), f4(1)), ["expected"]),
        (lambda: comm.all_to_all(f4(2 * n), f4(2 * n), [1] * n, [2] * n), ["splits"]),
        (lambda: comm.all_to_all(f4(2 * n), f4(2 * n), [2] * n), ["give both"]),
        (lambda: comm.send(f4(1), n), [f"peer is {n}"]),
        (lambda: comm.send(f4(1), rank), ["itself"]),
        (lambda: comm.probe(rank), ["itself"]),
        (lambda: comm.probe(n), [f"peer is {n}"]),
        (lambda: comm.probe(0, -1.0), ["a timeout of -1 seconds"]),
        (lambda: comm.gather(f4(1), None, rank), ["no output given"]),
    ]
    memory = f4(10)
    cases.append((lambda: comm.all_reduce(memory[:6], memory[4:]), ["overlap"]))
    for call, words in cases:
        try:
            call()
        except tinynccl.InvalidArgument as error:
            text = str(error)
            assert f"rank {rank}" in text and all(word in text for word in words), f"{words}: {text}"
        else:
            raise AssertionError(f"not refused: {words}")
    for color, key, wrong in ((-2, 0, OverflowError), ("a", 0, TypeError), (0, 1 << 40, OverflowError)):
        try:
            comm.split(*((color, key) if rank == 0 else (0, 0)))
        except wrong:
            assert rank == 0
        except tinynccl.InvalidArgument as error:
            assert rank != 0 and "rank 0 does not take part: its arguments of split are wrong" in str(error), error
        else:
            raise AssertionError(f"not refused: split({color}, {key})")
    one = numpy.ones(1)
    comm.all_reduce(one)
    assert one[0] == n
    comm.close()
    try:
        comm.barrier()
    except tinynccl.InvalidArgument as error:
        assert "closed" in str(error)
        return
    raise AssertionError("a closed communicator took a call")


def lengths_that_differ(comm, large):
    comm.all_reduce(numpy.zeros((100_000 if large else 3) + comm.rank, "f4"))


def types_that_differ(comm):
    comm.all_reduce(numpy.zeros(4, ["f4", "i4"][comm.rank]))


def calls_that_differ(comm):
    if comm.rank == 0:
        comm.all_reduce(numpy.zeros(4))
    else:
        comm.broadcast(numpy.zeros(4))


def one_leaves(comm, how):
    comm.barrier()
    if comm.rank == 1:
        if how == "exit":
            sys.exit(3)
        os._exit(4)
    # Whether the loss is known before this call or not.
    try:
        comm.all_reduce(numpy.zeros(100))
    except tinynccl.PeerLost:
        comm.barrier()


def one_is_late(comm):
    comm.barrier()
    if comm.rank == 1:
        time.sleep(3)
        return
    comm.all_reduce(numpy.zeros(100))


def interrupted(comm, path, kind):
    comm.barrier()
    if comm.rank == 1:
        # Waits for rank 0's end, by another way than the one that is interrupted.
        try:
            while True:
                comm.recv(numpy.zeros(1), 0)
        except tinynccl.Error as error:
            return str(error)
    # Later, so that the call most likely waits by then; it must end as well if it does not.
    threading.Timer(0.5, pathlib.Path(path).touch).start()
    if kind == "blocking":
        comm.all_reduce(numpy.zeros(100))
    elif kind == "async":
        comm.all_reduce(numpy.zeros(100), async_op=True).wait()
    else:
        comm.recv(numpy.zeros(100), 1)


def closed_in_use(comm):
    """Another thread closes while calls are in flight: they end first."""
    works = [comm.all_reduce(numpy.ones(200_000, "f4"), async_op=True) for _ in range(4)]
    closer = threading.Thread(target=comm.close)
    closer.start()
    for work in works:
        work.wait()
    closer.join(30)
    assert comm.closed
    try:
        comm.barrier()
    except tinynccl.InvalidArgument:
        return
    raise AssertionError("a closed communicator took a call")


def aborted_in_use(comm):
    comm.barrier()
    if comm.rank == 1:
        comm.abort("a test wants it")
    try:
        comm.all_reduce(numpy.zeros(4))
    except tinynccl.Aborted as error:
        return str(error)


class Ranks(unittest.TestCase):
    def all_return(self, outcomes):
        for rank, outcome in enumerate(outcomes):
            self.assertEqual((outcome.kind, outcome.exitcode), ("returned", 0), f"rank {rank}: {outcome}")
        return [outcome.value for outcome in outcomes]

    def all_raise(self, outcomes, *words, exitcodes=(0,)):
        for rank, outcome in enumerate(outcomes):
            self.assertEqual(outcome.kind, "raised", f"rank {rank}: {outcome}")
            self.assertIn(outcome.exitcode, exitcodes, outcome)
            for word in words:
                self.assertRegex(outcome.value, word)

    def test_every_collective(self):
        for size in (1, 2, 3):
            self.assertGreater(self.all_return(ranks(size, every_collective))[0], 900)

    def test_other_kinds(self):
        for size in (2, 3):
            self.all_return(ranks(size, other_kinds))

    def test_dlpack(self):
        self.all_return(ranks(2, dlpack))

    def test_settings_that_are_refused(self):
        server = tinynccl.Server(1)
        for blocks in (1, 129):
            with self.assertRaisesRegex(tinynccl.ConfigError, f"TINYNCCL_CUDA_BLOCKS.*{blocks}.*expected 2 to 128"):
                tinynccl.Comm(server.unique_id, 0, 1, cuda_blocks=blocks)
        with tinynccl.Comm(server.unique_id, 0, 1, cuda_blocks=2) as comm:
            self.assertEqual(comm.size, 1)

    def test_refused(self):
        self.all_return(ranks(2, refused))

    def test_lengths_that_differ(self):
        for large in (False, True):
            outcomes = ranks(2, lengths_that_differ, large)
            # The rank that notices first names both; the other may only see the abort.
            self.all_raise(outcomes, "^(Mismatch|Aborted): ")
            noticed = [o.value for o in outcomes if o.value.startswith("Mismatch")]
            self.assertTrue(noticed, outcomes)
            self.assertRegex(noticed[0], r"rank 0 and rank 1|rank 1 and rank 0")
            self.assertIn("100001" if large else "count 4", noticed[0].replace("count=4", "count 4").replace(" 4 ", " count 4 "))

    def test_types_and_calls_that_differ(self):
        self.all_raise(ranks(2, types_that_differ), "f32", "i32")
        self.all_raise(ranks(2, calls_that_differ), "all_reduce", "broadcast")

    def test_one_leaves(self):
        for how, exitcode in (("exit", None), ("kill", 4)):
            outcomes = ranks(2, one_leaves, how)
            self.assertRegex(outcomes[0].value, "PeerLost: barrier: rank 0 lost rank 1", outcomes)
            self.assertEqual(outcomes[0].exitcode, 0)
            if exitcode:
                self.assertEqual(outcomes[1].exitcode, exitcode)

    def test_one_is_late(self):
        outcomes = ranks(2, one_is_late, timeout=1.0)
        self.assertRegex(outcomes[0].value, r"Timeout: all_reduce.*rank 0.*not arrived: rank 1")

    def test_interrupt(self):
        for kind in ("blocking", "async", "message"):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "ready")
                outcomes = ranks(2, interrupted, path, kind, timeout=100.0, interrupt=(0, path))
                self.assertTrue(outcomes[0].value.startswith("KeyboardInterrupt"), outcomes)
                self.assertEqual(outcomes[0].exitcode, 1, "the interpreter's own end")
                self.assertEqual(outcomes[1].kind, "returned", outcomes)
                self.assertRegex(outcomes[1].value, "rank 0")

    def test_closed_and_aborted_in_use(self):
        self.all_return(ranks(2, closed_in_use))
        for text in self.all_return(ranks(2, aborted_in_use)):
            self.assertIn("a test wants it", text)

    def test_the_interpreter_ends_with_a_communicator_open(self):
        script = (
            "import numpy, tinynccl\n"
            "server = tinynccl.Server(2)\n"
            "import subprocess, sys, os\n"
            "if len(sys.argv) == 1:\n"
            "    child = subprocess.Popen([sys.executable, '-c', os.environ['SCRIPT'], server.unique_id])\n"
            "    comm = tinynccl.Comm(server.unique_id, 0, 2, server=server, timeout=30)\n"
            "else:\n"
            "    comm = tinynccl.Comm(sys.argv[1], 1, 2, timeout=30)\n"
            "comm.barrier()\n"
            "if comm.rank == 0:\n"
            "    work = comm.all_reduce(numpy.zeros(3), async_op=True)\n"
        )
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "SCRIPT": script}, capture_output=True, text=True, timeout=60
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertLess(time.monotonic() - start, 25, "it waited for a call that nobody answers")


if __name__ == "__main__":
    unittest.main(verbosity=2)
