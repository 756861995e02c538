// A linear layer: z = x Wᵀ + b, one sample per row of x and z, one output per row of W.

// y = z, or tanh(z) between layers.
extern "C" __global__ void layer_forward(float* y, const float* x, const float* w, const float* bias, int batch,
                                         int inputs, int outputs, int squash) {
    const Operand a = {x, batch, inputs, 1};
    const Operand b = {w, outputs, inputs, 1};
    multiply(a, b, inputs, [=](int sample, int output, float sum) {
        const float z = bias[output] + sum;
        y[(long)sample * outputs + output] = squash ? tanhf(z) : z;
    });
}

// dW = dzᵀ x: the sum over the batch.
extern "C" __global__ void layer_weight_gradient(float* dw, const float* dz, const float* x, int batch, int inputs,
                                                 int outputs) {
    const Operand a = {dz, outputs, 1, outputs};
    const Operand b = {x, inputs, 1, inputs};
    multiply(a, b, batch, [=](int output, int input, float sum) { dw[(long)output * inputs + input] = sum; });
}

// db = column sums of dz. One thread per output; neighbouring threads read each row together.
// EXERCISE 3 (How it works; needs GPU): one thread per output: the sum of its column of dz over the batch, in a fixed
// order.
extern "C" __global__ void layer_bias_gradient(float* db, const float* dz, int batch, int outputs) {
    const int output = blockIdx.x * blockDim.x + threadIdx.x;
    if (output >= outputs) return;
    float sum = 0.0f;
    for (int sample = 0; sample < batch; ++sample) sum += dz[(long)sample * outputs + output];
    db[output] = sum;
}

// dx = dz W, and on through the tanh that made x: its derivative is 1 - tanh², and x holds the tanh.
extern "C" __global__ void layer_backward(float* dx, const float* dz, const float* w, const float* x, int batch,
                                          int inputs, int outputs) {
    const Operand a = {dz, batch, outputs, 1};
    const Operand b = {w, inputs, 1, inputs};
    multiply(a, b, outputs, [=](int sample, int input, float sum) {
        const long at = (long)sample * inputs + input;
        dx[at] = sum * (1.0f - x[at] * x[at]);
    });
}
