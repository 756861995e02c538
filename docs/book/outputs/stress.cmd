# compare: numbers
cargo run -q -p stress -- --ranks 2 -b 8 -e 8K -f 32 -n 20 -w 5 | sed 's/ on [^ ]*, core/ on HOST, core/; s/rank 0: .*/rank 0: NAME/'
