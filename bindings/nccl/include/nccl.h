/* NCCL's C interface, version 2.30.7, as tinynccl offers it.
 *
 * Written for tinynccl: names, values and layouts are those of NVIDIA's NCCL, so that programs compiled against either
 * header run over either library. The two are not to be included together.
 *
 * Every function has a twin with a `p` in front of its name: a profiler may define the first and call the second.
 * Functions return a status unless said otherwise. `ncclGetLastError` has the text of a failure.
 */
#ifndef NCCL_H_
#define NCCL_H_

/* Without CUDA's headers (or with NCCL_WITHOUT_CUDA) a stream is declared as CUDA declares it. */
#if !defined(NCCL_WITHOUT_CUDA) && defined(__has_include)
#if __has_include(<cuda_runtime.h>)
#define NCCL_HAS_CUDA_ 1
#endif
#endif

#ifdef NCCL_HAS_CUDA_
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#if defined(__cplusplus) && CUDART_VERSION >= 11080
#include <cuda_fp8.h>
#endif
#else
typedef struct CUstream_st* cudaStream_t;
#endif

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#define NCCL_MAJOR 2
#define NCCL_MINOR 30
#define NCCL_PATCH 7
#define NCCL_SUFFIX ""

/* Up to 2.8 a version was MNPP in decimal, since then MNNPP. */
#define NCCL_VERSION(X, Y, Z) \
  (((X) <= 2 && (Y) <= 8) ? (X) * 1000 + (Y) * 100 + (Z) : (X) * 10000 + (Y) * 100 + (Z))
#define NCCL_VERSION_CODE 23007

#ifdef __cplusplus
extern "C" {
#endif

/* A function and its twin. */
#define NCCL_FUNCTION_(type, name, ...) \
  type name(__VA_ARGS__);               \
  type p##name(__VA_ARGS__)

/* ---- Types ---------------------------------------------------------------------------------------------------- */

/* A communicator: this rank's membership in a group of ranks. */
typedef struct ncclComm* ncclComm_t;
#define NCCL_COMM_NULL NULL

/* A buffer that all ranks of a communicator have registered together. */
typedef struct ncclWindow_vidmem* ncclWindow_t;

/* By what ranks find each other: one rank makes it, all get a copy. */
#define NCCL_UNIQUE_ID_BYTES 128
typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1, /* CUDA refused something */
  ncclSystemError = 2,        /* the operating system did */
  ncclInternalError = 3,      /* a fault of the library */
  ncclInvalidArgument = 4,    /* a wrong value */
  ncclInvalidUsage = 5,       /* a call that does not fit the calls before it, or that is not there */
  ncclRemoteError = 6,        /* another rank is gone, or cannot be reached */
  ncclInProgress = 7,         /* not done yet: ask ncclCommGetAsyncError */
  ncclTimeout = 8,            /* a deadline passed */
  ncclNumResults = 9
} ncclResult_t;

typedef enum {
  ncclInt8 = 0,
  ncclChar = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;

/* Operators from ncclNumOps on are made by ncclRedOpCreatePreMulSum. */
typedef enum { ncclNumOps_dummy = 5 } ncclRedOp_dummy_t;
typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff /* the enum has 32 bits */
} ncclRedOp_t;

/* Where a scalar lies, and when it is read. */
typedef enum {
  ncclScalarDevice = 0,       /* memory of the GPU, read when the call runs */
  ncclScalarHostImmediate = 1 /* memory of the host, read at once */
} ncclScalarResidence_t;

typedef enum {
  ncclStatGpuMemSuspend = 0,   /* bytes that ncclCommSuspend gives back */
  ncclStatGpuMemSuspended = 1, /* 1: they are given back */
  ncclStatGpuMemPersist = 2,   /* bytes that it keeps */
  ncclStatGpuMemTotal = 3      /* all bytes of the GPU */
} ncclCommMemStat_t;

/* A value that the caller leaves to the library. */
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_UNDEF_FLOAT -1.0f
#define NCCL_API_MAGIC 0xcafebeef

#define NCCL_SPLIT_NOCOLOR -1

#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_STRICT_ORDERING 0x02
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01 /* calls that run are ended first */
#define NCCL_REVOKE_DEFAULT 0x00
#define NCCL_SUSPEND_MEM 0x01

