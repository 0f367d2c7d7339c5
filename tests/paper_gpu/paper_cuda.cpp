// A CUDA device that lives in host memory, for builds of torch that have no CUDA.
//
// Tensors on "cuda:N" are real ones: they have their own storage, and every operator on
// them runs the CPU's kernel on a view of the same bytes. Nothing is asynchronous, and
// no time means anything. Loaded before torch, by tests/paper_gpu/device.py.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

namespace paper {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr DeviceIndex kNumDevices = 8;
constexpr size_t kAlignment = 64;
thread_local DeviceIndex current = 0;

void check_ordinal(int64_t index) {
  TORCH_CHECK(index < kNumDevices, "CUDA error: invalid device ordinal");
}

DeviceIndex or_current(int64_t index) {
  check_ordinal(index);
  return index < 0 ? current : static_cast<DeviceIndex>(index);
}

DeviceIndex or_current(std::optional<Device> device) {
  return or_current(device && device->has_index() ? device->index() : -1);
}

// ---------------------------------------------------------------- memory

// Blocks of bytes in host memory, on the current device.
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    const Device device(c10::kCUDA, current);
    if (asked == 0) {
      return {nullptr, device};
    }
    const size_t bytes = (asked + kAlignment - 1) / kAlignment * kAlignment;
    void* start = std::aligned_alloc(kAlignment, bytes);
    TORCH_CHECK(start != nullptr, "no host memory for ", bytes, " bytes");
    std::memset(start, 0xFF, bytes);  // not a number: memory nobody has written shows
    return {start, start, &std::free, device};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &device_allocator)

// ---------------------------------------------------------------- streams

thread_local std::array<c10::StreamId, kNumDevices> current_streams{};
std::atomic<c10::StreamId> last_stream{0};
std::atomic<int64_t> last_event{0};

// What was queued and what waits for what, a line each, while somebody keeps it.
std::atomic<bool> keeps_journal{false};
std::mutex journal_mutex;
std::vector<std::string> journal;

const std::thread::id main_thread = std::this_thread::get_id();

void note_line(const std::string& line) {
  if (keeps_journal) {
    std::lock_guard<std::mutex> lock(journal_mutex);
    journal.push_back(line);
  }
}

void note_launch(const std::string& name, DeviceIndex device, bool is_whole) {
  note_line("launch " + name + " " + std::to_string(current_streams[device]) +
            (is_whole ? " ints" : " floats") +
            (std::this_thread::get_id() == main_thread ? " host" : " engine"));
}

void note_event(const char* what, const void* event, const c10::Stream& stream) {
  note_line(std::string(what) + " engine" +
            std::to_string(reinterpret_cast<intptr_t>(event)) + " " +
            std::to_string(stream.id()));
}

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device getDevice() const override { return {c10::kCUDA, current}; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override { current = or_current(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    current = device.index() < 0 ? current : device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::Stream getStream(Device device) const override {
    const DeviceIndex index = or_current(device.index());
    return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, index},
                       current_streams[index]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {c10::kCUDA, or_current(device.index())});
  }
  c10::Stream getNewStream(Device device, int) const override {
    const Device on(c10::kCUDA, or_current(device.index()));
    return c10::Stream(c10::Stream::UNSAFE, on, ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(++last_event);  // anything but null: recorded
    note_event("record", *event, stream);
  }
  // Work is done when it is queued: there is nothing to wait for.
  void block(void* event, const c10::Stream& stream) const override {
    note_event("block", event, stream);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

// ---------------------------------------------------------------- random numbers

// Draws what the CPU would draw from the same seed, so that results can be compared.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : GeneratorImpl({c10::kCUDA, index}, DispatchKeySet(DispatchKey::CUDA)),
        host(at::detail::createCPUGenerator()) {}
  at::Generator host;

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

// ---------------------------------------------------------------- tensors

// The same bytes as a CPU tensor; it keeps the storage alive.
Tensor host_view(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    return tensor;
  }
  const size_t offset = tensor.storage_offset() * tensor.itemsize();
  const size_t stored = tensor.storage().nbytes();
  const size_t bytes = stored > offset ? stored - offset : 0;
  void* start = bytes == 0
                    ? nullptr
                    : static_cast<char*>(tensor.storage().mutable_data()) + offset;
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(
      start, owner, [](void* held) { delete static_cast<c10::Storage*>(held); },
      c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data),
                       c10::GetCPUAllocator(), /*resizable=*/true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) {
    view._set_conj(true);
  }
  return view;
}

Tensor on_device(const Tensor& tensor, int64_t index) {
  if (!tensor.defined() || tensor.is_cuda()) {
    return tensor;
  }
  c10::DeviceGuard guard(Device(c10::kCUDA, or_current(index)));
  Tensor copy = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &device_allocator,
      DispatchKeySet(DispatchKey::CUDA), tensor.scalar_type());
  if (tensor.numel() > 0) {
    host_view(copy).copy_(tensor);
  }
  return copy;
}

