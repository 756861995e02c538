# compare: exact
cargo run -q -p tinynccl-cli -- schedule all-reduce tree --ranks 4
