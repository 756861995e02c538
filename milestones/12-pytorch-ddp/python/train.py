"""One rank of DistributedDataParallel: trains a model over "tinynccl", then over another backend, and compares."""

import argparse
import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import models
import tinynccl.torch  # noqa: F401: registers the backend


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["mlp", "gpt"], default="mlp")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", default="tinynccl", help="what trains first")
    parser.add_argument("--against", help="gloo, nccl or none (default: gloo on the CPU, nccl on GPUs)")
    parser.add_argument("--epochs", type=int, default=60, help="of the MLP")
    parser.add_argument("--steps", type=int, default=60, help="of the GPT")
    parser.add_argument("--batch", type=int, help="samples per step over all ranks (default: 96, GPT: 16 per rank)")
    parser.add_argument("--rate", type=float, help="learning rate (default: 0.1, GPT: 0.001)")
    parser.add_argument("--hidden", type=int, default=64, help="width of the MLP")
    parser.add_argument("--layers", type=int, default=2, help="of the GPT")
    parser.add_argument("--width", type=int, default=64, help="of the GPT")
    parser.add_argument("--context", type=int, default=64, help="of the GPT")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bucket-mb", type=float, default=0.0078125, help="gradients per bucket, MiB")
    return parser.parse_args()


def fingerprint(model):
    """16 hexadecimal digits of all weights."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()[:16]


# EXERCISE 3 (How it works; needs torch): gather every rank's fingerprint with `all_gather_object`; return ours if all
# are the same, else exit with the list of them.
def identical(model, group):
    """The fingerprint, if all ranks have the same one."""
    mine = fingerprint(model)
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if len(set(everyone)) != 1:
        raise SystemExit(f"rank {dist.get_rank()}: the replicas have diverged: {everyone}")
    return mine


def train_mlp(args, group, device, say):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    points, labels = (t.to(device) for t in models.spiral(128, args.seed))
    # Each rank starts from different weights, so only DDP's broadcast can make them agree.
    model = models.mlp(args.hidden, args.seed + rank).to(device)
    replica = wrap(model, group, device, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate or 0.1, momentum=0.9)
    batch = args.batch or 96
    if batch % ranks:
        raise SystemExit(f"a batch of {batch} cannot be shared equally by {ranks} ranks")
    share = batch // ranks
    say("epoch     loss  accuracy  weights (compared over all ranks)")
    for epoch in range(1, args.epochs + 1):
        order = torch.tensor(models.epoch_order(len(labels), args.seed, epoch))
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        for start in range(0, len(order) - batch + 1, batch):
            mine = order[start + rank * share : start + (rank + 1) * share].to(device)
            outputs = replica(points[mine])
            loss = F.cross_entropy(outputs, labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct = (outputs.argmax(1) == labels[mine]).sum()
            totals += torch.stack([loss.detach().double() * share, correct.double(), torch.tensor(float(share), device=device)])
        dist.all_reduce(totals, group=group)
        if epoch == 1 or epoch % max(1, args.epochs // 6) == 0:
            weights = identical(model, group)
            loss, correct, samples = totals.tolist()
            say(f"{epoch:5} {loss / samples:8.5f} {100 * correct / samples:7.1f} %  {weights} identical")
    return model


def train_gpt(args, group, device, say):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = models.text().to(device)
    torch.manual_seed(args.seed + rank)
    model = models.Gpt(args.layers, args.width, max(1, args.width // 32), args.context).to(device)
    replica = wrap(model, group, device, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate or 1e-3)
    share = (args.batch or 16 * ranks) // ranks
    draw = torch.Generator().manual_seed(args.seed * 1000 + rank)
    window = torch.arange(args.context + 1, device=device)
    say(f"GPT of {sum(p.numel() for p in model.parameters())} parameters, {len(text)} bytes of text, {share} sequences per rank")
    say(" step     loss  weights (compared over all ranks)")
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.context - 1, (share, 1), generator=draw).to(device)
        tokens = text[starts + window].long()
        outputs = replica(tokens[:, :-1])
        loss = F.cross_entropy(outputs.reshape(-1, 256), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % max(1, args.steps // 6) == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=group)
            say(f"{step:5} {mean.item() / ranks:8.5f}  {identical(model, group)} identical")
    return model


# EXERCISE 2 (How it works; needs torch): wrap the model in DistributedDataParallel over the group, with buckets of
# the given size, and device_ids on a GPU only.
def wrap(model, group, device, args):
    # On the CPU torch refuses device_ids.
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, process_group=group, bucket_cap_mb=args.bucket_mb)


def place():
    """Rank, number of ranks, and rank on this host, from the environment of torchrun, mpirun or srun."""
    for names in [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ]:
        if names[0] in os.environ:
            return tuple(int(os.environ[name]) for name in names)
    raise SystemExit("no RANK here: start it by `cargo run -p pytorch-ddp`, torchrun, mpirun or srun")


def main():
    args = arguments()
    rank, ranks, local = place()
    device = torch.device("cpu")
    if args.device == "cuda":
        if torch.cuda.device_count() < ranks:
            print(f"error: {ranks} ranks need {ranks} GPUs, torch sees {torch.cuda.device_count()}", file=sys.stderr)
            raise SystemExit(77)
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)

    dist.init_process_group(args.backend, init_method=os.environ.get("INIT_METHOD", "env://"), rank=rank, world_size=ranks)

    def say(line):
        if rank == 0:
            print(line, flush=True)

    train = train_mlp if args.model == "mlp" else train_gpt
    say(f"{ranks} ranks, torch {torch.__version__}, {device.type}, backend {dist.get_backend()}")
    start = time.perf_counter()
    ours = train(args, dist.group.WORLD, device, say)
    say(f"{time.perf_counter() - start:.1f} s\n")

    against = args.against or ("nccl" if device.type == "cuda" else "gloo")
    if against != "none":
        group = dist.new_group(backend=against)
        say(f"the same over {against}")
        start = time.perf_counter()
        theirs = train(args, group, device, say)
        say(f"{time.perf_counter() - start:.1f} s\n")
        far = max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters()))
        # A sum of two is the same in any order; with more ranks, each backend adds in an order of its own.
        exact = ranks <= 2 and device.type == "cpu"
        if far > (0.0 if exact else 1e-2):
            raise SystemExit(f"rank {rank}: the weights differ from those over {against} by up to {far}")
        say(f"largest difference between the weights of both: {far}")
    say(f"OK: world of size {ranks}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
