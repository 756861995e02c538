# compare: lines
cargo run -q -p ddp-train -- --break broadcast 2>&1 | grep -o 'the replicas have diverged.*differ)' | sed -E 's/[0-9a-f]{16}/FINGERPRINT/g' || true
