/* A CUDA runtime for machines without a GPU: devices that allocate and compute nothing.
 *
 * Under it the CUDA builds of torch and fbgemm run their host code as on a GPU: checks,
 * allocations, launches. Device memory is address space of this process; kernels are
 * not run, so that what they would write is undefined. Only what the host decides may
 * be believed: shapes, and what torch's caching allocator counts.
 *
 * Built by build.sh, loaded by LD_PRELOAD; names not defined here succeed idly.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#undef cudaGetDeviceProperties

enum { DEVICES = 8, COPIED = 1 << 20 };
static const size_t MEMORY = 1ULL << 40; /* more than any test takes */
static __thread int current;
static unsigned long handles = 0x1000;

#define OK return cudaSuccess

/* Memory: pages that cost nothing until somebody writes to them. */

static cudaError_t reserve(void **pointer, size_t size) {
  if (!size) { *pointer = NULL; OK; }
  size_t *block = mmap(NULL, size + 4096, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return cudaErrorMemoryAllocation;
  *block = size + 4096;
  *pointer = (char *)block + 4096;
  OK;
}
static cudaError_t release(void *pointer) {
  if (!pointer) OK;
  size_t *block = (size_t *)((char *)pointer - 4096);
  munmap(block, *block);
  OK;
}
cudaError_t cudaMalloc(void **p, size_t n) { return reserve(p, n); }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return reserve(p, n); }
cudaError_t cudaMallocManaged(void **p, size_t n, unsigned f) { return reserve(p, n); }
cudaError_t cudaFree(void *p) { return release(p); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return release(p); }
cudaError_t cudaFreeHost(void *p) { return release(p); }
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned f) { *d = h; OK; }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *available = *total = MEMORY;
  OK;
}
/* Pinned memory is known by its address; of what is freed, the address is not reused
 * soon enough to matter. */
static struct { char *start, *end; } pinned[4096];
static int num_pinned;
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) {
  cudaError_t error = reserve(p, n);
  if (!error && num_pinned < 4096) {
    pinned[num_pinned].start = *p;
    pinned[num_pinned++].end = (char *)*p + n;
  }
  return error;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeUnregistered;
  for (int i = 0; i < num_pinned; i++)
    if (pinned[i].start <= (char *)p && (char *)p < pinned[i].end)
      a->type = cudaMemoryTypeHost;
  OK;
}

/* Copies: what is small the host may read back; more would touch pages for nothing. */

static cudaError_t copy(void *to, const void *from, size_t size) {
  if (size <= COPIED) memmove(to, from, size);
  OK;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
  return copy(d, s, n);
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k,
                            cudaStream_t t) {
  return copy(d, s, n);
}
cudaError_t cudaMemset(void *d, int value, size_t n) {
  if (n <= COPIED) memset(d, value, n);
  OK;
}
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t s) {
  return cudaMemset(d, v, n);
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *n) { *n = DEVICES; OK; }
cudaError_t cudaGetDevice(int *d) { *d = current; OK; }
cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= DEVICES) return cudaErrorInvalidDevice;
  current = d;
  OK;
}
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; OK; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; OK; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
  snprintf(s, n, "0000:0%d:00.0", d);
  OK;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; OK; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "no GPU (memory only)");
  p->uuid.bytes[0] = (char)(d + 1);
  p->totalGlobalMem = MEMORY;
  p->major = 9; /* the shapes of an H100: they decide about launches, not memory */
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->managedMemory = p->concurrentManagedAccess = p->unifiedAddressing = 1;
  p->cooperativeLaunch = 1;
  p->textureAlignment = 512;
  OK;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int d) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, d);
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0;
  }
  OK;
}

/* Streams and events: everything has happened already. */

static cudaError_t new_handle(void *handle) {
  *(unsigned long *)handle = handles += 16;
  OK;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return new_handle(s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) {
  return new_handle(s);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
  return new_handle(s);
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  OK;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
  *c = cudaStreamCaptureStatusNone;
  OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c,
                                     unsigned long long *id, cudaGraph_t *g,
                                     const cudaGraphNode_t **d,
                                     const cudaGraphEdgeData **e, size_t *n) {
  *c = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  OK;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return new_handle(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
  return new_handle(e);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = 0;
  OK;
}

/* Kernels: known, and never run. */

void **__cudaRegisterFatBinary(void *image) {
  static void *binary[1];
  return binary;
}
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
static __thread struct { dim3 grid, block; size_t shared; void *stream; } calls[64];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t shared, void *stream) {
  calls[depth].grid = g;
  calls[depth].block = b;
  calls[depth].shared = shared;
  calls[depth++].stream = stream;
  OK;
}
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *shared, void *stream) {
  *g = calls[--depth].grid;
  *b = calls[depth].block;
  *shared = calls[depth].shared;
  *(void **)stream = calls[depth].stream;
  OK;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  OK;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->ptxVersion = a->binaryVersion = 90;
  a->numRegs = 32;
  a->maxDynamicSharedSizeBytes = 48 << 10;
  OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *n, const void *f, int block, size_t shared, unsigned flags) {
  *n = block > 0 && block < 2048 ? 2048 / block : 1;
  OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f,
                                                          int block, size_t shared) {
  *n = block > 0 && block < 2048 ? 2048 / block : 1;
  OK;
}

/* Errors, and the driver, which is not there */

const char *cudaGetErrorString(cudaError_t e) { return "error without a GPU"; }
const char *cudaGetErrorName(cudaError_t e) { return "cudaErrorUnknown"; }
static int unsupported(void) { return cudaErrorNotSupported; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
  *function = (void *)unsupported;
  if (result) *result = cudaDriverEntryPointSuccess;
  OK;
}
