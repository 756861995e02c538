"""torchft over a libnccl, or over the backend "tinynccl": replica groups lose and gain members while training goes on.

    python3 scripts/nccl/torchft_trial.py [--rounds 20] [--library $PWD/target/release/libnccl.so] [--timeout 5]
    python3 scripts/nccl/torchft_trial.py --backend tinynccl|gloo

Needs PyTorch and torchft, and two GPUs for the backend nccl; the others train on the CPU. A lighthouse and two replica groups of
one process each, every group by torchrun, with torchft's own Manager and process group, over nccl also its DDP (whose hook in
torchft 0.2 ends the process when a call's wait raises, as it does on the CPU, over gloo as well). Every round kills the process
of one group with SIGKILL and starts the group again a second later. The other one must go on, the new one must join, and both
must have the same parameters after the same step. Rounds kill the groups in turn, so each group has been the survivor and the
newcomer. A row per round: the survivor's longest step, the time from the kill to the first step that both made. Exit status: 0
all rounds passed, 1 one failed, 77 torchft, tinynccl or a GPU is missing.
"""

import argparse
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time

GROUPS = 2
# Steps that both groups make between two kills.
STEPS = 50
# A process that imports torch, starts CUDA and joins takes 10 to 20 s.
LIMIT = 120


def process_group(backend, timeout):
    """torchft's process group over a backend."""
    from torchft import process_group as torchft

    if backend != "tinynccl":
        return (torchft.ProcessGroupNCCL if backend == "nccl" else torchft.ProcessGroupGloo)(timeout=timeout)
    import tinynccl.torch

    class ProcessGroupTinynccl(torchft.ProcessGroupWrapper):
        def _create_pg(self, store, rank, world_size):
            return tinynccl.torch.ProcessGroup(store, rank, world_size, self._timeout)

    return ProcessGroupTinynccl(timeout=timeout)


def replica():
    """One group: trains until it is killed, and prints `@STEP PARTICIPANTS SECONDS CHECKSUM` for every step."""
    from datetime import timedelta

    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer

    timeout = timedelta(seconds=float(os.environ["TRIAL_TIMEOUT"]))
    backend = os.environ["TRIAL_BACKEND"]
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=process_group(backend, timeout),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"group_{os.environ['TRIAL_GROUP']}",
        timeout=timeout,
        quorum_timeout=timedelta(seconds=60),
    )
    ddp = DistributedDataParallel(manager, model) if backend == "nccl" else None
    optimizer = Optimizer(manager, inner)
    print(f"@pid {os.getpid()}", flush=True)
    while True:
        begin, step = time.perf_counter(), manager.current_step()
        optimizer.zero_grad()
        # Every group has data of its own; the sum tells whether both saw the same gradients.
        torch.manual_seed(1000 * step + int(os.environ["TRIAL_GROUP"]))
        data = torch.randn(64, 1024, device=device)
        (ddp or model)(data).square().mean().backward()
        if ddp is None:
            works = [manager.allreduce(parameter.grad) for parameter in model.parameters()]
            for work in works:
                work.wait()
        optimizer.step()
        if backend == "nccl":
            torch.cuda.synchronize()
        if manager.current_step() == step:
            print(f"@again {step} {time.perf_counter() - begin:.3f}", flush=True)
            continue
        checksum = sum(float(p.detach().double().sum()) for p in model.parameters())
        taken = time.perf_counter() - begin
        print(f"@step {step} {manager.num_participants()} {taken:.3f} {checksum!r}", flush=True)


