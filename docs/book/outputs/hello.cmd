# compare: lines
cargo run -q -p lib-hello -- --ranks 3 --transport tcp | sed 's/ on [^,]*, local/ on HOST, local/'
