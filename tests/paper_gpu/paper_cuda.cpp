// A CUDA device that lives in host memory, for builds of torch that have no CUDA.
//
// Tensors on "cuda:N" are real ones: they have their own storage, counted per device,
// and every operator on them runs the CPU's kernel on a view of the same bytes. What
// CUDA refuses (operands on different devices, more memory than a card has, a generator
// of another device) is refused here, too. Nothing is asynchronous, and no time means
// anything. Loaded before torch, by tests/paper_gpu/device.py.
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
#include <sys/mman.h>
#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

namespace paper {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr int kMostDevices = 64;
constexpr size_t kGranule = 512;  // bytes that the caching allocator rounds up to
constexpr size_t kMapped = size_t{1}
                           << 20;  // blocks from here on are mapped, not touched

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

// The card: how many there are and what each holds.
const DeviceIndex num_devices = static_cast<DeviceIndex>(
    std::min<int64_t>(setting("PAPER_CUDA_DEVICES", 8), kMostDevices));
std::atomic<int64_t> capacity{setting("PAPER_CUDA_BYTES", int64_t{80} << 30)};
thread_local DeviceIndex current = 0;

void check_ordinal(int64_t index) {
  TORCH_CHECK(index < num_devices, "CUDA error: invalid device ordinal");
}

DeviceIndex or_current(int64_t index) {
  check_ordinal(index);
  return index < 0 ? current : static_cast<DeviceIndex>(index);
}

DeviceIndex or_current(std::optional<Device> device) {
  return or_current(device && device->has_index() ? device->index() : -1);
}

// ---------------------------------------------------------------- memory

struct Usage {
  std::atomic<int64_t> now{0};
};
std::array<Usage, kMostDevices> usage;

struct Block {
  void* start;
  size_t bytes;
  DeviceIndex device;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->bytes >= kMapped) {
    munmap(block->start, block->bytes);
  } else {
    std::free(block->start);
  }
  usage[block->device].now -= static_cast<int64_t>(block->bytes);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    const Device device(c10::kCUDA, current);
    if (asked == 0) {
      return {nullptr, device};
    }
    const size_t bytes = (asked + kGranule - 1) / kGranule * kGranule;
    auto& used = usage[current];
    const int64_t free_bytes = capacity - used.now;
    TORCH_CHECK_WITH(OutOfMemoryError, static_cast<int64_t>(bytes) <= free_bytes,
                     "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ",
                     int{current}, " has a total capacity of ", capacity.load(),
                     " bytes of which ", free_bytes, " are free.");
    void* start = nullptr;
    if (bytes >= kMapped) {  // pages that nobody touches cost nothing
      start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(start != MAP_FAILED, "no address space for ", bytes, " bytes");
    } else {
      start = std::aligned_alloc(kGranule, bytes);
      TORCH_CHECK(start != nullptr, "no host memory for ", bytes, " bytes");
      std::memset(start, 0xFF, bytes);  // not a number: memory nobody has written shows
    }
    used.now += static_cast<int64_t>(bytes);
    return {start, new Block{start, bytes, current}, &free_block, device};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &device_allocator)

// Memory that the host and all devices address: tensors are on the device, their bytes
// are not in its memory.
struct ManagedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    const size_t bytes = std::max<size_t>(asked, 1);
    void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "no address space for ", bytes, " bytes");
    return {start, new Block{start, bytes, current}, &unmap, {c10::kCUDA, current}};
  }
  static void unmap(void* context) {
    auto* block = static_cast<Block*>(context);
    munmap(block->start, block->bytes);
    delete block;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
ManagedAllocator managed_allocator;

// Host memory that is page-locked: ordinary memory of which the addresses are noted.
struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr plain = c10::GetCPUAllocator()->allocate(std::max<size_t>(bytes, 1));
    void* start = plain.get();
    std::lock_guard<std::mutex> lock(mutex);
    blocks[static_cast<const char*>(start)] = std::max<size_t>(bytes, 1);
    return {start, new c10::DataPtr(std::move(plain)), &forget, c10::kCPU};
  }
  static void forget(void* context);
  bool holds(const void* where) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto* address = static_cast<const char*>(where);
    auto next = blocks.upper_bound(address);
    if (next == blocks.begin()) {
      return false;
    }
    --next;
    return address < next->first + next->second;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PinnedAllocator pinned_allocator;