bool begins_with(const std::string& text, const char* start) {
  return text.rfind(start, 0) == 0;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() &&
         text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// A fused kernel of FBGEMM: on a CPU it reads buffers named "host", on a device those
// named "dev" or "uvm". Hands the CPU's kernel the device's.
class FusedKernel {
 public:
  FusedKernel(const c10::FunctionSchema& schema, torch::jit::Stack* stack)
      : schema_(schema),
        stack_(stack),
        first_(stack->size() - schema.arguments().size()) {}

  static bool is(const std::string& name) {
    return begins_with(name, "fbgemm::split_embedding") &&
           ends_with(name, "_pt2_wrapper");
  }

  bool has(const std::string& name) const {
    return schema_.argumentIndexWithName(name).has_value();
  }

  c10::IValue& operator[](const std::string& name) const {
    const auto index = schema_.argumentIndexWithName(name);
    TORCH_INTERNAL_ASSERT(index, schema_.name(), " has no argument ", name);
    return (*stack_)[first_ + *index];
  }

  Tensor tensor(const std::string& name) const { return (*this)[name].toTensor(); }

  // Puts the weights' and the states' buffers where the CPU's kernel reads them. Tables
  // of one kernel may lie in either memory: it then gets a copy of both.
  void use_device_buffers() {
    if (has("weights")) {
      use_device_weights();
    } else {
      use_device_buffer("weights", "host_weights", "dev_weights", "uvm_weights");
    }
    for (const auto& argument : schema_.arguments()) {
      if (ends_with(argument.name(), "_dev")) {
        const std::string state = argument.name().substr(0, argument.name().size() - 4);
        use_device_buffer(state, state + "_host", state + "_dev", state + "_uvm");
      }
    }
  }

  // Hands what the kernel wrote into such copies back.
  void write_back() const {
    for (const auto& [both, dev, uvm] : copies_) {
      dev.copy_(both.slice(0, 0, dev.numel()).view_as(dev));
      uvm.copy_(both.slice(0, dev.numel()).view_as(uvm));
    }
  }

 private:
  void use_device_buffer(const std::string& name, const std::string& host,
                         const std::string& dev_name, const std::string& uvm_name) {
    Tensor offsets = tensor(name + "_offsets");
    (*this)[host] = joined(tensor(dev_name), tensor(uvm_name),
                           tensor(name + "_placements"), offsets);
    (*this)[name + "_offsets"] = offsets;
  }

  // Since FBGEMM 1.9 backward kernels take their weights in a list: the device's
  // buffer, placements, offsets, managed memory and the cache. On a CPU it has the
  // first three.
  void use_device_weights() {
    const auto given = (*this)["weights"].toTensorVector();
    Tensor offsets = given[2];
    const Tensor host = joined(given[0], given[3], given[1], offsets);
    (*this)["weights"] = c10::List<Tensor>({host, given[1], offsets});
  }

  // The one buffer that has all tables, and where in it they begin.
  Tensor joined(const Tensor& dev, const Tensor& uvm, const Tensor& placements,
                Tensor& offsets) {
    if (dev.numel() <= 1 || uvm.numel() <= 1) {  // one value or none: not in use
      return uvm.numel() > dev.numel() ? uvm : dev;
    }
    const Tensor both = at::cat({dev.flatten(), uvm.flatten()});
    offsets = offsets + placements.ne(0).to(at::kLong) * dev.numel();
    copies_.push_back({both, dev, uvm});
    return both;
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  const size_t first_;
  std::vector<std::array<Tensor, 3>> copies_;
};

// One call of an operator on the device: arguments swapped for views, then back.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op)
      : schema_(op.schema()), name_(op.schema().name()) {}

  void take(torch::jit::Stack* stack) {
    const size_t count = schema_.arguments().size();
    const size_t first = stack->size() - count;
    for (size_t i = 0; i < count; ++i) {
      (*stack)[first + i] = swapped((*stack)[first + i]);
    }
    device_ = device_ < 0 ? current : device_;
    if (FusedKernel::is(name_)) {
      kernel_.emplace(schema_, stack);
      kernel_->use_device_buffers();
    }
    if (keeps_journal) {
      note_launch(name_, device_, !pairs_.empty() && c10::isIntegralType(
                                      pairs_[0].second.scalar_type(), true));
    }
  }

  void give_back(torch::jit::Stack* stack) {
    if (kernel_) {
      kernel_->write_back();
    }
    for (auto& [original, view] : pairs_) {
      if (view.sizes() != original.sizes()) {  // an out= argument was resized
        Tensor target = original;
        target.resize_(view.sizes());
        if (view.numel() > 0) {
          host_view(target).copy_(view);
        }
      }
    }
    const size_t count = schema_.returns().size();
    for (size_t i = stack->size() - count; i < stack->size(); ++i) {
      auto& value = (*stack)[i];
      if (value.isTensor()) {
        value = returned(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> tensors;
        for (const Tensor& tensor : value.toTensorVector()) {
          tensors.push_back(returned(tensor));
        }
        value = tensors;
      }
    }
  }

 private:
  c10::IValue swapped(const c10::IValue& value) {
    if (value.isTensor()) {
      return swapped(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> views;
      for (const Tensor& tensor : value.toTensorVector()) {
        views.push_back(swapped(tensor));
      }
      return views;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> views;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        views.push_back(tensor ? std::optional<Tensor>(swapped(*tensor))
                               : std::nullopt);
      }
      return views;
    }
    if (value.isList() && value.toList().elementType()->kind() ==
                              c10::TypeKind::ListType) {  // what all ranks gather
      c10::List<c10::List<Tensor>> views;
      for (const c10::IValue& tensors : value.toListRef()) {
        views.push_back(swapped(tensors).toTensorList());
      }
      return views;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = or_current(value.toDevice().index());
      return Device(c10::kCPU);
    }
    if (value.isGenerator()) {
      return swapped(value.toGenerator());
    }
    return value;
  }

  Tensor swapped(const Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!tensor.is_cuda()) {
      return tensor;
    }
    device_ = tensor.get_device();
    pairs_.emplace_back(tensor, host_view(tensor));
    return pairs_.back().second;
  }

  c10::IValue swapped(const at::Generator& generator) {
    auto* own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
    TORCH_CHECK(own != nullptr,
                "Expected a 'cuda' device type for generator but found '",
                generator.device().type(), "'");
    return own->host;
  }

  Tensor returned(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) {
      return tensor;
    }
    for (auto& [original, view] : pairs_) {
      if (tensor.is_same(view)) {
        return original;
      }
    }
    for (auto& [original, view] : pairs_) {
      if (tensor.has_storage() && tensor.storage().is_alias_of(view.storage())) {
        return original.as_strided(tensor.sizes(), tensor.strides(),
                                   original.storage_offset() + tensor.storage_offset());
      }
    }
    return on_device(tensor, device_);
  }

  const c10::FunctionSchema& schema_;
  const std::string name_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // on the device, its view
  std::optional<FusedKernel> kernel_;
  DeviceIndex device_ = -1;
};

