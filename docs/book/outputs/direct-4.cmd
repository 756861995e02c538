# compare: exact
cargo run -q -p tinynccl-cli -- schedule all-reduce direct --ranks 4
