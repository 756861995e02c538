# compare: exact
cargo run -q -p tinynccl-cli -- program docs/programs/all-reduce-all-pairs.xml --prove
