# compare: numbers
# shown in: milestones/15-ddp-sine/README.md
cargo run -q -p ddp-sine
