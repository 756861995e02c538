// Softmax and cross entropy, one thread per sample.

// `losses` gets -ln(probability of the right class), `right` whether that class has the largest output, `d_outputs` the
// derivative of the batch's *mean* loss.
extern "C" __global__ void cross_entropy(float* d_outputs, float* losses, unsigned char* right, const float* outputs,
                                         const unsigned char* labels, int batch, int classes) {
    const int sample = blockIdx.x * blockDim.x + threadIdx.x;
    if (sample >= batch) return;
    const float* y = outputs + (long)sample * classes;
    float* d = d_outputs + (long)sample * classes;
    const int label = labels[sample];
    float largest = y[0];
    for (int c = 1; c < classes; ++c) largest = fmaxf(largest, y[c]);
    float sum = 0.0f;
    for (int c = 0; c < classes; ++c) sum += expf(y[c] - largest);
    for (int c = 0; c < classes; ++c) d[c] = (expf(y[c] - largest) / sum - (c == label ? 1.0f : 0.0f)) / batch;
    losses[sample] = logf(sum) - (y[label] - largest);
    right[sample] = y[label] >= largest;
}
