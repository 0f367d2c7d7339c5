// Stands in for libtorch_cuda.so, so that a build of torch for CUDA starts without its
// kernels, as one for CPUs does.
//
// torch's Python module reads addresses of that library when it is loaded: type
// information of these classes, and functions. build.py adds a function that ends the
// process for every other name. Nothing here is ever used.
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace c10d {
struct ProcessGroupNCCL {
  struct Options : Backend::Options {
    explicit Options(bool is_high_priority_stream);
  };
  virtual ~ProcessGroupNCCL();
};
ProcessGroupNCCL::~ProcessGroupNCCL() = default;
ProcessGroupNCCL::Options::Options(bool) : Backend::Options("nccl") {}

namespace nccl2 {
struct ProcessGroupNCCL {
  virtual ~ProcessGroupNCCL();
};
ProcessGroupNCCL::~ProcessGroupNCCL() = default;
}  // namespace nccl2

// Torch's Python module sets it when it is loaded.
using gil_checker_t = bool (*)();
gil_checker_t& get_gil_checker() {
  static gil_checker_t checker = nullptr;
  return checker;
}
}  // namespace c10d

namespace torch {
namespace cuda::CUDAPluggableAllocator {
struct CUDAPluggableAllocator {
  virtual ~CUDAPluggableAllocator();
};
CUDAPluggableAllocator::~CUDAPluggableAllocator() = default;
}  // namespace cuda::CUDAPluggableAllocator

namespace inductor {
struct AOTIModelContainerRunnerCuda {
  virtual ~AOTIModelContainerRunnerCuda();
};
AOTIModelContainerRunnerCuda::~AOTIModelContainerRunnerCuda() = default;
}  // namespace inductor

namespace jit::tensorexpr {
struct CudaCodeGen {
  virtual ~CudaCodeGen();
};
CudaCodeGen::~CudaCodeGen() = default;
}  // namespace jit::tensorexpr
}  // namespace torch
