// What simulated cards compute: every operation is one of the CPU's, over the card's own bytes.
//
// Tensors of a card become tensors of the CPU over the bytes behind their addresses while an operation runs, after a
// check that all of them are of one card. What it returns is copied to memory of the card, which is where it may end.

#include "card.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <map>
#include <string>

namespace card {

c10::Allocator* pinned_allocator();

namespace {

using at::Scalar;
using at::ScalarType;
using at::Tensor;
using c10::IntArrayRef;
using torch::jit::Stack;

c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }
c10::Allocator* memory() { return c10::GetAllocator(kType); }
bool is_mine(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// Random numbers: each card has its own state, which takes the place of the CPU's while an operation draws.

struct CardGenerator final : at::CPUGeneratorImpl {
  explicit CardGenerator(c10::DeviceIndex index) {
    device_ = c10::Device(kType, index);
    key_set_ = keys();
  }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int at = 0; at < kMostCards; ++at) made->push_back(at::make_generator<CardGenerator>(at));
    return made;
  }();
  return all->at(index < 0 ? current_card() : index);
}

class Drawing {
 public:
  explicit Drawing(at::Generator own) : own_(std::move(own)), cpu_(at::detail::getDefaultCPUGenerator()) {
    busy().lock();
    before_ = cpu_.get_state();
    cpu_.set_state(own_.get_state());
  }
  ~Drawing() {
    own_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
    busy().unlock();
  }

 private:
  static std::recursive_mutex& busy() {
    static std::recursive_mutex only;
    return only;
  }
  at::Generator own_, cpu_;
  Tensor before_;
};

// Tensors over the bytes of a card's tensors

class Aliases {
 public:
  Tensor of(const Tensor& tensor) {
    ranges.emplace_back(real_bytes(tensor.storage().data()), tensor.storage().nbytes());
    const c10::Storage& storage = tensor.storage();
    auto [found, is_new] = storages_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) {
      auto drop = [](void* kept) { delete static_cast<c10::Storage*>(kept); };  // a collective may outlive its tensors
      c10::DataPtr bytes(real_bytes(storage.data()), new c10::Storage(storage), drop, c10::DeviceType::CPU);
      found->second = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), nullptr, false);
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    return alias;
  }

  std::vector<Range> ranges;

 private:
  std::map<c10::StorageImpl*, c10::Storage> storages_;
};

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, memory(), keys(), c10::dtype_or_default(dtype));
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, memory(), keys(), c10::dtype_or_default(dtype), format);
}

void use(const std::vector<Range>& ranges) { touch(current_card(), current_stream(current_card()), ranges); }

Range range_of(const Tensor& tensor) {
  return {real_bytes(tensor.storage().data()), tensor.storage().nbytes()};
}

Tensor to_card(const Tensor& made, c10::Device device) {
  if (!made.defined()) return made;
  const Tensor source = made.is_non_overlapping_and_dense() ? made : made.contiguous();
  Tensor result = empty_strided(source.sizes(), source.strides(), made.scalar_type(), at::kStrided, device, false);
  if (source.numel() == 0) return result;
  use({range_of(result)});
  std::memcpy(real_bytes(result.data_ptr()), source.const_data_ptr(), source.nbytes());
  return result;
}

// Any operation

bool takes_cpu_tensors(const std::string& name) {  // as CUDA does: positions, and what is told of lengths
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 || name == "aten::_unsafe_index";
}

class Operation {
 public:
  Operation(const c10::OperatorHandle& handle, Stack* stack)
      : handle_(handle), schema_(handle.schema()), stack_(stack), count_(schema_.arguments().size()),
        first_(stack->size() - count_) {}

