/* Timing rule of the peers' benchmarks, the same as milestone 10's (milestones/10-stress/src/measure.rs), so that one table
 * can hold both. A peer provides the functions under "the peer's part"; everything else is here.
 *
 *   A repetition: a barrier, then calls back to back; it counts with the mean per call of the slowest rank.
 *   The result:   the median over clean repetitions. A repetition is clean when no rank waited for its core for more than
 *                 0.5 % of it; with more ranks than cores every repetition counts.
 *                 With two ranks and PERF_PROBE (a file that both map), a repetition is not clean either when a cache line
 *                 took more than 200 ns from core to core and back before or after it: the host had moved them apart.
 *   Calls:        as many as fit into budget / repetitions seconds, found by trying 1, 4, 16, ... calls, after one call whose
 *                 result is checked.
 *                 -S: a barrier after each call, and only the calls' own time counts, as in OSU's benchmarks.
 *   Sizes:        as nccl-tests: all_gather, reduce_scatter and all_to_all in total bytes, the others in bytes per rank;
 *                 with -E all in bytes per rank. The column always has total bytes.
 *   Buffers:      mmap, the data one page behind a multiple of 2 MiB, written before use. "fresh" walks over a set of buffers
 *                 twice as large as the last-level cache, a new place at each call.
 *   Pinning:      rank r on core r modulo the number of cores, before the peer's library starts. */
#ifndef PERF_H
#define PERF_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum operation { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SENDRECV, PINGPONG, BARRIER, OPERATIONS };
static const char *const operation_names[OPERATIONS] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
                                                        "all_to_all", "sendrecv",   "pingpong",       "barrier"};

/* The peer's part. `count` is what MPI's function takes as its count. */
static int peer_rank, peer_ranks;
static int peer_offers(enum operation op);
static int peer_in_place(enum operation op); /* in and out are then both in `out` */
static void peer_call(enum operation op, float *in, float *out, size_t count);
static void peer_barrier(void);
static double peer_max(double value);

struct options {
    const char *operations; /* a list, or "all" */
    size_t min, max, factor;
    double budget, cap; /* seconds per size; a call slower than the cap ends the operation */
    int repetitions, huge_pages, fresh, limit, each;
};
enum { PERIOD = 4093, GUARD = 4096, MOST_CALLS = 20000, FEWEST = 3, MOST_REPETITIONS = 1000, HUGE_PAGE = 2 << 20 };

static const double SLOW = 0.01; /* seconds: such a call is estimated once */
static int all_count; /* disturbed repetitions count too */
static int between; /* a barrier after each call */

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds that this thread was ready to run and had no core. */
static double seconds_waited(void) {
    static int file = -2;
    char text[128];
    unsigned long long ran, waited;
    if (file == -2) file = open("/proc/thread-self/schedstat", O_RDONLY);
    ssize_t n = file < 0 ? -1 : pread(file, text, sizeof text - 1, 0);
    if (n <= 0) return 0;
    text[n] = 0;
    return sscanf(text, "%llu %llu", &ran, &waited) == 2 ? (double)waited * 1e-9 : 0;
}

static void perf_usage(const char *program) {
    fprintf(stderr,
            "usage: %s [-o OPERATIONS|all] [-b MIN] [-e MAX] [-f FACTOR] [-t SECONDS_PER_SIZE] [-r REPETITIONS] [-H huge pages]\n"
            "       [-F fresh buffers] [-E sizes per rank] [-S a barrier after each call] [-a all repetitions count] [-c CAP_SECONDS_PER_CALL] [-T LIMIT_SECONDS]\n",
            program);
    exit(2);
}

static struct options perf_options(int argc, char **argv) {
    struct options o = {"all", 8, 128u << 20, 4, 0.014, 1.0, 7, 0, 0, 0, 0};
    int letter;
    optind = 1;
    while ((letter = getopt(argc, argv, "o:b:e:f:t:r:HFESac:T:n:B")) != -1) switch (letter) {
            case 'o': o.operations = optarg; break;
            case 'b': o.min = strtoull(optarg, 0, 10); break;
            case 'e': o.max = strtoull(optarg, 0, 10); break;
            case 'f': o.factor = strtoull(optarg, 0, 10); break;
            case 't': o.budget = atof(optarg); break;
            case 'r': o.repetitions = atoi(optarg); break;
            case 'H': o.huge_pages = 1; break;
            case 'F': o.fresh = 1; break;
            case 'E': o.each = 1; break;
            case 'S': between = 1; break;
            case 'a': all_count = 1; break;
            case 'c': o.cap = atof(optarg); break;
            case 'T': o.limit = atoi(optarg); break; /* a rank that hangs ends itself */
            case 'n': case 'B': break;                      /* read by gloo_perf */
            default: perf_usage(argv[0]);
        }
    if (o.min < 4 || o.max < o.min || o.factor < 2 || o.repetitions < 1 || o.repetitions > MOST_REPETITIONS || !(o.budget > 0) ||
        !(o.cap > 0))
        perf_usage(argv[0]);
    return o;
}

