"""From `kill -9` of a rank to the next all_reduce, by torch 2.15's `_reconfigure`: this backend and gloo in turn.

    python reconfigure.py [--ranks 5] [--rounds 4] [--backends tinynccl gloo]

In each round every backend has a turn: a group of `--ranks` processes, whose highest rank is killed in a loop of all_reduce
(4 KiB), until two are left. A survivor catches the error, aborts its backend, and calls `_reconfigure` with the survivors'
handles, which they have exchanged before, in reverse order. Prints Markdown: medians and the longest, over the kills, of the
slowest survivor's times. A rank of gloo that is no neighbour of the dead one in its ring may wait for the time-out.
"""

import argparse
import datetime
import multiprocessing
import os
import signal
import statistics
import sys
import time

import torch
import torch.distributed as dist

LIMIT = datetime.timedelta(seconds=60)


def rank(me, size, backend, port, timeout, results):
    if backend == "tinynccl":
        import tinynccl.torch  # noqa: F401
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    own = dist.PrefixStore("init", store)
    dist.init_process_group(backend, store=own, rank=me, world_size=size, timeout=timeout, enable_reconfigure=True)
    left, data = list(range(size)), torch.ones(1024)
    for number in range(size - 1):
        # By their handles of now.
        if number == 0:
            dist._reconfigure(1, handles(store, me, left, 0), timeout=LIMIT).wait()
        dist.all_reduce(data.fill_(1.0))
        if len(left) == 2:
            break
        given = handles(store, me, left, number + 1)
        all_come(store, f"ready-{number}", me, left)
        lost, left = left[-1], left[:-1]
        now = list(reversed(left))
        end = time.monotonic() + 0.05
        try:
            while True:
                dist.all_reduce(data.fill_(1.0))
                if me == lost and time.monotonic() > end:
                    results.put((backend, number, "kill", time.monotonic()))
                    results.close()
                    results.join_thread()
                    os.kill(os.getpid(), signal.SIGKILL)
        except RuntimeError:
            noticed = time.monotonic()
            dist.get_backend_impl(None, torch.device("cpu")).abort()
        dist._reconfigure(number + 2, [given[other] for other in now], timeout=LIMIT).wait()
        dist.all_reduce(data.fill_(1.0))
        assert data[0] == len(left) and dist.get_rank() == now.index(me), (data[0], left)
        results.put((backend, number, "survivor", (noticed, time.monotonic())))
    all_come(store, "end", me, left)
    dist.destroy_process_group()


def all_come(store, what, me, left):
    store.set(f"{what}-{me}", "1")
    store.wait([f"{what}-{other}" for other in left])


def handles(store, me, left, number):
    store.set(f"handle-{number}-{me}", dist._get_reconfigure_handle())
    return [store.get(f"handle-{number}-{other}").decode() for other in left]


def turn(context, backend, size, timeout):
    """Milliseconds of the slowest survivor of each kill: from it to the error, from there to the all_reduce, and both."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    results = context.Queue()
    processes = [context.Process(target=rank, args=(me, size, backend, store.port, timeout, results), daemon=True) for me in range(size)]
    for process in processes:
        process.start()
    rounds, kills = {}, {}
    for _ in range(sum(survivors + 1 for survivors in range(2, size))):
        _, number, kind, value = results.get(timeout=120)
        if kind == "kill":
            kills[number] = value
        else:
            rounds.setdefault(number, []).append(value)
    for process in processes:
        process.join(60)
    found = []
    for number, values in rounds.items():
        noticed, done = (max(times) for times in zip(*values))
        found.append([1e3 * (noticed - kills[number]), 1e3 * (done - noticed), 1e3 * (done - kills[number])])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--backends", nargs="+", default=["tinynccl", "gloo"])
    parser.add_argument("--timeout", type=float, default=5.0, help="of calls, in seconds")
    arguments = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        print(f"SKIPPED: torch {torch.__version__} has no _reconfigure; torch 2.15 has", file=sys.stderr)
        sys.exit(77)
    found = {backend: [] for backend in arguments.backends}
    # torch is imported once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tinynccl.torch"])
    for _ in range(arguments.rounds):
        for backend in arguments.backends:
            found[backend] += turn(context, backend, arguments.ranks, datetime.timedelta(seconds=arguments.timeout))
    print(f"torch {torch.__version__}, {arguments.ranks} processes; ms from kill -9, median (longest)\n")
    print("| backend | kills | all have an error | from there to the all_reduce | kill to all_reduce |\n|---|--:|--:|--:|--:|")
    for backend, kills in found.items():
        row = " | ".join(f"{statistics.median(times):.0f} ({max(times):.0f})" for times in zip(*kills))
        print(f"| {backend} | {len(kills)} | {row} |")


if __name__ == "__main__":
    main()