  void run() {
    const c10::Device device = find_device();
    const c10::DeviceGuard guard(device);
    replace_arguments(device);
    use(aliases_.ranges);
    {
      std::optional<Drawing> drawing;
      if (generator_ || handle_.hasTag(at::Tag::nondeterministic_seeded))
        drawing.emplace(generator_ ? *generator_ : default_generator(device.index()));
      handle_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    replace_results(device);
  }

 private:
  struct Pair {
    Tensor own, alias;
    bool is_written, is_fresh;
  };

  c10::Device find_device() {
    std::optional<c10::Device> device;
    auto look = [&](const Tensor& tensor) {
      if (!is_mine(tensor)) return;
      TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at ",
                  "least two devices, ", *device, " and ", tensor.device(), "! (in ", schema_.name(), ")");
      device = tensor.device();
    };
    for (size_t at = first_; at < stack_->size(); ++at) each_tensor((*stack_)[at], look);
    for (size_t at = first_; at < stack_->size(); ++at) {
      const auto& value = (*stack_)[at];
      if (!device && value.isDevice() && value.toDevice().type() == kType) device = value.toDevice();
    }
    if (!device || !device->has_index()) return {kType, static_cast<c10::DeviceIndex>(current_card())};
    return *device;
  }

  template <typename Look>
  static void each_tensor(const c10::IValue& value, Look look) {
    if (value.isTensor()) look(value.toTensor());
    else if (is_nested(value)) for (const c10::IValue& list : value.toList()) each_tensor(list, look);
    else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) look(tensor);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) if (tensor) look(*tensor);
  }

  static bool is_nested(const c10::IValue& value) {  // lists of tensors in a list, as collectives have them
    return value.isList() && !value.isTensorList() && value.toList().size() > 0 && value.toList().get(0).isTensorList();
  }

  c10::IValue replaced(const c10::IValue& tensors, c10::Device device, bool is_written) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : tensors.toTensorVector()) list.push_back(replaced(tensor, device, is_written));
    return list;
  }

  void replace_arguments(c10::Device device) {
    for (size_t at = 0; at < count_; ++at) {
      auto& value = (*stack_)[first_ + at];
      const auto* alias = schema_.arguments()[at].alias_info();
      const bool is_written = alias != nullptr && alias->isWrite();
      if (value.isTensor()) value = replaced(value.toTensor(), device, is_written);
      else if (value.isTensorList()) value = replaced(value, device, is_written);
      else if (is_nested(value)) {
        c10::List<c10::List<Tensor>> lists;
        for (const c10::IValue& list : value.toList()) lists.push_back(replaced(list, device, is_written).toTensorList());
        value = lists;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
          list.push_back(tensor ? std::optional<Tensor>(replaced(*tensor, device, is_written)) : std::nullopt);
        value = list;
      } else if (value.isDevice() && value.toDevice().type() == kType) {
        value = c10::Device(c10::DeviceType::CPU);
      } else if (value.isGenerator()) {
        generator_ = value.toGenerator();
        TORCH_CHECK(generator_->device().type() == kType, "Expected a '", device, "' generator device but found '",
                    generator_->device(), "'");
        value = c10::IValue();
      }
    }
  }

  Tensor replaced(const Tensor& tensor, c10::Device device, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!is_mine(tensor)) {
      TORCH_CHECK(tensor.dim() == 0 || takes_cpu_tensors(schema_.name()), "Expected all tensors to be on the same ",
                  "device, but found at least two devices, ", device, " and ", tensor.device(), "! (in ",
                  schema_.name(), ")");
      return tensor;
    }
    const bool is_fresh = is_written && tensor.numel() == 0;  // it may be resized, which an alias cannot be
    Tensor alias = is_fresh ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : aliases_.of(tensor);
    pairs_.push_back({tensor, alias, is_written, is_fresh});
    return alias;
  }

  void replace_results(c10::Device device) {
    for (Pair& pair : pairs_) if (pair.is_written) settle(pair);
    const size_t count = schema_.returns().size(), first = stack_->size() - count;
    for (size_t at = 0; at < count; ++at) {
      auto& value = (*stack_)[first + at];
      if (value.isTensor()) value = result(value.toTensor(), device);
      else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorVector()) list.push_back(result(tensor, device));
        value = list;
      }
    }
  }

  static void settle(Pair& pair) {  // an output that was given its size
    if (!pair.is_fresh && pair.alias.sizes() == pair.own.sizes() && pair.alias.strides() == pair.own.strides()) return;
    auto* impl = pair.own.unsafeGetTensorImpl();
    if (pair.is_fresh && pair.alias.numel() > 0) {
      const Tensor made = to_card(pair.alias, pair.own.device());
      impl->set_storage_and_dtype(made.storage(), made.dtype());
      impl->set_storage_offset(0);
      impl->set_sizes_and_strides(made.sizes(), made.strides());
      return;
    }
    impl->set_sizes_and_strides(pair.alias.sizes(), pair.alias.strides());
  }

  Tensor result(const Tensor& made, c10::Device device) {
    if (!made.defined()) return made;
    for (const Pair& pair : pairs_) if (made.unsafeGetTensorImpl() == pair.alias.unsafeGetTensorImpl()) return pair.own;
    if (made.has_storage() && made.storage().data() != nullptr)
      for (const Pair& pair : pairs_)
        if (!pair.is_fresh && made.storage().unsafeGetStorageImpl() == pair.alias.storage().unsafeGetStorageImpl())
          return pair.own.as_strided(made.sizes(), made.strides(), made.storage_offset());
    return to_card(made, device);
  }

  const c10::OperatorHandle& handle_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t count_, first_;
  Aliases aliases_;
  std::vector<Pair> pairs_;
  std::optional<at::Generator> generator_;
};