/* Wishes for a communicator. Begin with NCCL_CONFIG_INITIALIZER; the library reads `size` bytes. */
typedef struct ncclConfig_v23000 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking; /* 0: calls return ncclInProgress rather than wait */
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs; /* blocks of a kernel at most */
  const char* netName;
  int splitShare;
  int trafficClass;
  const char* commName;
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
  int graphUsageMode;
  int numRmaCtx;
  int maxP2pPeers;
  int graphStreamOrdering;
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER                                                                                     \
  {                                                                                                                 \
    sizeof(ncclConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT,          \
      NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT,                   \
      NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT,                   \
      NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT,                   \
      NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT                    \
  }

/* What ncclGroupSimulateEnd tells. Begin with NCCL_SIM_INFO_INITIALIZER. */
typedef struct ncclSimInfo_v22200 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  float estimatedTime; /* microseconds; -1: not known */
} ncclSimInfo_t;

#define NCCL_SIM_INFO_INITIALIZER { sizeof(ncclSimInfo_t), 0x74685283, NCCL_VERSION_CODE, NCCL_UNDEF_FLOAT }

/* How many signals of a rank to wait for. */
typedef struct {
  int opCnt;
  int peer;
  int sigIdx; /* 0 */
  int ctx;    /* 0 */
} ncclWaitSignalDesc_t;

/* A setting. */
typedef struct ncclParamHandle* ncclParamHandle_t;

/* ---- Versions, errors ----------------------------------------------------------------------------------------- */

/* The version that the library stands for, as NCCL_VERSION computes it. */
NCCL_FUNCTION_(ncclResult_t, ncclGetVersion, int* version);

/* A status in words. */
NCCL_FUNCTION_(const char*, ncclGetErrorString, ncclResult_t result);

/* The text of the last failure: of the communicator, or with NULL of this thread. Valid until the thread asks again. */
NCCL_FUNCTION_(const char*, ncclGetLastError, ncclComm_t comm);

/* Writes the communicator's state: ncclInProgress while it starts or ends, a failure if it has failed. */
NCCL_FUNCTION_(ncclResult_t, ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t* asyncError);

/* Reads NCCL_DEBUG and its relatives again. Not part of NCCL's documented interface. */
NCCL_FUNCTION_(void, ncclResetDebugInit, void);

/* ---- Communicators -------------------------------------------------------------------------------------------- */

/* Makes an id. This process holds the ranks' meeting until its first rank has joined. */
NCCL_FUNCTION_(ncclResult_t, ncclGetUniqueId, ncclUniqueId* uniqueId);

/* Joins a communicator as `rank` of `nranks`, with the current GPU. Waits for the other ranks. One thread that drives
 * several ranks puts these calls into a group. */
NCCL_FUNCTION_(ncclResult_t, ncclCommInitRank, ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);

/* The same with wishes; `config` may be NULL. */
NCCL_FUNCTION_(ncclResult_t, ncclCommInitRankConfig, ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
               ncclConfig_t* config);

/* The same with several ids, the same ones in the same order on all ranks. */
NCCL_FUNCTION_(ncclResult_t, ncclCommInitRankScalable, ncclComm_t* newcomm, int nranks, int myrank, int nId,
               ncclUniqueId* commIds, ncclConfig_t* config);

/* Makes all ranks of a communicator in this process, rank i with GPU devlist[i], or GPU i if `devlist` is NULL. */
NCCL_FUNCTION_(ncclResult_t, ncclCommInitAll, ncclComm_t* comm, int ndev, const int* devlist);

/* A new communicator of the ranks that give the same color, in the order of their keys. NCCL_SPLIT_NOCOLOR: this rank
 * joins none and gets NULL. `config` NULL: the old one's. */
NCCL_FUNCTION_(ncclResult_t, ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
               ncclConfig_t* config);

/* A new communicator without some ranks, which do not call it. */
NCCL_FUNCTION_(ncclResult_t, ncclCommShrink, ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
               ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags);

/* An id for ncclCommGrow, to be used once. */
NCCL_FUNCTION_(ncclResult_t, ncclCommGetUniqueId, ncclComm_t comm, ncclUniqueId* uniqueId);

/* A new communicator of `nRanks`, the old one's first. New ranks pass comm NULL, the id and their rank; old ones pass
 * rank -1, and the one that made the id passes it, the others NULL. */
NCCL_FUNCTION_(ncclResult_t, ncclCommGrow, ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
               ncclComm_t* newcomm, ncclConfig_t* config);

/* Completes all calls; afterwards the communicator can only be destroyed. */
NCCL_FUNCTION_(ncclResult_t, ncclCommFinalize, ncclComm_t comm);

