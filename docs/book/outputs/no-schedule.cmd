# compare: exact
cargo run -q -p tinynccl-cli -- schedule all-to-all ring --ranks 4 || true
