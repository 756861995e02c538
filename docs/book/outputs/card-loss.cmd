# compare: numbers
cargo run -q -p labs -- --bare lossy-link --loss 0,0.1,0.5,1,2,5 2>/dev/null || true
