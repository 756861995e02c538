# compare: exact
cargo run -q -p tinynccl-cli -- schedule all-reduce double-tree --ranks 4
