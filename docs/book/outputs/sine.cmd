# compare: numbers
cargo run -q -p ddp-sine | sed -E 's/[0-9a-f]{16}/FINGERPRINT/'
