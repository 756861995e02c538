"""In the guest: torch's all_reduce and milestone 12's MLP over TCP, then over RDMA, in the same two processes: importing torch takes most
of the time here. Started without RANK it starts the ranks. Compared, bit for bit: what all_reduce gave, and the weights; over RDMA the
devices must have sent packets, over TCP none."""

import glob
import hashlib
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def start():
    """The ranks; the first failure's exit code."""
    env = dict(os.environ, WORLD_SIZE="2", OMP_NUM_THREADS="1", TMPDIR=os.environ.get("TMPDIR", "/tmp"))
    ranks = [subprocess.Popen([sys.executable, __file__], env=dict(env, RANK=str(r), LOCAL_RANK=str(r))) for r in range(2)]
    return next((code for code in [rank.wait() for rank in ranks] if code), 0)


def packets():
    time.sleep(0.05)  # the devices hand out counters that are up to 10 ms old
    return sum(int(open(path).read()) for path in glob.glob("/sys/class/infiniband/*/ports/1/hw_counters/sent_pkts"))


def rank(number, ranks):
    sys.path.insert(0, os.path.join(HERE, "../../milestones/12-pytorch-ddp/python"))
    sys.argv[1:] = ["--epochs", "2"]
    import torch
    import torch.distributed as dist

    import train

    def say(line):
        if number == 0:
            print(line, flush=True)

    found = {}
    for transport in ["tcp", "verbs"]:
        os.environ["TINYNCCL_TRANSPORT"] = transport
        store = f"file://{os.environ['TMPDIR']}/store-{transport}"
        before = packets()
        dist.init_process_group("tinynccl", init_method=store, rank=number, world_size=ranks)
        digest = hashlib.sha256()
        for count, dtype in [(1, torch.float32), (1000, torch.int64), (1 << 18, torch.float32)]:
            inputs = [(torch.arange(count) % 1000 + r).to(dtype) for r in range(ranks)]
            dist.all_reduce(inputs[number])
            expected = sum((torch.arange(count) % 1000 + r).to(dtype) for r in range(ranks))
            assert torch.equal(inputs[number], expected), f"rank {number}: {count} of {dtype} over {transport}"
        noise = torch.rand(100_003, generator=torch.Generator().manual_seed(number))
        dist.all_reduce(noise)
        digest.update(noise.numpy().tobytes())
        model = train.train_mlp(train.arguments(), dist.group.WORLD, torch.device("cpu"), say)
        dist.barrier()
        sent = packets() - before
        # Nobody's next packets before everybody has counted.
        dist.barrier()
        dist.destroy_process_group()
        found[transport] = (digest.hexdigest(), train.fingerprint(model))
        say(f"{transport}: {sent} packets of RDMA, weights {found[transport][1]}")
        assert (sent > 200) if transport == "verbs" else (sent == 0), f"{sent} packets of RDMA over {transport}"
    assert found["tcp"] == found["verbs"], found
    say("over RDMA the same bits as over TCP")


if "RANK" in os.environ:
    rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
else:
    sys.exit(start())
