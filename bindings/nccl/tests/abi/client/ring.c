/* A program as anybody writes it, against the header and linked to the library: all GPUs of one process, an all_reduce
 * and a ring. It prints "right" at the end. The driver's functions are declared as in CUDA's header. */
#include <stdio.h>
#include <stdlib.h>

#include <nccl.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, int device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuStreamCreate(cudaStream_t* stream, unsigned flags);
CUresult cuStreamSynchronize(cudaStream_t stream);
CUresult cuMemAlloc_v2(CUdeviceptr* at, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr at);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes);
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes);

#define CUDA(call) do { CUresult r_ = (call); if (r_) { printf("%s: %d\n", #call, r_); exit(1); } } while (0)
#define NCCL(call) do { ncclResult_t r_ = (call); if (r_) failed(#call, r_); } while (0)

static void failed(const char* call, ncclResult_t status) {
  printf("%s: %s: %s\n", call, ncclGetErrorString(status), ncclGetLastError(NULL));
  exit(1);
}

enum { GPUS = 3, COUNT = 1000 };

int main(void) {
  CUcontext contexts[GPUS];
  cudaStream_t streams[GPUS];
  CUdeviceptr sums[GPUS], from[GPUS], to[GPUS];
  ncclComm_t comms[GPUS];
  float numbers[COUNT];
  int version, g, i;

  NCCL(ncclGetVersion(&version));
  printf("version %d\n", version);
  CUDA(cuInit(0));
  NCCL(ncclCommInitAll(comms, GPUS, NULL));
  for (g = 0; g < GPUS; g++) {
    CUDA(cuDevicePrimaryCtxRetain(&contexts[g], g));
    CUDA(cuCtxSetCurrent(contexts[g]));
    CUDA(cuStreamCreate(&streams[g], 1));
    CUDA(cuMemAlloc_v2(&sums[g], sizeof numbers));
    CUDA(cuMemAlloc_v2(&from[g], sizeof numbers));
    CUDA(cuMemAlloc_v2(&to[g], sizeof numbers));
    for (i = 0; i < COUNT; i++) numbers[i] = (float)(g * COUNT + i);
    CUDA(cuMemcpyHtoD_v2(sums[g], numbers, sizeof numbers));
    CUDA(cuMemcpyHtoD_v2(from[g], numbers, sizeof numbers));
  }
  NCCL(ncclGroupStart());
  for (g = 0; g < GPUS; g++)
    NCCL(ncclAllReduce((void*)sums[g], (void*)sums[g], COUNT, ncclFloat, ncclSum, comms[g], streams[g]));
  NCCL(ncclGroupEnd());
  NCCL(ncclGroupStart());
  for (g = 0; g < GPUS; g++) {
    NCCL(pncclSend((void*)from[g], COUNT, ncclFloat, (g + 1) % GPUS, comms[g], streams[g]));
    NCCL(pncclRecv((void*)to[g], COUNT, ncclFloat, (g + GPUS - 1) % GPUS, comms[g], streams[g]));
  }
  NCCL(ncclGroupEnd());
  for (g = 0; g < GPUS; g++) {
    int before = (g + GPUS - 1) % GPUS;
    CUDA(cuCtxSetCurrent(contexts[g]));
    CUDA(cuStreamSynchronize(streams[g]));
    CUDA(cuMemcpyDtoH_v2(numbers, sums[g], sizeof numbers));
    for (i = 0; i < COUNT; i++)
      if (numbers[i] != (float)(3 * i + 3 * COUNT)) return printf("GPU %d: sum %d is %g\n", g, i, numbers[i]), 1;
    CUDA(cuMemcpyDtoH_v2(numbers, to[g], sizeof numbers));
    for (i = 0; i < COUNT; i++)
      if (numbers[i] != (float)(before * COUNT + i)) return printf("GPU %d: got %g as %d\n", g, numbers[i], i), 1;
    CUDA(cuMemFree_v2(sums[g]));
    CUDA(cuMemFree_v2(from[g]));
    CUDA(cuMemFree_v2(to[g]));
  }
  for (g = 0; g < GPUS; g++) NCCL(ncclCommDestroy(comms[g]));
  puts("right");
  return 0;
}