/* Frees the communicator. */
NCCL_FUNCTION_(ncclResult_t, ncclCommDestroy, ncclComm_t comm);

/* Ends calls that run, and frees the communicator. From any thread. */
NCCL_FUNCTION_(ncclResult_t, ncclCommAbort, ncclComm_t comm);

/* Ends calls that run; the communicator can be split, shrunk and destroyed afterwards. `revokeFlags` is 0. */
NCCL_FUNCTION_(ncclResult_t, ncclCommRevoke, ncclComm_t comm, int revokeFlags);

/* Gives memory back until ncclCommResume; `flags` is NCCL_SUSPEND_MEM. */
NCCL_FUNCTION_(ncclResult_t, ncclCommSuspend, ncclComm_t comm, int flags);
NCCL_FUNCTION_(ncclResult_t, ncclCommResume, ncclComm_t comm);

/* The number of ranks, CUDA's number of our GPU, our rank, and a figure about memory. */
NCCL_FUNCTION_(ncclResult_t, ncclCommCount, const ncclComm_t comm, int* count);
NCCL_FUNCTION_(ncclResult_t, ncclCommCuDevice, const ncclComm_t comm, int* device);
NCCL_FUNCTION_(ncclResult_t, ncclCommUserRank, const ncclComm_t comm, int* rank);
NCCL_FUNCTION_(ncclResult_t, ncclCommMemStats, ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value);

/* ---- Memory --------------------------------------------------------------------------------------------------- */

/* Memory of the current GPU that windows can register. */
NCCL_FUNCTION_(ncclResult_t, ncclMemAlloc, void** ptr, size_t size);
NCCL_FUNCTION_(ncclResult_t, ncclMemFree, void* ptr);

/* Announces a buffer that calls will use often, on this rank alone. */
NCCL_FUNCTION_(ncclResult_t, ncclCommRegister, const ncclComm_t comm, void* buff, size_t size, void** handle);
NCCL_FUNCTION_(ncclResult_t, ncclCommDeregister, const ncclComm_t comm, void* handle);

/* Registers a buffer together with all ranks: calls use it without copies, and ncclPutSignal writes into it. `buff` is a
 * multiple of NCCL_WIN_REQUIRED_ALIGNMENT. The window is NULL where the ranks do not reach each other's memory. */
NCCL_FUNCTION_(ncclResult_t, ncclCommWindowRegister, ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
               int winFlags);
NCCL_FUNCTION_(ncclResult_t, ncclCommWindowDeregister, ncclComm_t comm, ncclWindow_t win);

/* The address that the window was registered with. */
NCCL_FUNCTION_(ncclResult_t, ncclWinGetUserPtr, ncclComm_t comm, ncclWindow_t win, void** outUserPtr);

/* ---- Operators ------------------------------------------------------------------------------------------------ */

/* An operator that multiplies this rank's input by `scalar` and sums, for elements of `datatype`. */
NCCL_FUNCTION_(ncclResult_t, ncclRedOpCreatePreMulSum, ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
               ncclScalarResidence_t residence, ncclComm_t comm);

/* Ends it; calls that have returned may still run. */
NCCL_FUNCTION_(ncclResult_t, ncclRedOpDestroy, ncclRedOp_t op, ncclComm_t comm);

/* ---- Collectives ---------------------------------------------------------------------------------------------- */

/* They enqueue on `stream` and return. All ranks make the same calls in the same order. `count` is in elements. */

/* The root's recvbuff gets the reduction of all sendbuffs. */
NCCL_FUNCTION_(ncclResult_t, ncclReduce, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
               ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);

/* All ranks' buff gets the root's. */
NCCL_FUNCTION_(ncclResult_t, ncclBcast, void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
               cudaStream_t stream);

/* All ranks' recvbuff gets the root's sendbuff. */
NCCL_FUNCTION_(ncclResult_t, ncclBroadcast, const void* sendbuff, void* recvbuff, size_t count,
               ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);

/* All ranks' recvbuff gets the reduction of all sendbuffs. */
NCCL_FUNCTION_(ncclResult_t, ncclAllReduce, const void* sendbuff, void* recvbuff, size_t count,
               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);

/* Rank i's recvbuff gets segment i, of `recvcount`, of the reduction of all sendbuffs. */
NCCL_FUNCTION_(ncclResult_t, ncclReduceScatter, const void* sendbuff, void* recvbuff, size_t recvcount,
               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);

/* Segment i of every recvbuff gets rank i's sendbuff, of `sendcount`. */
NCCL_FUNCTION_(ncclResult_t, ncclAllGather, const void* sendbuff, void* recvbuff, size_t sendcount,
               ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);

