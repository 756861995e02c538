#!/usr/bin/env bash
# Programs of PyTorch, CuPy and JAX over this library's libnccl.so and over NVIDIA's, which each of them brings: a check that is ok
# over NVIDIA's must be ok over ours (scripts/nccl/clients.sh).
#
#   scripts/judge.sh nccl [-a AUDIT] [-c CLIENTS] [-l SECONDS]    on a machine with two GPUs and those programs
#
# LIBRARY names our library; without it that of `scripts/gpu-tests.sh build`. Exit status: 0 they agree, 1 ours fails where NVIDIA's
# does not, 77 no two GPUs or no torchrun.
set -eu
cd "$(dirname "$0")/../.."
library=${LIBRARY-$PWD/out/gpu/libnccl.so}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
if ((gpus < 2)); then
    echo "judge: nccl: SKIPPED, $gpus GPUs are here, two are needed" >&2
    exit 77
fi
if ! command -v torchrun >/dev/null; then
    echo "judge: nccl: SKIPPED, no torchrun is here, so NVIDIA's library cannot judge" >&2
    exit 77
fi
if [[ ! -f $library ]]; then
    echo "judge: nccl: there is no $library: 'scripts/gpu-tests.sh build' makes it, LIBRARY names another" >&2
    exit 1
fi
exec scripts/nccl/clients.sh "$@" out/judge nvidia= "tinynccl=$library"
