// Times Gloo's collectives over TCP on the loopback interface; the rule is perf.h's. Starts its own ranks (-n); with
// GLOO_DIRECTORY and GLOO_INTERFACE it is rank RANK of a job on several hosts.
//
//   c++ -O3 -march=native -o gloo_perf gloo_perf.cc -lgloo -lpthread;  ./gloo_perf -n 2 -o all_reduce -b 8 -e 1048576
//
// Without -B Gloo's own thread moves the bytes and wakes the caller: its default, and what PyTorch runs. With -B the caller polls the
// sockets; only Gloo's older algorithms can do that: all_reduce, in place, and reduce_scatter, in place too. They are called in
// place here, which spares them a copy that the others make. This version of Gloo has no bf16.
#include "perf.h"

#include <sys/wait.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>

using gloo::rendezvous::Context;
static std::shared_ptr<Context> world, polling;
static const std::chrono::seconds patience(60);

static int peer_offers(enum operation op) {
    if (polling) return op == ALL_REDUCE || op == REDUCE_SCATTER;
    return op != PINGPONG || peer_ranks == 2;
}

static int peer_in_place(enum operation op) { return polling ? 1 : op == BROADCAST || op == REDUCE_SCATTER; }

static void peer_barrier() {
    gloo::BarrierOptions options(world);
    gloo::barrier(options);
}

static double peer_max(double value) {
    double most = value;
    gloo::AllreduceOptions options(world);
    options.setOutput(&most, 1);
    options.setReduceFunction([](void *to, const void *a, const void *b, size_t n) {
        for (size_t i = 0; i < n; i++) static_cast<double *>(to)[i] = fmax(static_cast<const double *>(a)[i], static_cast<const double *>(b)[i]);
    });
    gloo::allreduce(options);
    return most;
}

using Reduction = void (*)(void *, const void *, const void *, size_t);
static const Reduction sum = &gloo::sum<float>;

// A call that is ready to be made again: what can be prepared for a buffer is prepared once, as a program that keeps its buffers does.
static std::function<void()> prepare(enum operation op, float *in, float *out, size_t n) {
    size_t all = n * size_t(peer_ranks);
    int right = (peer_rank + 1) % peer_ranks, left = (peer_rank + peer_ranks - 1) % peer_ranks;
    switch (op) {
        case ALL_REDUCE: {
            if (polling) {
                auto algorithm = std::make_shared<gloo::AllreduceHalvingDoubling<float>>(polling, std::vector<float *>{out}, int(n));
                return [=] { algorithm->run(); };
            }
            auto o = std::make_shared<gloo::AllreduceOptions>(world);
            o->setInput(in, n);
            o->setOutput(out, n);
            o->setReduceFunction(sum);
            return [=] { gloo::allreduce(*o); };
        }
        case REDUCE_SCATTER: {
            // It has no other, and it is in place: our segment ends up at the buffer's beginning.
            std::vector<int> counts(static_cast<size_t>(peer_ranks), static_cast<int>(n));
            auto algorithm = std::make_shared<gloo::ReduceScatterHalvingDoubling<float>>(
                polling ? polling : world, std::vector<float *>{out}, int(all), counts);
            return [=] { algorithm->run(); };
        }
        case ALL_GATHER: {
            auto o = std::make_shared<gloo::AllgatherOptions>(world);
            o->setInput(in, n);
            o->setOutput(out, all);
            return [=] { gloo::allgather(*o); };
        }
        case BROADCAST: {
            auto o = std::make_shared<gloo::BroadcastOptions>(world);
            o->setOutput(out, n);
            o->setRoot(0);
            return [=] { gloo::broadcast(*o); };
        }
        case REDUCE: {
            auto o = std::make_shared<gloo::ReduceOptions>(world);
            o->setInput(in, n);
            o->setOutput(out, n);
            o->setRoot(0);
            o->setReduceFunction(sum);
            return [=] { gloo::reduce(*o); };
        }
        case ALL_TO_ALL: {
            auto o = std::make_shared<gloo::AlltoallOptions>(world);
            o->setInput(in, all);
            o->setOutput(out, all);
            return [=] { gloo::alltoall(*o); };
        }
        case SENDRECV:
        case PINGPONG: {
            std::shared_ptr<gloo::transport::UnboundBuffer> from = world->createUnboundBuffer(in, n * sizeof(float));
            std::shared_ptr<gloo::transport::UnboundBuffer> to = world->createUnboundBuffer(out, n * sizeof(float));
            auto send = [=] { from->send(right, 77); from->waitSend(patience); };
            auto receive = [=] { to->recv(left, 77); to->waitRecv(patience); };
            if (op == SENDRECV)
                return [=] { to->recv(left, 77); send(); to->waitRecv(patience); };
            if (peer_rank) return [=] { receive(); send(); };
            return [=] { send(); receive(); };
        }
        default: return peer_barrier;
    }
}

