// Attention's softmax between matrix products, for shapes and precisions without a fused kernel. A warp takes a row of scores;
// row number (sample·HEADS + head)·CONTEXT + query, CONTEXT values each.

// probs = causal softmax(scores); dropped = dropout(probs). `scores` are scaled already.
extern "C" __global__ void causal_softmax(act* probs, act* dropped, const float* scores, Mask mask, u32 rows) {
    const u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const u32 query = row % CONTEXT, sample = row / (HEADS * CONTEXT), place = row % (HEADS * CONTEXT);
    const u64 key = mask.threshold ? mask.keys[sample] : 0, at = (u64)row * CONTEXT;
    float max = -3.4e38f;
    for (u32 k = lane; k <= query; k += 32) max = fmaxf(max, scores[at + k]);
    max = warp_max(max);
    float total = 0.0f;
    for (u32 k = lane; k <= query; k += 32) total += __expf(scores[at + k] - max);
    const float inverse = 1.0f / warp_sum(total);
    for (u32 k = lane; k < CONTEXT; k += 32) {
        const float p = k <= query ? __expf(scores[at + k] - max) * inverse : 0.0f;
        probs[at + k] = narrow(p);
        dropped[at + k] = narrow(mask.threshold ? p * factor(mask, key, place * CONTEXT + k) : p);
    }
}

// dscores = probs * (d - Σ d·probs) with d = dropout(dprobs); dropped = dropout(probs), once more.
extern "C" __global__ void softmax_backward(act* dscores, act* dropped, const float* dprobs, const act* probs, Mask mask,
                                            u32 rows) {
    const u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const u32 query = row % CONTEXT, sample = row / (HEADS * CONTEXT), place = row % (HEADS * CONTEXT);
    const u64 key = mask.threshold ? mask.keys[sample] : 0, at = (u64)row * CONTEXT;
    float dot = 0.0f;
    for (u32 k = lane; k <= query; k += 32) {
        const float f = mask.threshold ? factor(mask, key, place * CONTEXT + k) : 1.0f;
        dot += widen(probs[at + k]) * f * dprobs[at + k];
    }
    dot = warp_sum(dot);
    for (u32 k = lane; k < CONTEXT; k += 32) {
        float d = 0.0f, kept = 0.0f;
        if (k <= query) {
            const float f = mask.threshold ? factor(mask, key, place * CONTEXT + k) : 1.0f, p = widen(probs[at + k]);
            d = p * (f * dprobs[at + k] - dot);
            kept = p * f;
        }
        dscores[at + k] = narrow(d);
        dropped[at + k] = narrow(kept);
    }
}
