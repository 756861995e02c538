"""How long a communicator takes to lose a killed rank and to take a new one in, over any libnccl. Needs two GPUs.

    python3 scripts/nccl/membership_times.py [--rounds 20] LIBNCCL...

Rank 0 stays for all rounds. In each one rank 1 is killed in a loop of calls (SIGKILL), rank 0 shrinks to itself with
NCCL_SHRINK_ABORT while a call waits for the dead rank, and grows to two ranks with a process that has started and waits:
ncclCommGrow, or ncclCommInitRank where the library has none. Each time ends with the first finished all_reduce of the new
communicator, of 1 MiB, whose values are checked. Libraries take turns, round by round. A row per library: medians and
ranges in ms. Exit status: 0 all rounds passed, 1 one failed, 77 no CUDA runtime or fewer than two GPUs.
"""

import argparse
import ctypes
import glob
import os
import select
import signal
import statistics
import subprocess
import sys
import time

COUNT = 1 << 18
FLOAT, SUM = 7, 0
SHRINK_ABORT = 1
LIMIT = 120


def cuda_runtime():
    for name in ["libcudart.so.13", "libcudart.so.12", *sorted(glob.glob("/usr/local/cuda*/lib64/libcudart.so"))]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            pass
    return None


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Rank:
    """One process's GPU and its libnccl."""

    def __init__(self, library, gpu):
        self.cuda, self.nccl = cuda_runtime(), ctypes.CDLL(library)
        self.nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        self.stream, self.input, self.output = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.ok(self.cuda.cudaSetDevice(gpu))
        self.ok(self.cuda.cudaStreamCreateWithFlags(ctypes.byref(self.stream), 1))
        for buffer in (self.input, self.output):
            self.ok(self.cuda.cudaMalloc(ctypes.byref(buffer), ctypes.c_size_t(4 * COUNT)))
        self.host = (ctypes.c_float * COUNT)(*[1.0] * COUNT)
        self.ok(self.cuda.cudaMemcpy(self.input, self.host, ctypes.c_size_t(4 * COUNT), 1))

    def ok(self, status):
        if status:
            raise RuntimeError(f"CUDA status {status}")

    def done(self, status):
        if status:
            why = self.nccl.ncclGetErrorString(status).decode(), self.nccl.ncclGetLastError(None).decode()
            raise RuntimeError(": ".join(why))

    def all_reduce(self, comm):
        self.done(self.nccl.ncclAllReduce(self.input, self.output, ctypes.c_size_t(COUNT), FLOAT, SUM, comm, self.stream))

    def checked(self, comm, size):
        """The first call of a communicator."""
        self.all_reduce(comm)
        self.ok(self.cuda.cudaStreamSynchronize(self.stream))
        finished = time.monotonic()
        self.ok(self.cuda.cudaMemcpy(self.host, self.output, ctypes.c_size_t(4 * COUNT), 2))
        if set(self.host) != {float(size)}:
            raise RuntimeError(f"wrong values: expected {size}, got {sorted(set(self.host))[:4]}")
        return finished

    def new_id(self, comm=None):
        unique = UniqueId()
        make = self.nccl.ncclGetUniqueId if comm is None else self.nccl.ncclCommGetUniqueId
        self.done(make(*([] if comm is None else [comm]), ctypes.byref(unique)))
        return unique

    def joined(self, unique, rank, comm=None):
        """A communicator of two ranks; `comm` is that of the rank which is there."""
        new = ctypes.c_void_p()
        if hasattr(self.nccl, "ncclCommGrow") and rank != 0:
            self.done(self.nccl.ncclCommGrow(None, 2, ctypes.byref(unique), rank, ctypes.byref(new), None))
        elif hasattr(self.nccl, "ncclCommGrow") and comm is not None:
            self.done(self.nccl.ncclCommGrow(comm, 2, ctypes.byref(unique), -1, ctypes.byref(new), None))
        else:
            self.done(self.nccl.ncclCommInitRank(ctypes.byref(new), 2, unique, rank))
        return new


