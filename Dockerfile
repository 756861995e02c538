# The course on any machine with a container runtime:
#
#   docker build -t tinynccl . && docker run --rm -it tinynccl                                       CPUs
#   docker build -t tinynccl:cuda --build-arg DEVICE=cuda . && docker run --rm -it --gpus all tinynccl:cuda
#
# The image holds the sources, Rust, and the first programs built. RDMA needs nothing: the card is in user space. For CUDA the
# driver is the host's; CUDA's compiler at run time (NVRTC), cuBLAS and NCCL come with the base image.
ARG DEVICE=cpu
ARG RUST=rust:1.95-slim-bookworm
ARG CUDA=nvidia/cuda:12.6.3-devel-ubuntu24.04

FROM ${RUST} AS cpu

FROM ${CUDA} AS cuda
ENV RUSTUP_HOME=/usr/local/rustup CARGO_HOME=/usr/local/cargo
ENV PATH=/usr/local/cargo/bin:${PATH}
COPY --from=cpu /usr/local/rustup /usr/local/rustup
COPY --from=cpu /usr/local/cargo /usr/local/cargo

# What .devcontainer opens over the sources of the host, and what the course is built on. A linker; git, by which
# `cargo xtask solution` compares; Python for the scripts.
FROM ${DEVICE} AS tools
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends ca-certificates gcc git libc6-dev python3 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /tinynccl

FROM tools AS course
COPY . .
RUN cargo build --locked -p xtask -p tinynccl-cli -p lib-hello -p whiteboard
RUN cargo build --release --locked -p tcp-echo -p allreduce-tcp -p allreduce-gpu -p stress
CMD ["bash"]
