# compare: exact
cargo run -q -p tinynccl-cli -- schedule all-gather tree --ranks 4
