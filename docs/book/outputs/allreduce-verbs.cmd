# compare: lines
cargo run -q -p allreduce-verbs -- --ranks 2 --bytes 1K,32K --iters 5 | sed -E 's/^  tinyroce.*/  NAME port 1 (ADDRESS)/'
