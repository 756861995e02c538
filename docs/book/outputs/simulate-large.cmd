# compare: exact
cargo run -q -p tinynccl-cli -- simulate all-reduce --algo ring --ranks 65536 --size 1G --topology dgx --links 2
