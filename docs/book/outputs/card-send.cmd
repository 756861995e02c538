# compare: lines
cargo run -q -p labs -- wire send
