/* Times an MPI library's collectives; the rule is perf.h's. MPI has no bf16, so f32 only.
 *
 *   mpicc -O3 -march=native -o mpi_perf mpi_perf.c -lm;  mpirun -n 2 ./mpi_perf -o all_reduce -b 8 -e 1048576 */
#include "perf.h"
#include <mpi.h>

static int peer_offers(enum operation op) { return op != PINGPONG || peer_ranks == 2; }
static int peer_in_place(enum operation op) { return op == BROADCAST; }
static void peer_barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }
static double peer_max(double value) {
    double most;
    MPI_Allreduce(&value, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return most;
}

static void peer_call(enum operation op, float *in, float *out, size_t count) {
    MPI_Comm world = MPI_COMM_WORLD;
    MPI_Datatype f32 = MPI_FLOAT;
    int n = (int)count, right = (peer_rank + 1) % peer_ranks, left = (peer_rank + peer_ranks - 1) % peer_ranks;
    switch (op) {
        case ALL_REDUCE: MPI_Allreduce(in, out, n, f32, MPI_SUM, world); break;
        case ALL_GATHER: MPI_Allgather(in, n, f32, out, n, f32, world); break;
        case REDUCE_SCATTER: MPI_Reduce_scatter_block(in, out, n, f32, MPI_SUM, world); break;
        case BROADCAST: MPI_Bcast(out, n, f32, 0, world); break;
        case REDUCE: MPI_Reduce(in, out, n, f32, MPI_SUM, 0, world); break;
        case ALL_TO_ALL: MPI_Alltoall(in, n, f32, out, n, f32, world); break;
        case SENDRECV: MPI_Sendrecv(in, n, f32, right, 0, out, n, f32, left, 0, world, MPI_STATUS_IGNORE); break;
        case PINGPONG:
            if (peer_rank) MPI_Recv(out, n, f32, left, 0, world, MPI_STATUS_IGNORE);
            MPI_Send(in, n, f32, right, 0, world);
            if (!peer_rank) MPI_Recv(out, n, f32, left, 0, world, MPI_STATUS_IGNORE);
            break;
        case BARRIER: MPI_Barrier(world); break;
        default: break;
    }
}

/* Our number, as the launchers of Open MPI, Intel MPI and MPICH say it before MPI_Init. */
static int rank_before_init(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID", "PMIX_RANK"};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return atoi(getenv(names[i]));
    return 0;
}

static void leave(int signal) {
    (void)signal;
    _exit(0);
}

int main(int argc, char **argv) {
    struct options o = perf_options(argc, argv);
    alarm((unsigned)o.limit);
    perf_pin(rank_before_init());
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &peer_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &peer_ranks);
    perf_pin(peer_rank); /* the library may have bound us elsewhere */
    if (!peer_rank) {
        char version[MPI_MAX_LIBRARY_VERSION_STRING];
        int length;
        MPI_Get_library_version(version, &length);
        version[strcspn(version, "\n")] = 0;
        printf("# %s\n", version);
    }
    perf_run(&o);
    /* Everything is printed. MPICH over TCP sometimes never comes back from here. */
    signal(SIGALRM, leave);
    alarm(2);
    MPI_Finalize();
    return 0;
}
