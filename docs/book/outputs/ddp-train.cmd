# compare: numbers
cargo run -q -p ddp-train -- --epochs 20 | sed -E 's/[0-9a-f]{16}/FINGERPRINT/'
