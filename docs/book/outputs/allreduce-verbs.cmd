# compare: numbers
# shown in: milestones/08-allreduce-verbs/README.md
cargo run -q -p allreduce-verbs -- --ranks 2 --bytes 1K,32K,1M,4M --iters 5
