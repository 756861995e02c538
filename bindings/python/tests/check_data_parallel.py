"""DistributedDataParallel and the features that use it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks import DEVICE, check, device, equal, full


@check("test_DistributedDataParallel, _with_buckets", "test_ddp_comm_hook_allreduce_hook", "test_gloo_backend_cpu_module", "test_grad_div", "test_find_unused_parameters")
def data_parallel(rank, n):
    torch.manual_seed(rank)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).to(device())
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0005}):
        replica = DistributedDataParallel(model, **options)
        replica.zero_grad()
        with replica.no_sync():
            replica(full((2, 16), 1.0)).sum().backward()
        replica.zero_grad()
        inputs = torch.arange(16.0, device=device()).view(1, 16) / 16 + rank
        replica(inputs).sum().backward()
        mean = [p.grad.clone() for p in model.parameters()]
        local = type(model)(*[nn.Linear(16, 16) for _ in range(4)]).to(device())
        local.load_state_dict(model.state_dict())
        for r in range(n):
            (local(torch.arange(16.0, device=device()).view(1, 16) / 16 + r).sum() / n).backward()
        for got, want in zip(mean, local.parameters()):
            assert torch.allclose(got, want.grad, rtol=1e-4, atol=1e-5), options
    hooked = DistributedDataParallel(model)

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / n)

    hooked.register_comm_hook(None, hook)
    hooked.zero_grad()
    hooked(full((2, 16), float(rank))).sum().backward()


@check("test_ddp_baseline_aot_eager, _multiprocess")
def compiled_data_parallel(rank, n):
    if not hasattr(torch, "compile"):
        return  # before torch 2
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).to(device())
    replica = DistributedDataParallel(model)
    compiled = torch.compile(replica, backend="aot_eager")
    inputs = torch.arange(64.0, device=device()).view(4, 16) / 64 + rank
    # The second forward sorts the buckets anew, which takes a broadcast.
    for _ in range(3):
        gradients = []
        for forward in (replica, compiled):
            replica.zero_grad()
            forward(inputs).square().mean().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for got, want in zip(*gradients):
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


def same_everywhere(tensors, n):
    """The same bits on all ranks."""
    for tensor in tensors:
        everyone = [torch.empty_like(tensor) for _ in range(n)]
        dist.all_gather(everyone, tensor.detach().contiguous())
        for other in everyone:
            equal(other, tensor.detach())


class Branches(nn.Module):
    """Each forward uses one of two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 1)

    def forward(self, inputs, which):
        return self.last(self.layers[which](inputs))


@check("test_find_unused_parameters_kwarg_*", "test_ddp_control_flow_different_across_ranks")
def unused_parameters(rank, n):
    torch.manual_seed(1)
    replica = DistributedDataParallel(Branches().to(device()), find_unused_parameters=True)
    for step in range(4):
        replica.zero_grad()
        replica(full((2, 4), 1.0), (rank + step) % 2).sum().backward()
        same_everywhere([p.grad for p in replica.parameters()], n)


@check("test_accumulate_gradients_no_sync", "test_accumulate_gradients_no_sync_grad_is_view")
def no_sync(rank, n):
    torch.manual_seed(1)
    replica = DistributedDataParallel(nn.Linear(3, 1).to(device()))
    replica.zero_grad()
    with replica.no_sync():
        replica(full((1, 3), float(rank))).sum().backward()
    equal(replica.module.weight.grad, full((1, 3), float(rank)), "not shared yet")
    replica(full((1, 3), float(rank))).sum().backward()
    # Both of a rank are summed, and then averaged over ranks.
    equal(replica.module.weight.grad, full((1, 3), float(n - 1)), "accumulated")


@check("test_ddp_uneven_inputs", "test_ddp_join_model_equivalence")
def uneven_inputs(rank, n):
    torch.manual_seed(1)
    replica = DistributedDataParallel(nn.Linear(3, 1).to(device()))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    steps = 0
    with replica.join():
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            replica(full((1, 3), float(step))).sum().backward()
            optimizer.step()
            steps += 1
    assert steps == 2 + 3 * rank
    same_everywhere(replica.parameters(), n)


