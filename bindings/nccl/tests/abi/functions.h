/* The functions of NCCL 2.30.7 as function pointers: each must be what the header declares, and so must its twin. */
#define SAME(type, name, ...)                              \
  static type (*const check_##name)(__VA_ARGS__) = name;   \
  static type (*const check_p##name)(__VA_ARGS__) = p##name

typedef ncclResult_t Status;
typedef ncclComm_t Comm;
typedef cudaStream_t Stream;
typedef ncclDataType_t Type;
typedef ncclRedOp_t Op;
typedef ncclParamHandle_t Handle;

SAME(Status, ncclGetVersion, int*);
SAME(const char*, ncclGetErrorString, Status);
SAME(const char*, ncclGetLastError, Comm);
SAME(Status, ncclCommGetAsyncError, Comm, Status*);
SAME(Status, ncclGetUniqueId, ncclUniqueId*);
SAME(Status, ncclCommInitRank, Comm*, int, ncclUniqueId, int);
SAME(Status, ncclCommInitRankConfig, Comm*, int, ncclUniqueId, int, ncclConfig_t*);
SAME(Status, ncclCommInitRankScalable, Comm*, int, int, int, ncclUniqueId*, ncclConfig_t*);
SAME(Status, ncclCommInitAll, Comm*, int, const int*);
SAME(Status, ncclCommSplit, Comm, int, int, Comm*, ncclConfig_t*);
SAME(Status, ncclCommShrink, Comm, int*, int, Comm*, ncclConfig_t*, int);
SAME(Status, ncclCommGetUniqueId, Comm, ncclUniqueId*);
SAME(Status, ncclCommGrow, Comm, int, const ncclUniqueId*, int, Comm*, ncclConfig_t*);
SAME(Status, ncclCommFinalize, Comm);
SAME(Status, ncclCommDestroy, Comm);
SAME(Status, ncclCommAbort, Comm);
SAME(Status, ncclCommRevoke, Comm, int);
SAME(Status, ncclCommSuspend, Comm, int);
SAME(Status, ncclCommResume, Comm);
SAME(Status, ncclCommCount, const Comm, int*);
SAME(Status, ncclCommCuDevice, const Comm, int*);
SAME(Status, ncclCommUserRank, const Comm, int*);
SAME(Status, ncclCommMemStats, Comm, ncclCommMemStat_t, uint64_t*);
SAME(Status, ncclMemAlloc, void**, size_t);
SAME(Status, ncclMemFree, void*);
SAME(Status, ncclCommRegister, const Comm, void*, size_t, void**);
SAME(Status, ncclCommDeregister, const Comm, void*);
SAME(Status, ncclCommWindowRegister, Comm, void*, size_t, ncclWindow_t*, int);
SAME(Status, ncclCommWindowDeregister, Comm, ncclWindow_t);
SAME(Status, ncclWinGetUserPtr, Comm, ncclWindow_t, void**);
SAME(Status, ncclRedOpCreatePreMulSum, Op*, void*, Type, ncclScalarResidence_t, Comm);
SAME(Status, ncclRedOpDestroy, Op, Comm);
SAME(Status, ncclReduce, const void*, void*, size_t, Type, Op, int, Comm, Stream);
SAME(Status, ncclBcast, void*, size_t, Type, int, Comm, Stream);
SAME(Status, ncclBroadcast, const void*, void*, size_t, Type, int, Comm, Stream);
SAME(Status, ncclAllReduce, const void*, void*, size_t, Type, Op, Comm, Stream);
SAME(Status, ncclReduceScatter, const void*, void*, size_t, Type, Op, Comm, Stream);
SAME(Status, ncclAllGather, const void*, void*, size_t, Type, Comm, Stream);
SAME(Status, ncclAlltoAll, const void*, void*, size_t, Type, Comm, Stream);
SAME(Status, ncclGather, const void*, void*, size_t, Type, int, Comm, Stream);
SAME(Status, ncclScatter, const void*, void*, size_t, Type, int, Comm, Stream);
SAME(Status, ncclSend, const void*, size_t, Type, int, Comm, Stream);
SAME(Status, ncclRecv, void*, size_t, Type, int, Comm, Stream);
SAME(Status, ncclPutSignal, const void*, size_t, Type, int, ncclWindow_t, size_t, int, int, unsigned int, Comm, Stream);
SAME(Status, ncclSignal, int, int, int, unsigned int, Comm, Stream);
SAME(Status, ncclWaitSignal, int, ncclWaitSignalDesc_t*, Comm, Stream);
SAME(Status, ncclGroupStart, void);
SAME(Status, ncclGroupEnd, void);
SAME(Status, ncclGroupSimulateEnd, ncclSimInfo_t*);
SAME(Status, ncclParamBind, Handle*, const char*);
SAME(Status, ncclParamGetI8, Handle, int8_t*);
SAME(Status, ncclParamGetI16, Handle, int16_t*);
SAME(Status, ncclParamGetI32, Handle, int32_t*);
SAME(Status, ncclParamGetI64, Handle, int64_t*);
SAME(Status, ncclParamGetU8, Handle, uint8_t*);
SAME(Status, ncclParamGetU16, Handle, uint16_t*);
SAME(Status, ncclParamGetU32, Handle, uint32_t*);
SAME(Status, ncclParamGetU64, Handle, uint64_t*);
SAME(Status, ncclParamGetStr, Handle, const char**);
SAME(Status, ncclParamGet, Handle, void*, int, int*);
SAME(Status, ncclParamGetParameter, const char*, const char**, int*);
SAME(Status, ncclParamGetAllParameterKeys, const char***, int*);
SAME(void, ncclParamDumpAll, void);
/* The 64th; NVIDIA's header has it on Linux alone, where a define says so, and marks it as deprecated. */
SAME(void, ncclResetDebugInit, void);
