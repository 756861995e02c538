"""JAX over the libnccl that is loaded: collectives of shard_map, two processes with a GPU each and one process with all.

    python3 scripts/nccl/jax_checks.py                               over the wheel's library, which JAX opens by its path
    tinynccl-cli run --audit -- python3 scripts/nccl/jax_checks.py   over ours
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
# Many processes share the GPUs of a test machine.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import client

SHAPES = [(1,), (1000,), (257, 1031)]
TYPES = ["float32", "bfloat16", "float16", "int32", "uint8"]


def collectives(jax, n):
    """Every collective of shard_map over all devices, against numpy; small integers, so exact."""
    import numpy as np
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((n,), ("d",))
    spec = PartitionSpec("d")
    sharding = NamedSharding(mesh, spec)

    def over(body, blocks):
        """body on each device's block; the results of this process by device's index."""
        shape = blocks.shape
        array = jax.make_array_from_callback(shape, sharding, lambda index: blocks[index])
        result = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(array)
        return {shard.index[0].start or 0: np.asarray(shard.data) for shard in result.addressable_shards}, result.shape[0] // n

    def expect(body, blocks, wants, what):
        got, rows = over(body, blocks)
        assert got, f"{what}: this process has no part of the result"
        for begin, block in got.items():
            want = wants[begin // rows]
            assert block.shape == want.shape, f"{what}: shape {block.shape}, expected {want.shape}"
            assert (block.astype("float64") == want.astype("float64")).all(), f"{what}: block {begin // rows} is wrong"

    for name in TYPES:
        dtype = jnp.dtype(name)
        for shape in SHAPES:
            what = f"{name} {shape}"
            # Block d holds values up to 4 + d.
            each = [((np.arange(np.prod(shape)) % 5).reshape(1, *shape) + d).astype(dtype) for d in range(n)]
            blocks = np.concatenate(each)
            wide = [np.concatenate([(e + np.asarray(to, dtype)).astype(dtype) for to in range(n)]) for e in each]
            wide_blocks = np.concatenate(wide)
            total = sum(e.astype("float64") for e in each)
            expect(lambda x: lax.psum(x, "d"), blocks, [total] * n, f"psum {what}")
            expect(lambda x: lax.pmax(x, "d"), blocks, [each[-1]] * n, f"pmax {what}")
            expect(lambda x: lax.pmin(x, "d"), blocks, [each[0]] * n, f"pmin {what}")
            expect(lambda x: lax.all_gather(x, "d", axis=0, tiled=True), blocks, [blocks] * n, f"all_gather {what}")
            ring = [(d, (d + 1) % n) for d in range(n)]
            expect(lambda x: lax.ppermute(x, "d", ring), blocks, [each[(d - 1) % n] for d in range(n)], f"ppermute {what}")
            sums = sum(w.astype("float64") for w in wide)
            expect(lambda x: lax.psum_scatter(x, "d", scatter_dimension=0, tiled=True), wide_blocks, [sums[d : d + 1] for d in range(n)], f"psum_scatter {what}")
            turned = [np.concatenate([wide[r][d : d + 1] for r in range(n)]) for d in range(n)]
            expect(lambda x: lax.all_to_all(x, "d", split_axis=0, concat_axis=0, tiled=True), wide_blocks, turned, f"all_to_all {what}")


def data_parallel(jax, n):
    """A gradient step whose batch is spread by jit: XLA puts the all-reduces in."""
    import numpy as np
    from jax import numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((n,), ("d",))
    batch = (np.arange(8 * n * 32).reshape(8 * n, 32) % 7).astype("float32") / 7
    weights = np.linspace(-1, 1, 32 * 16, dtype="float32").reshape(32, 16)
    spread = jax.make_array_from_callback(batch.shape, NamedSharding(mesh, PartitionSpec("d")), lambda index: batch[index])
    everywhere = jax.make_array_from_callback(weights.shape, NamedSharding(mesh, PartitionSpec()), lambda index: weights[index])

    def loss(w, x):
        return jnp.mean(jnp.tanh(jnp.matmul(x, w, precision="highest")) ** 2)

    step = jax.jit(lambda w, x: w - 0.5 * jax.grad(loss)(w, x), out_shardings=NamedSharding(mesh, PartitionSpec()))
    want = weights.astype("float64")
    for _ in range(5):
        everywhere = step(everywhere, spread)
        y = np.tanh(batch.astype("float64") @ want)
        want = want - 0.5 * batch.T.astype("float64") @ (2 * y * (1 - y * y)) / y.size
    got = np.asarray(everywhere.addressable_data(0))
    assert np.abs(got - want).max() < 1e-4, np.abs(got - want).max()


def body(checks, several):
    import jax

    def begin():
        if several:
            address = f"127.0.0.1:{checks.options.port}"
            jax.distributed.initialize(address, checks.size, checks.rank, local_device_ids=[checks.rank])
        devices = jax.devices()
        assert len(devices) > 1 and devices[0].platform == checks.options.platform, f"{devices}, expected several {checks.options.platform}s"

    def library():
        assert client.say_which(f"jax {jax.__version__} rank {checks.rank}"), f"loaded: {client.loaded()}"

    how = "processes" if several else "one_process"
    checks.run(f"begin_{how}", begin)
    checks.run(f"collectives_{how}", lambda: collectives(jax, len(jax.devices())))
    checks.run(f"data_parallel_{how}", lambda: data_parallel(jax, len(jax.devices())))
    # JAX loads the library by its first collective.
    checks.run(f"library_{how}", library)
    if several:
        checks.run("end", jax.distributed.shutdown)


def two_processes(checks):
    body(checks, True)


def one_process(checks):
    body(checks, False)


if __name__ == "__main__":
    options = client.arguments(
        __doc__,
        port={"type": int, "default": 13_498, "help": "of jax.distributed's coordinator"},
        platform={"default": "gpu", "help": "cpu tries the script itself, without libnccl"},
    )
    sys.exit(max(client.ranks(two_processes, options), client.ranks(one_process, options, size=1)))
