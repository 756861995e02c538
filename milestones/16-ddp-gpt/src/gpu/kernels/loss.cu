// Softmax cross entropy. A warp takes a row of logits, [rows, VOCAB_STRIDE] in f32; blocks have 8 warps.

// losses[row] = -ln p(target). With `gradient`: dlogits = (p - onehot(target)) * scale, zero in the padding; and tokens[row] as
// a one-hot row, with which the token embedding's gradient is a matrix product.
extern "C" __global__ void cross_entropy(float* losses, act* dlogits, act* onehot, const float* logits, const u32* targets,
                                         const u32* tokens, u32 rows, float scale, u32 gradient) {
    const u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float* x = logits + (u64)row * VOCAB_STRIDE;
    float max = -3.4e38f;
    for (u32 v = lane; v < VOCAB; v += 32) max = fmaxf(max, x[v]);
    max = warp_max(max);
    float total = 0.0f;
    for (u32 v = lane; v < VOCAB; v += 32) total += __expf(x[v] - max);
    total = warp_sum(total);
    const u32 target = targets[row];
    if (lane == 0) losses[row] = __logf(total) - (x[target] - max);
    if (!gradient) return;
    const float inverse = scale / total;
    const u32 token = tokens[row];
    for (u32 v = lane; v < VOCAB_STRIDE; v += 32) {
        float d = 0.0f;
        if (v < VOCAB) d = __expf(x[v] - max) * inverse - (v == target ? scale : 0.0f);
        dlogits[(u64)row * VOCAB_STRIDE + v] = narrow(d);
        onehot[(u64)row * VOCAB_STRIDE + v] = narrow(v == token ? 1.0f : 0.0f);
    }
}

// means[*place] = the mean of losses. One block.
extern "C" __global__ void mean_loss(double* means, const u64* place, const float* losses, u32 rows) {
    __shared__ double scratch[32];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < rows; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) means[*place] = sum / rows;
}
