# compare: exact
cargo run -q -p tinynccl --example all_reduce