@check("test_static_graph_api_cpu", "test_ddp_checkpointing_*_static_graph")
def static_graph(rank, n):
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs):
            return checkpoint(self.layer, checkpoint(self.layer, inputs))

    torch.manual_seed(1)
    replica = DistributedDataParallel(Twice().to(device()), static_graph=True)
    for step in range(3):
        replica.zero_grad()
        replica(full((2, 4), float(rank + step + 1)).requires_grad_()).sum().backward()
        same_everywhere([p.grad for p in replica.parameters()], n)


@check("test_default_ddp_comm_hooks_nccl", "test_fp16_compress_wrapper_nccl", "test_powerSGD_ddp_comm_hook_nccl")
def communication_hooks(rank, n):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def gradients(hook, state, register=True):
        torch.manual_seed(1)
        replica = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1)).to(device()))
        if register:
            replica.register_comm_hook(state, hook)
        for _ in range(3):
            replica.zero_grad()
            replica(torch.arange(16.0, device=device()).view(1, 16) / 16 + rank).sum().backward()
        return [p.grad for p in replica.parameters()]

    want = gradients(None, None, register=False)
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        for got, right in zip(gradients(hook, None), want):
            assert torch.allclose(got, right, rtol=2e-3, atol=2e-3), hook
    if DEVICE == "cuda" or dist.get_backend() != "nccl":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        same_everywhere(gradients(powerSGD_hook.powerSGD_hook, state), n)


@check("test_DistributedDataParallel_requires_grad", "test_ddp_broadcast_buffer")
def buffers(rank, n):
    torch.manual_seed(rank)
    replica = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device()))
    for _ in range(2):
        replica(torch.randn(8, 4, device=device()) + rank).sum().backward()
    replica(torch.randn(8, 4, device=device()) + rank)
    same_everywhere(replica.parameters(), n)


@check("test_sparse_gradients", "test_sparse_gradients_grad_is_view")
def sparse_gradients(rank, n):
    torch.manual_seed(1)
    replica = DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(10, 3, sparse=True), nn.Linear(3, 1)).to(device()))
    replica(torch.tensor([[rank, 5]], device=device())).sum().backward()
    gradient = replica.module[0].weight.grad
    assert gradient.is_sparse
    same_everywhere([gradient.to_dense()], n)
    used = gradient.to_dense().abs().sum(1) > 0
    assert used.nonzero().flatten().tolist() == [*range(n), 5], used


@check("test_local_optimizer_parity", "test_collect_shards (test_zero_redundancy_optimizer.py)")
def zero_redundancy_optimizer(rank, n):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def train(make):
        torch.manual_seed(1)
        replica = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(device()))
        optimizer = make(replica.parameters())
        for step in range(4):
            optimizer.zero_grad()
            replica(torch.arange(8.0, device=device()).view(1, 8) / 8 + rank + step).sum().backward()
            optimizer.step()
        return optimizer, list(replica.parameters())

    _, plain = train(lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    sharded, parameters = train(lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01))
    for got, want in zip(parameters, plain):
        equal(got.detach(), want.detach())
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(sharded.state_dict()["state"]) == len(parameters)


if int(torch.__version__.split(".")[0]) >= 2:

    @check("FullyShardedDataParallel of a small model (torch 2 alone)")
    def fully_sharded(rank, n):
        from torch.distributed.fsdp import FullyShardedDataParallel

        def gradients(wrap):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device())
            wrapped = wrap(model)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            losses = []
            for step in range(3):
                optimizer.zero_grad()
                loss = wrapped(torch.arange(8.0, device=device()).view(1, 8) / 8 + rank + step).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        want = gradients(DistributedDataParallel)
        got = gradients(lambda model: FullyShardedDataParallel(model, device_id=device()))
        assert all(abs(a - b) < 1e-4 for a, b in zip(got, want)), (got, want)