def newcomer(library):
    """Rank 1: joins with the id that it reads, and makes calls until it is killed."""
    rank = Rank(library, 1)
    print("ready", flush=True)
    unique = UniqueId.from_buffer_copy(bytes.fromhex(sys.stdin.readline().strip()))
    comm = rank.joined(unique, 1)
    rank.checked(comm, 2)
    print("member", flush=True)
    while True:
        rank.all_reduce(comm)
        rank.ok(rank.cuda.cudaStreamSynchronize(rank.stream))


def survivor(library):
    """Rank 0: does what it reads, `grow` or `shrink`, and says how many milliseconds that took."""
    rank, comm, alone = Rank(library, 0), None, None
    # A communicator of itself to grow from, as after a shrink.
    alone = ctypes.c_void_p()
    rank.done(rank.nccl.ncclCommInitRank(ctypes.byref(alone), 1, rank.new_id(), 0))
    rank.checked(alone, 1)
    grows = hasattr(rank.nccl, "ncclCommGrow")
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "grow":
            began = time.monotonic()
            unique = rank.new_id(alone if grows else None)
            print(bytes(unique.internal).hex(), flush=True)
            comm = rank.joined(unique, 0, alone)
            print(1000 * (rank.checked(comm, 2) - began), flush=True)
            rank.done(rank.nccl.ncclCommDestroy(alone))
        else:
            try:
                # Waits for the dead rank, unless the library knows by now that it is dead.
                rank.all_reduce(comm)
            except RuntimeError:
                pass
            began, alone = time.monotonic(), ctypes.c_void_p()
            out = (ctypes.c_int * 1)(1)
            rank.done(rank.nccl.ncclCommShrink(comm, out, 1, ctypes.byref(alone), None, SHRINK_ABORT))
            print(1000 * (rank.checked(alone, 1) - began), flush=True)
            rank.done(rank.nccl.ncclCommAbort(comm))
            print("aborted", flush=True)


class Process:
    def __init__(self, role, library):
        command = [sys.executable, os.path.abspath(__file__), "--role", role, library]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def line(self):
        if not select.select([self.child.stdout], [], [], LIMIT)[0]:
            raise RuntimeError(f"no answer within {LIMIT} s")
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"ended with status {self.child.wait()}")
        return line.strip()

    def say(self, line):
        self.child.stdin.write(line + "\n")

    def kill(self):
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()


class Trial:
    def __init__(self, library):
        self.library, self.times, self.failed = library, {"shrink": [], "grow": []}, None
        self.stays, self.next = Process("survivor", library), Process("newcomer", library)
        self.stays.line()

    def round(self):
        joins, self.next = self.next, Process("newcomer", self.library)
        try:
            joins.line()
            self.stays.say("grow")
            joins.say(self.stays.line())
            self.times["grow"].append(float(self.stays.line()))
            joins.line()
            joins.kill()
            self.stays.say("shrink")
            self.times["shrink"].append(float(self.stays.line()))
            self.stays.line()
        except RuntimeError as why:
            self.failed = f"round {len(self.times['shrink']) + 1}: {why}"
        finally:
            joins.kill()

    def end(self):
        self.stays.kill()
        self.next.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+", metavar="LIBNCCL")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--role", choices=["survivor", "newcomer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        return {"survivor": survivor, "newcomer": newcomer}[options.role](options.libraries[0])
    cuda, gpus = cuda_runtime(), ctypes.c_int()
    if cuda is None or cuda.cudaGetDeviceCount(ctypes.byref(gpus)) or gpus.value < 2:
        print("membership_times: no CUDA runtime, or fewer than two GPUs")
        return 77
    trials = [Trial(library) for library in options.libraries]
    for _ in range(options.rounds):
        for trial in trials:
            if trial.failed is None:
                trial.round()
    for trial in trials:
        trial.end()
        version = ctypes.c_int()
        ctypes.CDLL(trial.library).ncclGetVersion(ctypes.byref(version))
        for what, times in trial.times.items():
            row = f"{statistics.median(times):.1f} ms, {min(times):.1f} to {max(times):.1f}" if times else "no round"
            print(f"{trial.library} ({version.value}): {what}, {len(times)} rounds: {row}")
        if trial.failed:
            print(f"{trial.library}: FAILED {trial.failed}")
    return 1 if any(trial.failed for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
