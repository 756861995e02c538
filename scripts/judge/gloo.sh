#!/usr/bin/env bash
# Programs of torch.distributed over tinynccl and over torch's own gloo: a table of exit statuses and of the time of the end,
# then random sequences of calls whose values must be the same.
#
#   scripts/judge.sh gloo                      all programs, then a minute of sequences
#   scripts/judge.sh gloo --seconds 7200       sequences for so long; --seed N begins with that one
set -eu
cd "$(dirname "$0")/../.."
exec scripts/python-tests.sh --judge "$@"