void run_on_host(const c10::OperatorHandle& op, DispatchKeySet,
                 torch::jit::Stack* stack) {
  Call call(op);
  call.take(stack);
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(stack);
  }
  call.give_back(stack);
}

// ---------------------------------------------------------------- operators of its own

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
             std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Device(c10::kCUDA, or_current(device)));
  return at::detail::empty_generic(sizes, &device_allocator,
                                   DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(type), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                     std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Device(c10::kCUDA, or_current(device)));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator,
                                           DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(type));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) {
    return self;
  }
  if (self.is_cpu() && !non_blocking) {
    note_line("host " + std::to_string(current_streams[current]));
  }
  host_view(self).copy_(host_view(source));
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& self, bool non_blocking) {
  Tensor target = self;
  return copy_(target, source, non_blocking);
}

at::Scalar local_scalar(const Tensor& tensor) {
  note_line("host " + std::to_string(current_streams[current]));
  return host_view(tensor).item();
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes,
                      std::optional<at::MemoryFormat>) {
  const size_t needed =
      (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    c10::DeviceGuard guard(self.device());
    c10::DataPtr data = device_allocator.allocate(needed);
    if (storage->nbytes() > 0) {
      std::memcpy(data.get(), storage->data(), storage->nbytes());
    }
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset,
                    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  if (strides.empty() && !shape.empty()) {
    impl->set_sizes_contiguous(shape);
  } else {
    impl->set_sizes_and_strides(shape, C10_AS_INTARRAYREF_SLOW(strides));
  }
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(),
                     source.sym_sizes(), source.sym_strides());
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const c10::SymInt count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {&count, 1}, {});
}

