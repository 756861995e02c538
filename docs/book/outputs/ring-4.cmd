# compare: exact
cargo run -q -p tinynccl-cli -- schedule all-reduce ring --ranks 4