void any_operation(const c10::OperatorHandle& handle, Stack* stack) { Operation(handle, stack).run(); }

// Copies

bool fits_as_bytes(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
         ((a.is_contiguous() && b.is_contiguous()) || (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}

void compute_copy(const Tensor& from, const Tensor& to) {  // on one card, as a kernel
  Aliases aliases;
  const Tensor source = aliases.of(from), target = aliases.of(to);
  use(aliases.ranges);
  target.copy_(source);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool may_be_late) {
  if (to.numel() == 0) return to;
  const Tensor& mine = is_mine(to) ? to : from;
  const c10::DeviceGuard guard(mine.device());
  if (is_mine(from) && is_mine(to) && from.device() == to.device()) {
    compute_copy(from, to);
    return to;
  }
  if (is_mine(from) && is_mine(to)) {  // from card to card: both wait
    drain_all(from.device().index());
    drain_all(to.device().index());
    Aliases aliases;
    aliases.of(to).copy_(aliases.of(from));
    return to;
  }
  if (!fits_as_bytes(from, to)) {  // a contiguous copy between, on the card's side in the other's type
    if (is_mine(to)) {
      const Tensor whole = from.contiguous().resolve_conj().resolve_neg();
      const Tensor there = at::empty(whole.sizes(), whole.options().device(to.device()));
      copy_from(whole, there, may_be_late && whole.data_ptr() == from.data_ptr());
      compute_copy(there, to);
    } else {
      const Tensor there = at::empty(to.sizes(), to.options().device(from.device()).memory_format(at::MemoryFormat::Contiguous));
      compute_copy(from, there);
      if (to.is_contiguous()) {
        copy_from(there, to, may_be_late);
      } else {
        const Tensor whole = at::empty(to.sizes(), to.options().memory_format(at::MemoryFormat::Contiguous));
        copy_from(there, whole, false);
        to.copy_(whole);
      }
    }
    return to;
  }
  const int at = current_card(), stream = current_stream(at);
  const char* host = static_cast<const char*>(is_mine(to) ? from.const_data_ptr() : to.const_data_ptr());
  char* target = real_bytes(to.data_ptr());
  const char* source = real_bytes(from.data_ptr());
  if (may_be_late && is_pinned(host)) {
    copy_later(at, stream, target, source, to.nbytes());
    return to;
  }
  drain(at, stream, enqueued(at, stream));
  std::memcpy(target, source, to.nbytes());
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  Aliases aliases;
  const Tensor alias = aliases.of(tensor);
  const int at = current_card(), stream = current_stream(at);
  drain(at, stream, enqueued(at, stream));
  return alias.item();
}

// Views and storages

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr larger = memory()->allocate(bytes);
  if (const size_t kept = std::min(bytes, storage.nbytes()); kept > 0) {
    use({{real_bytes(storage.data()), storage.nbytes()}});
    std::memcpy(real_bytes(larger.get()), real_bytes(storage.data()), kept);
  }
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

void make_room(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const size_t wanted = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (wanted > impl->storage().nbytes()) resize_storage(impl->storage(), wanted);
}

const Tensor& resize(const Tensor& tensor, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  make_room(tensor);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  make_room(tensor);
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_storage(tensor, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& tensor) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, memory()->allocate(0), memory(), true);
  return set_storage(tensor, std::move(nothing), 0, {0}, {});
}

bool can_change_place(const Tensor& tensor, const Tensor& other) {  // as between the CPU and a GPU
  return tensor.layout() == at::kStrided && other.layout() == at::kStrided;
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  c10::getDeviceAllocator(kType)->recordStream(tensor.storage().data_ptr(), stream);
}

// Convolutions, which are handed to other backends whole

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  const c10::DeviceGuard guard(input.device());
  Aliases aliases;
  const Tensor on = aliases.of(input), by = aliases.of(weight);
  const std::optional<Tensor> plus = bias && bias->defined() ? std::optional<Tensor>(aliases.of(*bias)) : std::nullopt;
  use(aliases.ranges);
  return to_card(at::convolution(on, by, plus, stride, padding, dilation, transposed, output_padding, groups),
                 input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                                        IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  const c10::DeviceGuard guard(input.device());
  Aliases aliases;
  // In single precision: oneDNN's kernel for bfloat16 reads beyond its own memory, which ends another thread's heap.
  const auto kind = c10::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
  const auto single = [&](const Tensor& tensor) { return aliases.of(tensor).to(kind); };
  const Tensor from = single(gradient), on = single(input), by = single(weight);
  use(aliases.ranges);
  const std::array<int64_t, 1> bias{gradient.size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      from, on, by, mask[2] ? at::OptionalIntArrayRef(bias) : std::nullopt, stride, padding, dilation, transposed,
      output_padding, groups, mask);
  const c10::Device device = input.device();
  const auto back = [&](const Tensor& made) {
    return made.defined() ? to_card(made.to(input.scalar_type()), device) : made;
  };
  return {back(of_input), back(of_weight), back(of_bias)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &can_change_place);
  // These have kernels of their own on a GPU; other backends get them in parts, with memory between, or as
  // views, which a batch in the order of channels_last does not have
  for (const char* name : {"silu_backward", "mish_backward", "native_layer_norm", "native_group_norm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_operation>());
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", &can_change_place);
}

// Collectives are those of the CPU's process group

struct Silence final : c10::WarningHandler {  // torch has kernels for these, which its own process groups need
  void process(const c10::Warning&) override {}
};

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, library) {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  for (const char* name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "reduce_scatter_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_",
        "_reduce_scatter_base_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier", "send", "recv_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}

// Autocast casts what it casts on CUDA

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define DTYPED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(DTYPED)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTED)
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings().count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(settings().count); }
  void setCurrentDevice(c10::DeviceIndex card) const override { set_card(card); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_card()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex card) const override {
    const auto before = getCurrentDevice();
    if (card >= 0) set_card(card);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex card) const override { return exchangeDevice(card); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {kType, static_cast<c10::DeviceIndex>(card_of(data))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex card) const override { return default_generator(card); }
  at::Generator getNewGenerator(c10::DeviceIndex card) const override {
    return at::make_generator<CardGenerator>(card < 0 ? static_cast<c10::DeviceIndex>(current_card()) : card);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

}  // namespace card

// What card.py calls

extern "C" {

void card_seed(int card, uint64_t seed) { at::Generator(card::default_generator(card)).set_current_seed(seed); }

int64_t card_random_state(int card, char* to) {  // returns its bytes; writes them where there is a place
  const at::Tensor state = card::default_generator(card).get_state();
  if (to != nullptr) std::memcpy(to, state.const_data_ptr(), state.nbytes());
  return static_cast<int64_t>(state.nbytes());
}

void card_set_random_state(int card, const char* from, int64_t bytes) {
  const at::Tensor state = at::empty({bytes}, at::kByte);
  std::memcpy(state.data_ptr(), from, bytes);
  at::Generator(card::default_generator(card)).set_state(state);
}
}