Tensor& set_nothing(Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

Tensor view(const Tensor& self, at::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef sizes,
                     at::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

Tensor as_strided(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

void record_stream(Tensor&, c10::Stream) {
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_", &set_nothing);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("as_strided", &as_strided);
  library.impl("record_stream", &record_stream);
}

// ---------------------------------------------------------------- FBGEMM's operators

Tensor new_managed(const Tensor& self, const std::vector<int64_t>& sizes) {
  return at::empty(sizes, self.options());
}

Tensor new_unified(const Tensor& self, const std::vector<int64_t>& sizes, bool) {
  return new_managed(self, sizes);
}

// A cache that never holds anything: every lookup misses and reads managed memory.
void leave_cache_empty(const c10::OperatorHandle& op, DispatchKeySet,
                       torch::jit::Stack* stack) {
  note_launch(op.schema().name(), current, false);
  torch::jit::drop(*stack, op.schema().arguments().size());
}

TORCH_LIBRARY_IMPL(fbgemm, CUDA, library) {
  for (const char* name :
       {"lru_cache_populate", "lfu_cache_populate", "lxu_cache_flush",
        "lxu_cache_locations_update", "lxu_cache_locking_counter_decrement"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&leave_cache_empty>());
  }
  library.impl("new_managed_tensor", &new_managed);
  library.impl("new_vanilla_managed_tensor", &new_managed);
  library.impl("new_host_mapped_tensor", &new_managed);
  library.impl("new_unified_tensor", &new_unified);
}

// What tests/paper_gpu/device.py builds torch.cuda of.
TORCH_LIBRARY(paper_cuda, library) {
  library.def("device_count() -> int", []() -> int64_t { return kNumDevices; });
  library.def("current_device() -> int", []() -> int64_t { return current; });
  library.def("set_device(int index) -> ()",
              [](int64_t index) { current = or_current(index); });
  library.def("current_stream(int index) -> int", [](int64_t index) -> int64_t {
    return current_streams[or_current(index)];
  });
  library.def("set_stream(int index, int id) -> ()", [](int64_t index, int64_t id) {
    current_streams[or_current(index)] = id;
  });
  library.def("keep_journal(bool on) -> ()", [](bool on) { keeps_journal = on; });
  library.def("note(str line) -> ()", [](std::string line) { note_line(line); });
  library.def("journal() -> str[]", []() {
    std::lock_guard<std::mutex> lock(journal_mutex);
    return journal;
  });
}

}  // namespace paper

// ---------------------------------------------------------------- what torch asks

namespace at {
// Torch looks for a class of this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return paper::kNumDevices; }
  int getNumGPUs() const override { return paper::kNumDevices; }
  DeviceIndex current_device() const override { return paper::current; }
  DeviceIndex getCurrentDevice() const override { return paper::current; }
  void setCurrentDevice(DeviceIndex index) const override {
    paper::current = paper::or_current(index);
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(paper::current, paper::or_current(index));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  Allocator* getCUDADeviceAllocator() const override {
    return &paper::device_allocator;
  }
  // All of the host's memory counts as page-locked.
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return true; }
  Device getDeviceFromPtr(void*) const override { return {kCUDA, paper::current}; }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<paper::Generator>(paper::or_current(index));
  }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    static std::vector<Generator> generators = [] {
      std::vector<Generator> made;
      for (DeviceIndex i = 0; i < paper::kNumDevices; ++i) {
        made.push_back(make_generator<paper::Generator>(i));
      }
      return made;
    }();
    return generators[paper::or_current(index)];
  }
  void deviceSynchronize(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace c10d {  // DistributedDataParallel's reducer times itself by the device
struct PaperTimer final : Timer {
  explicit PaperTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PaperTimer)

// Collectives over tensors on the device, which "nccl" takes, run as they do on a CPU.
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  for (const char* name :
       {"send", "recv_", "recv_any_source_", "broadcast_", "allreduce_",
        "allreduce_coalesced_", "allgather_", "_allgather_base_",
        "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
        "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier"}) {
    library.impl(name,
                 torch::CppFunction::makeFromBoxedFunction<&paper::run_on_host>());
  }
}
}  // namespace c10d
