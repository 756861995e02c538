# compare: numbers
# shown in: milestones/13-ddp-train/README.md
cargo run -q -p ddp-train