/* Segment i of rank j's recvbuff gets segment j of rank i's sendbuff. */
NCCL_FUNCTION_(ncclResult_t, ncclAlltoAll, const void* sendbuff, void* recvbuff, size_t count,
               ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);

/* Segment i of the root's recvbuff gets rank i's sendbuff. */
NCCL_FUNCTION_(ncclResult_t, ncclGather, const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
               int root, ncclComm_t comm, cudaStream_t stream);

/* Rank i's recvbuff gets segment i of the root's sendbuff. */
NCCL_FUNCTION_(ncclResult_t, ncclScatter, const void* sendbuff, void* recvbuff, size_t count,
               ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);

/* A message to a rank, which calls ncclRecv with the same count. Several at a time go into a group. */
NCCL_FUNCTION_(ncclResult_t, ncclSend, const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
               ncclComm_t comm, cudaStream_t stream);
NCCL_FUNCTION_(ncclResult_t, ncclRecv, void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
               ncclComm_t comm, cudaStream_t stream);

/* ---- One-sided messages --------------------------------------------------------------------------------------- */

/* Copies into `peer`'s buffer of a window, `peerWinOffset` bytes from its begin, and signals that rank. `sigIdx`, `ctx`
 * and `flags` are 0. */
NCCL_FUNCTION_(ncclResult_t, ncclPutSignal, const void* localbuff, size_t count, ncclDataType_t datatype, int peer,
               ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
               cudaStream_t stream);

/* Signals `peer`. */
NCCL_FUNCTION_(ncclResult_t, ncclSignal, int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
               cudaStream_t stream);

/* Makes the stream wait for signals that no earlier wait has waited for. */
NCCL_FUNCTION_(ncclResult_t, ncclWaitSignal, int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm,
               cudaStream_t stream);

/* ---- Groups --------------------------------------------------------------------------------------------------- */

/* Calls between start and end begin together, at the outermost end; their errors are that end's. */
NCCL_FUNCTION_(ncclResult_t, ncclGroupStart, void);
NCCL_FUNCTION_(ncclResult_t, ncclGroupEnd, void);

/* Ends a group without its calls, and estimates their time. */
NCCL_FUNCTION_(ncclResult_t, ncclGroupSimulateEnd, ncclSimInfo_t* simInfo);

/* ---- Settings by name ----------------------------------------------------------------------------------------- */

/* A handle, valid for ever. */
NCCL_FUNCTION_(ncclResult_t, ncclParamBind, ncclParamHandle_t* out, const char* key);

/* The value, if it is a number that fits. */
NCCL_FUNCTION_(ncclResult_t, ncclParamGetI8, ncclParamHandle_t h, int8_t* out);
NCCL_FUNCTION_(ncclResult_t, ncclParamGetI16, ncclParamHandle_t h, int16_t* out);
NCCL_FUNCTION_(ncclResult_t, ncclParamGetI32, ncclParamHandle_t h, int32_t* out);
NCCL_FUNCTION_(ncclResult_t, ncclParamGetI64, ncclParamHandle_t h, int64_t* out);
NCCL_FUNCTION_(ncclResult_t, ncclParamGetU8, ncclParamHandle_t h, uint8_t* out);
NCCL_FUNCTION_(ncclResult_t, ncclParamGetU16, ncclParamHandle_t h, uint16_t* out);
NCCL_FUNCTION_(ncclResult_t, ncclParamGetU32, ncclParamHandle_t h, uint32_t* out);
NCCL_FUNCTION_(ncclResult_t, ncclParamGetU64, ncclParamHandle_t h, uint64_t* out);

/* The value as a text, valid until the thread's next call; its bytes; both by name. */
NCCL_FUNCTION_(ncclResult_t, ncclParamGetStr, ncclParamHandle_t h, const char** out);
NCCL_FUNCTION_(ncclResult_t, ncclParamGet, ncclParamHandle_t h, void* out, int maxLen, int* len);
NCCL_FUNCTION_(ncclResult_t, ncclParamGetParameter, const char* key, const char** value, int* valueLen);

/* All names; all names and values, printed. */
NCCL_FUNCTION_(ncclResult_t, ncclParamGetAllParameterKeys, const char*** table, int* tableLen);
NCCL_FUNCTION_(void, ncclParamDumpAll, void);

#undef NCCL_FUNCTION_
#undef NCCL_HAS_CUDA_

#ifdef __cplusplus
}
#endif

#endif
