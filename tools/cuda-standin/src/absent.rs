//! Functions that are there, so that programs load, and answer `CUDA_ERROR_NOT_SUPPORTED`: kernels above all, memory
//! that other processes map, arrays, textures, graphs that are built by hand.

use cudarc::driver::sys::CUresult;

/// Exports functions that look at no argument: C's calling convention lets them have any.
macro_rules! absent {
    ($($name:ident)*) => {$(
        /// The driver's function of that name: not supported.
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> CUresult {
            CUresult::CUDA_ERROR_NOT_SUPPORTED
        }
    )*};
}

// All others of the header for CUDA 12.0.
absent! {
    cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor_v2
    cuArrayGetMemoryRequirements cuArrayGetPlane cuArrayGetSparseProperties cuCtxAttach cuCtxDetach
    cuCtxGetCacheConfig cuCtxGetExecAffinity cuCtxGetSharedMemConfig cuCtxResetPersistingL2Cache
    cuCtxSetCacheConfig cuCtxSetSharedMemConfig cuDestroyExternalMemory cuDestroyExternalSemaphore
    cuDeviceComputeCapability cuDeviceGetExecAffinitySupport cuDeviceGetGraphMemAttribute cuDeviceGetLuid
    cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth cuDeviceGraphMemTrim cuDeviceSetGraphMemAttribute
    cuExternalMemoryGetMappedBuffer cuExternalMemoryGetMappedMipmappedArray cuFuncGetAttribute cuFuncGetModule
    cuFuncSetAttribute cuFuncSetBlockShape cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuFuncSetSharedSize
    cuGetExportTable cuGetProcAddress_v2 cuGraphAddBatchMemOpNode cuGraphAddChildGraphNode
    cuGraphAddDependencies cuGraphAddEmptyNode cuGraphAddEventRecordNode cuGraphAddEventWaitNode
    cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode cuGraphAddHostNode
    cuGraphAddKernelNode_v2 cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddMemcpyNode
    cuGraphAddMemsetNode cuGraphBatchMemOpNodeGetParams cuGraphBatchMemOpNodeSetParams
    cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphDebugDotPrint cuGraphDestroyNode
    cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeGetEvent
    cuGraphEventWaitNodeSetEvent cuGraphExecBatchMemOpNodeSetParams cuGraphExecChildGraphNodeSetParams
    cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent
    cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
    cuGraphExecGetFlags cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams_v2
    cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams cuGraphExecUpdate_v2
    cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
    cuGraphExternalSemaphoresWaitNodeGetParams cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges
    cuGraphGetRootNodes cuGraphHostNodeGetParams cuGraphHostNodeSetParams cuGraphInstantiateWithParams
    cuGraphKernelNodeCopyAttributes cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams_v2
    cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams_v2 cuGraphMemAllocNodeGetParams
    cuGraphMemFreeNodeGetParams cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams
    cuGraphMemsetNodeSetParams cuGraphNodeFindInClone cuGraphNodeGetDependencies cuGraphNodeGetDependentNodes
    cuGraphNodeGetEnabled cuGraphNodeGetType cuGraphNodeSetEnabled cuGraphReleaseUserObject
    cuGraphRemoveDependencies cuGraphRetainUserObject cuGraphicsMapResources
    cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer_v2
    cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources
    cuGraphicsUnregisterResource cuImportExternalMemory cuImportExternalSemaphore cuIpcCloseMemHandle
    cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle cuIpcOpenMemHandle_v2 cuKernelGetAttribute
    cuKernelGetFunction cuKernelSetAttribute cuKernelSetCacheConfig cuLaunch cuLaunchCooperativeKernel
    cuLaunchCooperativeKernelMultiDevice cuLaunchGrid cuLaunchGridAsync cuLaunchKernel cuLaunchKernelEx
    cuLibraryGetGlobal cuLibraryGetKernel cuLibraryGetManaged cuLibraryGetModule cuLibraryGetUnifiedFunction
    cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload cuLinkAddData_v2 cuLinkAddFile_v2 cuLinkComplete
    cuLinkCreate_v2 cuLinkDestroy cuMemAddressFree cuMemAddressReserve cuMemAdvise cuMemCreate
    cuMemExportToShareableHandle cuMemGetAccess cuMemGetAllocationGranularity
    cuMemGetAllocationPropertiesFromHandle cuMemGetHandleForAddressRange cuMemImportFromShareableHandle cuMemMap
    cuMemMapArrayAsync cuMemPoolExportPointer cuMemPoolExportToShareableHandle
    cuMemPoolImportFromShareableHandle cuMemPoolImportPointer cuMemPrefetchAsync cuMemRangeGetAttribute
    cuMemRangeGetAttributes cuMemRelease cuMemRetainAllocationHandle cuMemSetAccess cuMemUnmap
    cuMemcpy2DAsync_v2 cuMemcpy2DUnaligned_v2 cuMemcpy2D_v2 cuMemcpy3DAsync_v2 cuMemcpy3DPeer
    cuMemcpy3DPeerAsync cuMemcpy3D_v2 cuMemcpyAtoA_v2 cuMemcpyAtoD_v2 cuMemcpyAtoHAsync_v2 cuMemcpyAtoH_v2
    cuMemcpyDtoA_v2 cuMemcpyHtoAAsync_v2 cuMemcpyHtoA_v2 cuMemsetD2D16Async cuMemsetD2D16_v2 cuMemsetD2D32Async
    cuMemsetD2D32_v2 cuMemsetD2D8Async cuMemsetD2D8_v2 cuMipmappedArrayCreate cuMipmappedArrayDestroy
    cuMipmappedArrayGetLevel cuMipmappedArrayGetMemoryRequirements cuMipmappedArrayGetSparseProperties
    cuModuleGetFunction cuModuleGetGlobal_v2 cuModuleGetLoadingMode cuModuleGetSurfRef cuModuleGetTexRef
    cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload
    cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
    cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
    cuOccupancyMaxPotentialClusterSize cuParamSetSize cuParamSetTexRef cuParamSetf cuParamSeti cuParamSetv
    cuProfilerInitialize cuProfilerStart cuProfilerStop cuSignalExternalSemaphoresAsync cuStreamCopyAttributes
    cuStreamGetAttribute cuStreamSetAttribute cuStreamUpdateCaptureDependencies cuSurfObjectCreate
    cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuSurfRefGetArray cuSurfRefSetArray cuTensorMapEncodeIm2col
    cuTensorMapEncodeTiled cuTensorMapReplaceAddress cuTexObjectCreate cuTexObjectDestroy
    cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc cuTexRefCreate
    cuTexRefDestroy cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray cuTexRefGetBorderColor
    cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy
    cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp cuTexRefGetMipmappedArray
    cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetAddress_v2 cuTexRefSetArray cuTexRefSetBorderColor
    cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat cuTexRefSetMaxAnisotropy
    cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray
    cuUserObjectCreate cuUserObjectRelease cuUserObjectRetain cuWaitExternalSemaphoresAsync
}