static void peer_call(enum operation op, float *in, float *out, size_t count) {
    static std::tuple<int, float *, float *, size_t> last(-1, nullptr, nullptr, 0);
    static std::function<void()> call;
    auto now = std::make_tuple(int(op), in, out, count);
    if (now != last) {
        last = now;
        call = nullptr; // frees the old one's slots first
        call = prepare(op, in, out, count);
    }
    call();
}

static std::shared_ptr<Context> connect(const char *name, bool poll, const std::string &directory) {
    gloo::transport::tcp::attr attribute;
    const char *interface = getenv("GLOO_INTERFACE");
    attribute.iface = interface ? interface : "lo";
    std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attribute);
    auto store = std::make_shared<gloo::rendezvous::FileStore>(directory);
    gloo::rendezvous::PrefixStore prefix(name, *store);
    auto context = std::make_shared<Context>(peer_rank, peer_ranks);
    context->setTimeout(patience);
    context->connectFullMesh(prefix, device);
    for (int i = 0; poll && i < peer_ranks; i++)
        if (i != peer_rank) context->getPair(i)->setSync(true, true);
    return context;
}

int main(int argc, char **argv) {
    struct options o = perf_options(argc, argv);
    bool poll = false;
    peer_ranks = 2;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "-B")) poll = true;
        if (!strcmp(argv[i], "-n") && i + 1 < argc) peer_ranks = atoi(argv[i + 1]);
    }
    // One rank of a job on several hosts: RANK, and a directory that all of them see.
    const char *shared = getenv("GLOO_DIRECTORY"), *only = getenv("RANK");
    char directory[] = "/tmp/gloo_perf.XXXXXX";
    if (peer_ranks < 2 || peer_ranks > 64 || !(shared ? only != nullptr : mkdtemp(directory) != nullptr)) perf_usage(argv[0]);
    std::vector<pid_t> children;
    for (int rank = 0; rank < peer_ranks; rank++) {
        if (shared && rank != atoi(only)) continue;
        pid_t child = fork();
        if (child < 0) return perror("fork"), 1;
        children.push_back(child);
        if (child) continue;
        peer_rank = rank;
        alarm(unsigned(o.limit));
        perf_pin(rank);
        try {
            world = connect("world", false, shared ? shared : directory);
            if (poll) polling = connect("polling", true, shared ? shared : directory);
            perf_run(&o);
        } catch (const std::exception &error) {
            fprintf(stderr, "rank %d: %s\n", rank, error.what());
            _exit(1);
        }
        fflush(stdout);
        _exit(0);
    }
    int failed = 0, status;
    for (size_t left = children.size(); left > 0; left--) {
        wait(&status);
        if (status && !failed) {
            failed = 1;
            for (pid_t child : children) kill(child, SIGKILL);
        }
    }
    if (shared) return failed;
    std::string clean = std::string("rm -rf ") + directory;
    return system(clean.c_str()) != 0 || failed;
}
