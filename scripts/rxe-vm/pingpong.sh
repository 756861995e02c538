#!/bin/bash
# In the guest: ibv_rc_pingpong between two linked devices.
#
#   pingpong.sh CLIENT-DEVICE SERVER-DEVICE [OPTIONS OF ibv_rc_pingpong...]
#
# Exit code: 0 if both sides end well. What the client says goes to stdout.
set -u
client=$1 server=$2
shift 2
timeout 60 ibv_rc_pingpong -d "$server" -g 1 "$@" >/dev/null &
# The server listens on TCP port 18515 when it is ready.
until ss -ltn | grep -q :18515; do
    kill -0 $! 2>/dev/null || exit 1
    sleep 0.1
done
timeout 60 ibv_rc_pingpong -d "$client" -g 1 "$@" 127.0.0.1
rc=$?
wait $! && exit $rc
