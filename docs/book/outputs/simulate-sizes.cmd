# compare: exact
cargo run -q -p tinynccl-cli -- simulate all-reduce --algo ring,tree,halving-doubling --ranks 64 --size 8,1M,256M | cut -c1-75
