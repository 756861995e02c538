# compare: numbers
export TINYNCCL_TIMEOUT=100 TINYNCCL_STATUS=$(mktemp -d)
cargo build -q -p labs -p tinynccl-cli
setsid cargo run -q -p labs -- order >/dev/null 2>&1 & job=$!
until cargo run -q -p tinynccl-cli -- status --after 1 | sed -E 's/job [0-9a-f]{16}/job JOB/g; s/([0-9]+)@[^ ]*/\1@HOST/; s/ on [^)]*\)/ on HOST)/' >"$TINYNCCL_STATUS/page"; grep -q 'and it is in' "$TINYNCCL_STATUS/page"; do sleep 0.2; done
kill -- -$job; cat "$TINYNCCL_STATUS/page"
