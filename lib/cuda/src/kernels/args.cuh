// The arguments of every kernel of the collectives: one struct, passed by value. `args.rs` has the same; a test
// compares them.

// One rank's input and output as the other ranks name them: the number of the registration + 1, then 48 bits of offset
// from the start of its allocation; 0: they do not reach it.
struct Remote {
    u64 input;
    u64 output;
};

// Which ranks send segments, and to which ranks; `args.rs` has the same.
#define FLOW_ALL 0 // each to each
#define FLOW_GATHER 1 // each to the root
#define FLOW_SCATTER 2 // the root to each

struct Args {
    Team team;
    const u8* input;
    u8* output;
    u64 bytes;  // of the whole buffer, or of a segment where there are segments
    u64 stride; // between the segments of the input that neighbouring ranks get; 0: all get the same
    Remote remote;
    u8* scratch; // partial sums of a schedule, in our memory; null without any
    u32 root;
    u32 flow; // of segments: one of FLOW_*
};