/* Before the peer's library starts: its threads inherit the core. Ranks whose launcher dies, die. */
static void perf_pin(int rank) {
    cpu_set_t one;
    long cores = sysconf(_SC_NPROCESSORS_ONLN); /* not our affinity: a launcher may have bound us to one core already */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    CPU_ZERO(&one);
    CPU_SET((size_t)(rank % (cores > 0 ? cores : 1)), &one);
    sched_setaffinity(0, sizeof one, &one);
}

static char *perf_map(size_t bytes, int huge_pages) {
    size_t length = (bytes + 2 * GUARD + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    char *at = (char *)mmap(0, length + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == (char *)MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    at = (char *)(((uintptr_t)at + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(at, length, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(at, 0x7d, length);
    return at + GUARD;
}

/* Twice the last-level cache: what is touched again after a walk over so much is in no cache. */
static size_t perf_fresh_bytes(void) {
    size_t kib = 0;
    FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
    if (file) {
        if (fscanf(file, "%zuK", &kib) != 1) kib = 0;
        fclose(file);
    }
    return 2 * (kib ? kib << 10 : (size_t)32 << 20);
}

/* Values: whole numbers, so small that floats hold every sum; they repeat after a prime number of elements. */
static float perf_inputs[64][PERIOD], perf_sums[PERIOD];

static void perf_tables(void) {
    for (int i = 0; i < PERIOD; i++) {
        perf_sums[i] = 0;
        for (int r = 0; r < peer_ranks && r < 64; r++) {
            perf_inputs[r][i] = (float)((i * 7919 + r * 104729 + (i >> 3) * r) % 2003 - 1001);
            perf_sums[i] += perf_inputs[r][i];
        }
    }
}

static void perf_fill(float *to, size_t count, const float *table) {
    for (size_t done = 0; done < count; done += PERIOD)
        memcpy(to + done, table, sizeof(float) * (count - done < (size_t)PERIOD ? count - done : (size_t)PERIOD));
}

/* Wrong elements of `count` that should be the table's from index `start` on. */
static size_t perf_wrong(const float *got, size_t count, const float *table, size_t start) {
    size_t wrong = 0, at = start % PERIOD;
    for (size_t done = 0; done < count;) {
        size_t n = PERIOD - at < count - done ? PERIOD - at : count - done;
        if (memcmp(got + done, table + at, n * sizeof(float)))
            for (size_t i = 0; i < n; i++) wrong += got[done + i] != table[at + i];
        done += n;
        at = 0;
    }
    return wrong;
}

struct layout {
    size_t count, in, out;
};
static struct layout perf_layout(enum operation op, size_t bytes, int per_rank) {
    size_t all = bytes / sizeof(float), each = per_rank ? all : all / (size_t)peer_ranks, total = each * (size_t)peer_ranks;
    switch (op) {
        case ALL_GATHER: return (struct layout){each, each, total};
        case REDUCE_SCATTER: return (struct layout){each, total, each};
        case ALL_TO_ALL: return (struct layout){each, total, total};
        case BARRIER: return (struct layout){0, 0, 0};
        default: return (struct layout){all, all, all};
    }
}

static size_t perf_check(enum operation op, struct layout l, const float *out) {
    int n = peer_ranks, me = peer_rank;
    size_t wrong = 0;
    switch (op) {
        case ALL_REDUCE: return perf_wrong(out, l.out, perf_sums, 0);
        case REDUCE_SCATTER: return perf_wrong(out, l.count, perf_sums, (size_t)me * l.count);
        case BROADCAST: return perf_wrong(out, l.out, perf_inputs[0], 0);
        case REDUCE: return me ? 0 : perf_wrong(out, l.out, perf_sums, 0);
        case SENDRECV: return perf_wrong(out, l.out, perf_inputs[(me + n - 1) % n], 0);
        case PINGPONG: return me > 1 ? 0 : perf_wrong(out, l.out, perf_inputs[1 - me], 0);
        case ALL_GATHER:
            for (int r = 0; r < n; r++) wrong += perf_wrong(out + (size_t)r * l.count, l.count, perf_inputs[r], 0);
            return wrong;
        case ALL_TO_ALL:
            for (int r = 0; r < n; r++)
                wrong += perf_wrong(out + (size_t)r * l.count, l.count, perf_inputs[r], (size_t)me * l.count);
            return wrong;
        default: return 0;
    }
}

/* Where the calls of one size find their buffers: one place, or `places` of them in turn. */
struct walk {
    char *in, *out;
    size_t in_step, out_step, places, next;
};
static float *walk_in(const struct walk *w, size_t place) { return (float *)(w->in + place * w->in_step); }
static float *walk_out(const struct walk *w, size_t place) { return (float *)(w->out + place * w->out_step); }

/* Nanoseconds of a cache line between the two ranks, there and back: the fastest of a few batches. 0: not asked for. */
static double perf_probe(void) {
    static volatile uint32_t *lines;
    static uint32_t trip;
    static int tried;
    if (!tried) {
        const char *name = getenv("PERF_PROBE");
        tried = 1;
        if (name && peer_ranks == 2) {
            int file = open(name, O_RDWR);
            void *at = file < 0 ? MAP_FAILED : mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            if (at != MAP_FAILED) lines = (volatile uint32_t *)at;
            if (lines) lines[peer_rank * 64] = 0;
        }
        peer_barrier();
    }
    if (!lines) return 0;
    double best = 1e9;
    for (int batch = 0; batch < 4; batch++) {
        double start = seconds_now();
        for (int i = 0; i < 25; i++) {
            trip++;
            if (peer_rank == 0) __atomic_store_n(&lines[0], trip, __ATOMIC_RELEASE);
            /* Bounded, so that a peer that has died is noticed elsewhere. */
            for (long turn = 0; turn < 100000000 && __atomic_load_n(&lines[(1 - peer_rank) * 64], __ATOMIC_ACQUIRE) != trip; turn++) {
            }
            if (peer_rank == 1) __atomic_store_n(&lines[64], trip, __ATOMIC_RELEASE);
        }
        best = fmin(best, (seconds_now() - start) / 25 * 1e9);
    }
    return best;
}

/* Mean seconds per call of the slowest rank; whether a rank waited for its core too long. */
static double perf_repetition(enum operation op, size_t count, struct walk *w, long calls, int *dirty) {
    peer_barrier();
    double apart = perf_probe();
    peer_barrier();
    double waited = seconds_waited(), start = seconds_now(), took = 0;
    for (long i = 0; i < calls; i++) {
        double before = between ? seconds_now() : 0;
        peer_call(op, walk_in(w, w->next), walk_out(w, w->next), count);
        if (++w->next >= w->places) w->next = 0;
        if (!between) continue;
        took += seconds_now() - before;
        peer_barrier();
    }
    double all = seconds_now() - start;
    if (!between) took = all;
    waited = seconds_waited() - waited;
    double slowest = peer_max(took);
    apart = fmax(apart, perf_probe());
    *dirty = peer_max((waited > 0.005 * all && waited > 3e-6) || apart > 200) > 0;
    return slowest / (double)calls;
}

static int perf_by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* One line; false when calls are so slow that larger sizes should not be tried. */
static int perf_size(enum operation op, size_t bytes, const struct options *o, char *in, char *out, size_t area) {
    static double clean[MOST_REPETITIONS], all[3 * MOST_REPETITIONS];
    struct layout l = perf_layout(op, bytes, o->each);
    size_t larger = l.in > l.out ? l.in : l.out, size = larger * sizeof(float);
    if (op != BARRIER && !l.count) return 1;
    int in_place = peer_in_place(op);
    if (in_place) l.in = l.out = larger;
    struct walk w = {in, out, 0, 0, 1, 0};
    if (o->fresh && op != BARRIER) {
        w.in_step = (l.in * sizeof(float) + 63) / 64 * 64;
        w.out_step = (l.out * sizeof(float) + 63) / 64 * 64;
        w.places = area / (w.in_step > w.out_step ? w.in_step : w.out_step);
        if (w.places < 1) w.places = 1;
    }
    for (size_t p = 0; p < w.places; p++) {
        perf_fill(walk_in(&w, p), l.in, perf_inputs[peer_rank]);
        if (in_place) perf_fill(walk_out(&w, p), l.out, perf_inputs[peer_rank]);
        else memset(walk_out(&w, p), 0x7d, l.out * sizeof(float));
    }
    peer_barrier();
    peer_call(op, walk_in(&w, 0), walk_out(&w, 0), l.count);
    size_t wrong = perf_check(op, l, walk_out(&w, 0));
    /* In place a result is the next call's input: zeros do not grow. */
    for (size_t p = 0; in_place && p < w.places; p++) memset(walk_out(&w, p), 0, l.out * sizeof(float));

    int dirty, repetitions = o->repetitions, n_clean = 0, n_all = 0;
    long calls = 1;
    double per = 0, slice = o->budget / repetitions, spent = 0;
    for (;;) {
        /* Fastest of three, so that one interruption does not decide; a slow call is tried once. */
        for (int i = 0; i < 3; i++) {
            double t = perf_repetition(op, l.count, &w, calls, &dirty);
            per = i ? fmin(per, t) : t;
            if (per * (double)calls < slice / 4 || per > SLOW) break;
        }
        if (per * (double)calls >= slice / 4 || calls >= MOST_CALLS) break;
        calls = calls * 4 < MOST_CALLS ? calls * 4 : (long)MOST_CALLS;
    }
    int too_slow = per > o->cap;
    calls = (long)fmin(fmax(slice / per, 1), MOST_CALLS);
    if (per > slice) {
        int fit = (int)fmin(o->budget / per, repetitions);
        repetitions = fit > FEWEST ? fit : FEWEST < repetitions ? FEWEST : repetitions;
    }
    /* One slow call is a repetition already. */
    if (per > SLOW && calls == 1) {
        all[n_all++] = per;
        if (!dirty || all_count) clean[n_clean++] = per;
    }
    /* A disturbed repetition is made again, unless that has taken four times the budget already. */
    while (!too_slow && n_clean < repetitions && (n_all < repetitions || (n_all < 3 * repetitions && spent < 4 * o->budget))) {
        double t = perf_repetition(op, l.count, &w, calls, &dirty);
        spent += t * (double)calls;
        all[n_all++] = t;
        if (!dirty || all_count) clean[n_clean++] = t;
    }
    double *times = n_clean >= FEWEST || n_clean == n_all ? clean : all;
    int n = times == clean ? n_clean : n_all;
    qsort(times, (size_t)n, sizeof *times, perf_by_value);
    double median = n % 2 ? times[n / 2] : (times[n / 2 - 1] + times[n / 2]) / 2;

    if (!in_place) {
        wrong += perf_check(op, l, walk_out(&w, w.next ? w.next - 1 : w.places - 1));
        wrong += perf_wrong(walk_in(&w, 0), l.in, perf_inputs[peer_rank], 0);
    }
    wrong = (size_t)peer_max((double)wrong);
    if (!peer_rank) {
        printf("%s,f32,%s,%zu,%.4f,%.4f,%.4f,%ld,%d,%d,%zu\n", operation_names[op], in_place ? "in" : "out",
               op == BARRIER ? 0 : size, median * 1e6, times[0] * 1e6, times[n - 1] * 1e6, calls, n_all, n_clean, wrong);
        if (too_slow) printf("# %s: a call of %zu bytes takes %.2f s; larger sizes left out\n", operation_names[op], size, per);
        fflush(stdout);
    }
    return !too_slow;
}

static int perf_wants(const struct options *o, enum operation op) {
    char list[512], word[64];
    if (!strcmp(o->operations, "all")) return 1;
    snprintf(list, sizeof list, ",%s,", o->operations);
    snprintf(word, sizeof word, ",%s,", operation_names[op]);
    return strstr(list, word) != 0;
}

/* Everything that was asked for, on this rank. */
static void perf_run(const struct options *o) {
    size_t area = o->max * (o->each ? (size_t)peer_ranks : 1);
    if (o->fresh && area < perf_fresh_bytes()) area = perf_fresh_bytes();
    char *in = perf_map(area, o->huge_pages), *out = perf_map(area, o->huge_pages);
    perf_tables();
    if (peer_ranks > sysconf(_SC_NPROCESSORS_ONLN)) all_count = 1;
    if (!peer_rank) {
        printf("op,dtype,place,bytes,us,us_min,us_max,calls,repetitions,clean,wrong\n");
        fflush(stdout);
    }
    for (int k = 0; k < OPERATIONS; k++) {
        enum operation op = (enum operation)k;
        if (!perf_wants(o, op) || !peer_offers(op)) continue;
        for (size_t bytes = o->min; bytes <= o->max; bytes *= o->factor)
            if (!perf_size(op, bytes, o, in, out, area) || op == BARRIER) break;
    }
    if (!peer_rank) {
        printf("# complete\n");
        fflush(stdout);
    }
    peer_barrier();
}
#endif
