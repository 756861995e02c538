# compare: lines
# shown in: milestones/05-rdma-write/README.md
cargo run -q -p rdma-write
