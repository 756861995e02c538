// A product of two matrices: C (m x n) = A (m x k) B (k x n).
//
// A block of 16 x 16 threads computes a tile of 64 x 64 elements of C, each thread 4 x 4 of them. It walks along k in
// steps of 16: all threads load a piece of A and a piece of B into shared memory, wait for each other, and multiply
// from there. So a block loads each element from global memory once, not once per thread. The order of the sums is
// fixed: the same numbers give the same bits, on every GPU of one kind.

constexpr int TILE = 64;
constexpr int DEPTH = 16;
constexpr int SIDE = 16;            // threads along each side of a block
constexpr int EACH = TILE / SIDE;   // elements of a thread along each side

// A or B in memory. `outer` is the number of rows of A or columns of B, `outer_step` the stride between them, and
// `depth_step` the stride along k. A transposed matrix is the same memory with the two strides exchanged.
struct Operand {
    const float* at;
    int outer;
    long outer_step;
    long depth_step;
};

// One extra element per row, so that the elements of a column are in different banks of shared memory.
typedef float Piece[DEPTH][TILE + 1];

// Neighbouring threads load neighbouring addresses, in either layout. Elements outside the matrix count as 0.
__device__ void fetch(Piece& piece, const Operand& from, int first, int depth_first, int k) {
    const int thread = threadIdx.y * SIDE + threadIdx.x;
    for (int i = thread; i < TILE * DEPTH; i += SIDE * SIDE) {
        const int outer = from.depth_step == 1 ? i / DEPTH : i % TILE;
        const int depth = from.depth_step == 1 ? i % DEPTH : i / TILE;
        const int row = first + outer, column = depth_first + depth;
        const bool inside = row < from.outer && column < k;
        piece[depth][outer] = inside ? from.at[row * from.outer_step + column * from.depth_step] : 0.0f;
    }
}

// `finish(row, column, sum)` gets each element of C once.
template <class Finish>
__device__ void multiply(const Operand& a, const Operand& b, int k, Finish finish) {
    __shared__ Piece piece_a, piece_b;
    const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    float sum[EACH][EACH] = {};
    for (int depth = 0; depth < k; depth += DEPTH) {
        fetch(piece_a, a, first_row, depth, k);
        fetch(piece_b, b, first_column, depth, k);
        __syncthreads();
        for (int d = 0; d < DEPTH; ++d) {
            for (int i = 0; i < EACH; ++i) {
                for (int j = 0; j < EACH; ++j) {
                    sum[i][j] += piece_a[d][threadIdx.y + SIDE * i] * piece_b[d][threadIdx.x + SIDE * j];
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < EACH; ++i) {
        for (int j = 0; j < EACH; ++j) {
            const int row = first_row + threadIdx.y + SIDE * i, column = first_column + threadIdx.x + SIDE * j;
            if (row < a.outer && column < b.outer) finish(row, column, sum[i][j]);
        }
    }
}
