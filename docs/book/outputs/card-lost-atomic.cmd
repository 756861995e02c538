# compare: lines
cargo run -q -p labs -- wire lost-atomic
