# compare: exact
cargo run -q -p tinynccl-cli -- schedule all-gather ring --ranks 3
