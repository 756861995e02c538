#!/usr/bin/env bash
# Runs the same programs over this library and over another implementation, which judges values, errors and the time of the end.
#
#   scripts/judge.sh NAME [OPTIONS]    NAME is one of the files scripts/judge/NAME.sh, each of which says what it compares
#
# Exit status: 0 where both agree or the difference is expected, 1 where this library is wrong, 77 where the judge cannot be had here.
set -eu
cd "$(dirname "$0")/.."
name=${1-}
if [[ -z $name || ! -f scripts/judge/$name.sh ]]; then
    echo "usage: scripts/judge.sh NAME [OPTIONS]; there is: $(cd scripts/judge && ls ./*.sh | sed 's|^\./||; s|\.sh$||' | tr '\n' ' ')" >&2
    exit 2
fi
exec "scripts/judge/$name.sh" "${@:2}"
