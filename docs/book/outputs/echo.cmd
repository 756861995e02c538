# compare: numbers
# shown in: milestones/01-tcp-echo/README.md
cargo run -q -p tcp-echo
