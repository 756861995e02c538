# compare: lines
cargo run -q -p rdma-write | sed -E 's/^device .*/device NAME, its port and GID/; s/address 0x[0-9a-f]+/address 0xADDRESS/; s/rkey 0x[0-9a-f]+/rkey 0xKEY/'
