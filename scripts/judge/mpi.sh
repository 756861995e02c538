#!/usr/bin/env bash
# Our collectives beside Open MPI's, under mpirun on 2, 3 and 4 ranks: each process is a rank of both, calls every collective
# with random values of every element type and operator over one and over the other, and compares each element. Both have to
# give the values that are computed without communication, too.
#
#   scripts/judge/mpi.sh
#
# This is the conformance suite of process groups (lib/tests/process_group) with the cargo feature `mpi`, as
# scripts/mpi-tests.sh runs it. Exit code: 0 all values agree, 1 some differ or a call failed, 77 Open MPI is not here.
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 1
scripts/setup.sh --mpi || exit 77
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
cargo test --locked --workspace --features tinynccl/mpi --test process_group -- mpi_under_mpirun --nocapture 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
# A build without MPI, or a test of another name, would compare nothing.
grep -q 'test mpi_under_mpirun \.\.\. ' "$log" && ! grep -q SKIPPED "$log" || { echo "judge: mpi: nothing was compared" >&2; exit 1; }
[ "$status" = 0 ] && echo "judge: mpi: every value agrees with Open MPI's, on 2, 3 and 4 ranks"
exit "$((status != 0))"
