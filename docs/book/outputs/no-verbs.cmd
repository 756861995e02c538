# compare: numbers
cargo run -q -p verbs-hello || true
