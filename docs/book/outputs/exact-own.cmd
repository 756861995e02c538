# compare: exact
cargo build -q -p labs
for numbers in "1e8 1 -1e8 0.5" "3e38 3e38 -3e38" "16777216 1 1 1"; do
    echo "\$ labs sum-order $numbers"
    cargo run -q -p labs -- --bare sum-order $numbers
done
