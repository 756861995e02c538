# compare: numbers
# shown in: milestones/07-allreduce-tcp/README.md
cargo run -q -p allreduce-tcp
