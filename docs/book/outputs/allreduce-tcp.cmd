# compare: numbers
cargo run -q -p allreduce-tcp -- --bytes 1K,32K --iters 5
