# compare: numbers
# shown in: milestones/10-stress/README.md
cargo run -q -p stress -- -b 8 -e 128M -f 4 | sed -E 's/ on [^ ]*, core/ on vm, core/; s/(rank 0: ).*; Linux [^ ]*/\1AMD EPYC, family 25 model 17; Linux 6.18.44/'
