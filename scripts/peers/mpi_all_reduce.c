/* Times MPI_Allreduce (f32, sum, out of place) by the rule of milestone 10: warm-up; then, per repetition, a barrier
 * and calls back to back; the slowest rank's mean per call; the median over repetitions. Prints "bytes microseconds".
 * Usage: mpi_all_reduce MIN_BYTES MAX_BYTES FACTOR [SECONDS_PER_SIZE [REPETITIONS]] */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Mean seconds per call of the slowest rank. */
static double repetition(const float *in, float *out, int count, long calls) {
    double mine, slowest;
    MPI_Barrier(MPI_COMM_WORLD);
    mine = MPI_Wtime();
    for (long i = 0; i < calls; i++) MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    mine = (MPI_Wtime() - mine) / (double)calls;
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 4) {
        if (rank == 0) fprintf(stderr, "usage: mpi_all_reduce MIN_BYTES MAX_BYTES FACTOR [SECONDS [REPETITIONS]]\n");
        MPI_Finalize();
        return 2;
    }
    size_t low = strtoull(argv[1], 0, 10), high = strtoull(argv[2], 0, 10), factor = strtoull(argv[3], 0, 10);
    double seconds = argc > 4 ? atof(argv[4]) : 0.3;
    int repetitions = argc > 5 ? atoi(argv[5]) : 7;
    if (low < 4 || factor < 2 || repetitions < 1 || repetitions > 1000) {
        if (rank == 0) fprintf(stderr, "error: expected MIN_BYTES >= 4, FACTOR >= 2, 1 to 1000 REPETITIONS\n");
        MPI_Finalize();
        return 2;
    }
    float *in = malloc(high), *out = malloc(high);
    double *times = malloc(sizeof(double) * (size_t)repetitions);
    if (!in || !out || !times) MPI_Abort(MPI_COMM_WORLD, 1);
    int wrong = 0;
    for (size_t bytes = low; bytes <= high; bytes *= factor) {
        int count = (int)(bytes / sizeof(float));
        for (int i = 0; i < count; i++) in[i] = (float)(rank + i % 7);
        memset(out, 0, bytes);
        MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < count; i++) wrong += out[i] != (float)(ranks * (ranks - 1) / 2 + ranks * (i % 7));
        double once = repetition(in, out, count, 5);
        long calls = (long)(seconds / repetitions / once);
        if (calls < 1) calls = 1;
        if (calls > 1000000) calls = 1000000;
        for (int r = 0; r < repetitions; r++) times[r] = repetition(in, out, count, calls);
        qsort(times, (size_t)repetitions, sizeof(double), by_value);
        if (rank == 0) printf("%zu %.3f\n", bytes, times[repetitions / 2] * 1e6), fflush(stdout);
    }
    if (rank == 0 && wrong) fprintf(stderr, "error: %d wrong values\n", wrong);
    MPI_Finalize();
    return wrong != 0;
}