void PinnedAllocator::forget(void* context) {
  auto* plain = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> lock(pinned_allocator.mutex);
    pinned_allocator.blocks.erase(static_cast<const char*>(plain->get()));
  }
  delete plain;
}

// ---------------------------------------------------------------- streams

thread_local std::array<c10::StreamId, kMostDevices> current_streams{};
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
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
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

std::array<std::atomic<int64_t>, kMostDevices> launches{};

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

  // What only the kernels of a GPU refuse, in FBGEMM's words.
  void check() const {
    // Of sequences all tables of a kernel are of one width.
    const int64_t max_D = (*this)[has("max_D") ? "max_D" : "D"].toInt();
    TORCH_CHECK(max_D <= 2048);
    TORCH_CHECK(tensor("indices").scalar_type() == tensor("offsets").scalar_type(),
                "indices and offsets must have one type");
    if (has("row_counter_dev")) {
      const auto type = tensor("row_counter_dev").scalar_type();
      TORCH_CHECK(
          type == at::kFloat,
          "Expected tensor 'row_counter_dev' to have scalar type Float, but found ",
          type);
    }
  }

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

  // The buffer that the CPU's kernel reads, and where in it each feature's table begins.
  std::pair<Tensor, Tensor> host_weights() const {
    if (!has("weights")) {
      return {tensor("host_weights"), tensor("weights_offsets")};
    }
    const auto given = (*this)["weights"].toTensorVector();
    return {given[0], given[2]};
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

// Operators whose CUDA kernels take host tensors beside their own, too.
bool takes_host_tensors(const std::string& name) {
  static const std::array<const char*, 7> names = {"aten::copy_",
                                                   "aten::_copy_from",
                                                   "aten::index",
                                                   "aten::_index_put_impl_",
                                                   "aten::index_put_",
                                                   "aten::set_",
                                                   "fbgemm::permute_pooled_embs"};
  return std::any_of(names.begin(), names.end(),
                     [&](const char* known) { return begins_with(name, known); });
}

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
    TORCH_CHECK(!own_generator_ || !pairs_.empty() || device_ >= 0,
                "Expected a 'cpu' device type for generator but found 'cuda'");
    device_ = device_ < 0 ? current : device_;
    TORCH_CHECK(!host_operand_ || pairs_.empty() || takes_host_tensors(name_),
                "Expected all tensors to be on the same device, but found at least two "
                "devices, cuda:",
                int{device_}, " and cpu! (", name_, ")");
    ++launches[device_];
    if (FusedKernel::is(name_)) {
      kernel_.emplace(schema_, stack);
      kernel_->check();
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
      note(or_current(value.toDevice().index()));
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
    if (!tensor.is_cuda()) {  // scalars may come from anywhere
      host_operand_ = host_operand_ || (tensor.is_cpu() && tensor.dim() > 0);
      return tensor;
    }
    note(tensor.get_device());
    pairs_.emplace_back(tensor, host_view(tensor));
    return pairs_.back().second;
  }

  c10::IValue swapped(const at::Generator& generator) {
    auto* own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
    TORCH_CHECK(own != nullptr,
                "Expected a 'cuda' device type for generator but found '",
                generator.device().type(), "'");
    own_generator_ = true;
    return own->host;
  }

  void note(DeviceIndex index) {
    TORCH_CHECK(device_ < 0 || device_ == index,
                "Expected all tensors to be on the same device, but found at least two "
                "devices, cuda:",
                int{device_}, " and cuda:", int{index}, "! (", name_, ")");
    device_ = index;
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
  bool host_operand_ = false, own_generator_ = false;
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
  c10::DeviceGuard guard(self.device());
  return at::detail::empty_generic(sizes, &managed_allocator,
                                   DispatchKeySet(DispatchKey::CUDA),
                                   self.scalar_type(), std::nullopt);
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

// Adam, of which FBGEMM's CPU build has no kernel: row by row, summed over the batch.
void adam(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  Call call(op);
  call.take(stack);
  const FusedKernel kernel(op.schema(), stack);
  const Tensor grads = kernel.tensor("grad_output").to(at::kFloat);
  const Tensor ids = kernel.tensor("indices").to(at::kLong);
  const Tensor offsets = kernel.tensor("offsets").to(at::kLong);
  const Tensor sample_weights = kernel.tensor("indice_weights");
  auto [weights, places] = kernel.host_weights();
  Tensor moment1 = kernel.tensor("momentum1_host"),
         moment2 = kernel.tensor("momentum2_host");
  const Tensor columns = kernel.tensor("D_offsets").to(at::kLong);
  const int64_t num_features = columns.numel() - 1;
  const int64_t batch_size = (offsets.numel() - 1) / num_features;
  const double rate = kernel.tensor("learning_rate_tensor").item<double>();
  const double eps = kernel["eps"].toDouble(),
               decay = kernel["weight_decay"].toDouble();
  const double beta1 = kernel["beta1"].toDouble(), beta2 = kernel["beta2"].toDouble();
  const auto step = static_cast<double>(kernel["iter"].toInt());

  struct Table {
    int64_t weights, state, width;
    std::vector<Tensor> rows, grads;
  };
  std::map<std::pair<int64_t, int64_t>, Table>
      tables;  // several features may share one
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t left = columns[f].item<int64_t>(),
                  right = columns[f + 1].item<int64_t>();
    const int64_t place = places[f].item<int64_t>();
    const Tensor bounds = offsets.slice(0, f * batch_size, (f + 1) * batch_size + 1);
    const int64_t low = bounds[0].item<int64_t>(), high = bounds[-1].item<int64_t>();
    const Tensor bags = at::arange(batch_size).repeat_interleave(bounds.diff());
    Tensor grad = grads.slice(1, left, right).index_select(0, bags);
    if (sample_weights.numel() > 0) {
      grad = grad * sample_weights.slice(0, low, high).unsqueeze(1);
    }
    auto& table = tables[{place, right - left}];
    table.weights = place;
    table.state = kernel.tensor("momentum1_offsets")[f].item<int64_t>();
    table.width = right - left;
    table.rows.push_back(ids.slice(0, low, high));
    table.grads.push_back(grad);
  }
  for (auto& [key, table] : tables) {
    auto [rows, of_id] = at::_unique(at::cat(table.rows), true, true);
    const Tensor sums = at::zeros({rows.numel(), table.width})
                            .index_add_(0, of_id, at::cat(table.grads));
    const Tensor cells = rows.unsqueeze(1) * table.width + at::arange(table.width);
    const Tensor state = (cells + table.state).flatten(),
                 held = (cells + table.weights).flatten();
    const Tensor grad = sums.flatten();
    const Tensor first = moment1.index_select(0, state) * beta1 + grad * (1 - beta1);
    const Tensor second =
        moment2.index_select(0, state) * beta2 + grad * grad * (1 - beta2);
    moment1.index_copy_(0, state, first);
    moment2.index_copy_(0, state, second);
    const Tensor old = weights.index_select(0, held).to(at::kFloat);
    const Tensor change = (first / (1 - std::pow(beta1, step))) /
                              ((second / (1 - std::pow(beta2, step))).sqrt() + eps) +
                          decay * old;
    weights.index_copy_(0, held, (old - rate * change).to(weights.scalar_type()));
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(at::empty({0}));
  call.give_back(stack);
}

// FBGEMM 1.9 belongs to torch 2.14, earlier ones to earlier releases.
#if TORCH_VERSION_MINOR >= 14
#define WEIGHTS "Tensor[](a!) weights, "
#define AUXILIARY "Tensor[] aux_tensor_bwd, "
#else
#define WEIGHTS                                                                  \
  "Tensor(a!) host_weights, Tensor(b!) dev_weights, Tensor(c!) uvm_weights, "    \
  "Tensor(d!) lxu_cache_weights, Tensor weights_placements, Tensor "             \
  "weights_offsets, "
#define AUXILIARY "Tensor lxu_cache_locations, "
#endif

constexpr const char* kAdamArguments =
    "(Tensor grad_output, " WEIGHTS "Tensor D_offsets, SymInt max_D, bool mixed_D, "
    "Tensor hash_size_cumsum, int total_hash_size_bits, Tensor indices, Tensor "
    "offsets, "
    "int pooling_mode, Tensor indice_weights, " AUXILIARY
    "int BT_block_size, int max_segment_length_per_warp, bool stochastic_rounding, "
    "int info_B_num_bits, int info_B_mask_int64, bool use_uniq_cache_locations, "
    "bool use_homogeneous_placements, Tensor(g!) momentum1_host, Tensor(h!) "
    "momentum1_dev, "
    "Tensor(i!) momentum1_uvm, Tensor momentum1_placements, Tensor momentum1_offsets, "
    "Tensor(j!) momentum2_host, Tensor(k!) momentum2_dev, Tensor(l!) momentum2_uvm, "
    "Tensor momentum2_placements, Tensor momentum2_offsets, Tensor "
    "learning_rate_tensor, "
    "Tensor(p!) row_counter_host, Tensor(q!) row_counter_dev, Tensor(r!) "
    "row_counter_uvm, "
    "Tensor row_counter_placements, Tensor row_counter_offsets, float eps=0., "
    "float beta1=0., float beta2=0., float weight_decay=0., int iter=0, "
    "bool use_rowwise_bias_correction=False, int output_dtype=0) -> Tensor";

TORCH_LIBRARY_FRAGMENT(fbgemm, library) {
  for (const char* kind : {"unweighted", "weighted"}) {
    library.def((std::string("split_embedding_backward_codegen_adam_") + kind +
                 "_pt2_wrapper" + kAdamArguments)
                    .c_str());
  }
}

TORCH_LIBRARY_IMPL(fbgemm, CUDA, library) {
  for (const char* kind : {"unweighted", "weighted"}) {
    library.impl(
        (std::string("split_embedding_backward_codegen_adam_") + kind + "_pt2_wrapper")
            .c_str(),
        torch::CppFunction::makeFromBoxedFunction<&adam>());
  }
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
  library.def("device_count() -> int", []() -> int64_t { return num_devices; });
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
  library.def("capacity() -> int", []() -> int64_t { return capacity; });
  library.def("allocated(int index) -> int",
              [](int64_t index) -> int64_t { return usage[or_current(index)].now; });
  library.def("launches(int index) -> int",
              [](int64_t index) -> int64_t { return launches[or_current(index)]; });
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
  DeviceIndex deviceCount() const override { return paper::num_devices; }
  int getNumGPUs() const override { return paper::num_devices; }
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
  Allocator* getPinnedMemoryAllocator() const override {
    return &paper::pinned_allocator;
  }
  bool isPinnedPtr(const void* where) const override {
    return paper::pinned_allocator.holds(where);
  }
  Device getDeviceFromPtr(void*) const override { return {kCUDA, paper::current}; }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<paper::Generator>(paper::or_current(index));
  }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    static std::vector<Generator> generators = [] {
      std::vector<Generator> made;
      for (DeviceIndex i = 0; i < paper::num_devices; ++i) {
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
