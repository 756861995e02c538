# compare: exact
cargo run -q -p tinynccl-cli -- simulate all-reduce --algo ring --ranks 4096 --size 1G --topology dgx --links 2 | sed -n 1,11p
