"""How a rank can end, and what is in flight then: what its status is, and what the other rank sees."""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

from programs import PROGRAMS, Program, said, say

# Exit status of the rank that ends.
HOWS = {"return": 0, "sys_exit": 3, "os_exit": 4, "signal": -signal.SIGTERM, "exception": 1, "in_a_thread": 0, "behind_a_forked_child": 0}
FLIGHTS = ("nothing", "async", "irecv", "isend", "group")


def end(how):
    if how == "sys_exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(4)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "exception":
        raise ValueError("a bug of one rank")


def make(how, flight):
    def run(job):
        job.join()
        dist.barrier()
        if job.rank == 1:
            kept = []
            start(kept)
            if how == "behind_a_forked_child":
                child = os.fork()
                if child == 0:
                    # As a script ends, with all that it has inherited.
                    return
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            if flight == "group" and job.backend == "tinynccl":
                with dist.distributed_c10d._get_default_group().comm.group():
                    dist.distributed_c10d._get_default_group().comm.all_reduce(torch.ones(3))
                    end(how)
                return
            return end(how)
        if flight == "async" or flight == "group" and HOWS[how] == 0:
            # It is finished where the interpreter ends, and may be where the process does.
            count = 100_000 if flight == "async" else 3
            tensor = torch.ones(count)
            said(dist.all_reduce, tensor)
            say("value", float(tensor[-1]))
        elif flight == "isend":
            tensor = torch.zeros(1000)
            said(dist.recv, tensor, 1)
            say("value", float(tensor[-1] + 1))
        else:
            said(dist.all_reduce, torch.ones(7))

    def start(kept):
        def begin():
            if flight == "async":
                kept.append(dist.all_reduce(torch.ones(100_000), async_op=True))
            elif flight == "irecv":
                kept.append(dist.irecv(torch.zeros(3), 0))
            elif flight == "isend":
                kept.append(dist.isend(torch.ones(1000), 0))

        if how == "in_a_thread":
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()
        else:
            begin()

    run.__name__ = f"{how}_with_{flight}"
    lost, right = "PeerLost: .*lost rank 1", "^value 2.0$"
    if flight == "nothing" or flight == "irecv":
        seen = lost
    elif HOWS[how] in (4, -signal.SIGTERM):
        seen = f"{lost}|{right}"
    elif flight == "group":
        seen = right if HOWS[how] == 0 else lost
    else:
        seen = right
    PROGRAMS[run.__name__] = Program(run, 2, [(0, seen), (HOWS[how], "")])


for one_how in HOWS:
    for one_flight in FLIGHTS:
        make(one_how, one_flight)
