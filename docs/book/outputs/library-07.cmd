# compare: numbers
cargo run -q -p xtask -- library 07
