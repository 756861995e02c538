# compare: exact
cargo run -q -p tinynccl-cli -- schedule all-reduce hierarchical --ranks 4 --hosts 2
