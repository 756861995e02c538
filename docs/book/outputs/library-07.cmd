# compare: exact
cargo run -q -p xtask -- library 07 | sed -E 's/ +[0-9]+  / /'
