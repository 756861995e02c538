# compare: exact
cargo run -q -p tinynccl-cli -- topology --file docs/topologies/dgx-1.xml
