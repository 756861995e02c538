# compare: lines
# shown in: milestones/06-lib-hello/README.md
cargo run -q -p lib-hello | sed 's/ on [^,]*, local/ on vm, local/'