class Group:
    """A group's processes, and what it printed."""

    def __init__(self, number, lighthouse, arguments, log):
        environment = dict(
            os.environ,
            TRIAL_GROUP=str(number),
            TRIAL_TIMEOUT=str(arguments.timeout),
            TRIAL_BACKEND=arguments.backend,
            TORCHFT_LIGHTHOUSE=lighthouse,
            CUDA_VISIBLE_DEVICES=str(number),
            REPLICA_GROUP_ID=str(number),
            NCCL_DEBUG=os.environ.get("NCCL_DEBUG", "WARN"),
        )
        if arguments.library:
            environment["LD_PRELOAD"] = arguments.library
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", __file__, "--replica"]
        self.number, self.lines, self.pid = number, queue.Queue(), None
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.reader = threading.Thread(target=self.read, args=(log,), daemon=True)
        self.reader.start()

    def read(self, log):
        for line in self.process.stdout:
            log.write(f"[{time.time():.3f} group {self.number}] {line}")
            log.flush()
            found = re.search(r"@(.*)", line)
            if found:
                self.lines.put((time.monotonic(), found[1].split()))
        self.lines.put((time.monotonic(), ["end"]))

    def next(self, until):
        """The next line before `until`: its time and words."""
        try:
            at, words = self.lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise SystemExit(f"FAILED: group {self.number} has printed nothing for too long") from None
        if words[0] == "end":
            raise SystemExit(f"FAILED: group {self.number} ended with status {self.process.wait()}")
        if words[0] == "pid":
            self.pid = int(words[1])
            return self.next(until)
        return at, words

    def steps_together(self, count):
        """Waits for `count` steps that both groups made: the time of the first, the longest step, checksums by step."""
        until, longest, first, sums = time.monotonic() + LIMIT, 0.0, None, {}
        while len(sums) < count:
            at, words = self.next(until)
            longest = max(longest, float(words[2 if words[0] == "again" else 3]))
            if words[0] == "step" and words[2] == str(GROUPS):
                first = first or at
                sums[int(words[1])] = words[4]
        return first, longest, sums

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        # torchrun sees it and ends.
        self.process.wait(timeout=LIMIT)

    def end(self):
        # torchrun starts its worker in a session of its own.
        for kill, number in ((os.kill, self.pid), (os.killpg, self.process.pid)):
            try:
                if number:
                    kill(number, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def both(groups, count):
    """`steps_together` of both groups at once."""
    results, threads = [None] * GROUPS, []

    def one(place):
        try:
            results[place] = groups[place].steps_together(count)
        except SystemExit as why:
            results[place] = why

    for place in range(GROUPS):
        threads.append(threading.Thread(target=one, args=(place,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, SystemExit):
            raise result
    return results


def trial(arguments):
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=200, heartbeat_timeout_ms=arguments.heartbeat)
    with open(arguments.log, "w") as log:
        groups = [Group(number, lighthouse.address(), arguments, log) for number in range(GROUPS)]
        try:
            both(groups, STEPS)
            print("| round | killed | longest step of the survivor, s | both train again after, s | steps compared |\n|--:|--:|--:|--:|--:|", flush=True)
            for number in range(arguments.rounds):
                victim = number % GROUPS
                survivor = GROUPS - 1 - victim
                killed = time.monotonic()
                groups[victim].kill()
                time.sleep(max(0.0, killed + 1 - time.monotonic()))
                groups[victim] = Group(victim, lighthouse.address(), arguments, log)
                # Steps of the survivor from before the kill wait in its queue.
                while not groups[survivor].lines.empty():
                    groups[survivor].next(time.monotonic() + 1)
                results = both(groups, STEPS)
                same = results[0][2].keys() & results[1][2].keys()
                wrong = [step for step in same if results[0][2][step] != results[1][2][step]]
                if wrong or not same:
                    raise SystemExit(f"FAILED: round {number}: parameters differ after step {min(wrong, default=None)}, {len(same)} compared")
                print(f"| {number} | {victim} | {results[survivor][1]:.2f} | {results[survivor][0] - killed:.2f} | {len(same)} |", flush=True)
        finally:
            for group in groups:
                group.end()
                group.reader.join()
            lighthouse.shutdown()
    print(f"all {arguments.rounds} rounds passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--backend", choices=["nccl", "tinynccl", "gloo"], default="nccl")
    parser.add_argument("--library", help="preloaded into the groups; without it PyTorch's own NCCL")
    parser.add_argument("--timeout", type=float, default=5, help="torchft's time-outs, in seconds")
    parser.add_argument("--heartbeat", type=int, default=5000, help="the lighthouse's heartbeat time-out, in milliseconds")
    parser.add_argument("--log", default="torchft_trial.log", help="what the groups print")
    arguments = parser.parse_args()
    if arguments.replica:
        return replica()
    # The lighthouse and the managers write a line per step otherwise.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        import torch
        import torchft  # noqa: F401

        if arguments.backend == "tinynccl":
            import tinynccl.torch  # noqa: F401
    except ImportError as missing:
        print(f"SKIPPED: {missing}; pip install torch torchft", file=sys.stderr)
        sys.exit(77)
    if arguments.backend == "nccl" and torch.cuda.device_count() < GROUPS:
        print(f"SKIPPED: {torch.cuda.device_count()} GPUs, expected {GROUPS}", file=sys.stderr)
        sys.exit(77)
    trial(arguments)


main()
