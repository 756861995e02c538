# compare: numbers
cargo run -q -p tcp-echo -- --max-size 32K
