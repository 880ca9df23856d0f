// A simulated accelerator: two devices whose memory is host memory that only their own kernels touch.
//
// What it computes, it computes as the CPU does: a kernel is the CPU's, behind the check that every operand is on
// one device. It poses as "cuda" in a build of torch without CUDA, or is the backend that torch keeps free for
// others (PrivateUse1). ``tests/device/__init__.py`` says what it is for.
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <optional>
#include <set>

#include "memory.h"
#include "runtime.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::IntArrayRef;

c10::DeviceGuard on(std::optional<at::Device> device) {
  return c10::DeviceGuard(device.value_or(c10::Device(type, current)));
}

// -- memory and views -------------------------------------------------------------------------
Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  const auto guard = on(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(key), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const auto guard = on(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(key),
                                           c10::dtype_or_default(dtype));
}

// As for CUDA: `.data =` may put a tensor of the device where one of the host was.
bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) { return true; }

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the mathematical one
}

// -- copies -----------------------------------------------------------------------------------
// The same memory as a tensor of the CPU: for this device's own kernels.
Tensor on_host(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto storage = tensor.storage();
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [storage](void*) {},
                       tensor.options().device(c10::kCPU).requires_grad(false));
}

std::string name(const Tensor& tensor) { return tensor.is_cpu() ? "host" : "device"; }

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const auto& host = self.is_cpu() ? self : source;  // where one of them is
  const bool waits = host.is_cpu() && !(non_blocking && pinned_allocator.holds(host.data_ptr()));
  if (self.device() != source.device()) {
    const auto what = "copy " + name(source) + " to " + name(self);
    events.add(what, static_cast<int64_t>(source.nbytes()));
    if (waits) wait(what);
  } else {
    events.add("kernel aten::copy_");
  }
  Running quietly;
  if (host.is_cpu() && self.is_cpu() && !waits) {
    std::lock_guard<std::mutex> guard(unfinished.lock);
    unfinished.copies.emplace_back(self, on_host(source).to(self.scalar_type()).clone());
  } else {
    on_host(self).copy_(on_host(source));
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// -- what the host reads ----------------------------------------------------------------------
at::Scalar local_scalar_dense(const Tensor& self) {
  wait("item");
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

bool equal(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.device() == b.device(), "Cannot compare two tensors on different devices. Got: ", a.device(), " and ",
              b.device());
  wait("equal");
  return at::equal(on_host(a), on_host(b));
}

// How many elements there will be is read by the host; so it is where a mask stands for indices.
bool is_waited_for(const std::string& op, bool has_mask) {
  static const std::set<std::string> all = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount",
                                            "aten::unique_dim", "aten::repeat_interleave.Tensor"};
  return all.count(op) > 0 || (has_mask && op.find("index_put") != std::string::npos);
}

// -- every other operator ---------------------------------------------------------------------
// Indices of the host are taken along by these, as on a GPU.
bool takes_indices_of_the_host(const std::string& op) {
  static const std::set<std::string> all = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_",
                                            "aten::index_put", "aten::index.Tensor_out", "aten::record_stream",
                                            "aten::_pin_memory", "aten::is_pinned"};
  return all.count(op) > 0;
}

struct Operands {
  std::string op;
  bool lenient;
  bool has_mask = false;
  std::optional<c10::Device> device = std::nullopt;

  void see(const Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && (tensor.dim() == 0 || lenient))) return;
    if (!device) device = tensor.device();
    TORCH_CHECK(*device == tensor.device(), "Expected all tensors to be on the same device, but found ", *device,
                " and ", tensor.device(), " in a call of ", op);
  }
  void see(const c10::IValue& value) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) see(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& index : value.toOptionalTensorList()) {
        if (!index || !index->defined()) continue;
        see(*index);
        has_mask |= index->scalar_type() == at::kBool;
      }
    }
  }
};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = c10::toString(op.schema().operator_name());
  Operands operands{name, takes_indices_of_the_host(name)};
  for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    operands.see(value);
    if (value.isGenerator()) value = c10::IValue();  // there is one generator, that of the CPU
  }
  if (is_waited_for(name, operands.has_mask)) wait(name);
  Running kernel(name);
  const auto guard = on(operands.device);
  at::native::cpu_fallback(op, stack);
}

// -- for Python -------------------------------------------------------------------------------
int64_t get_device() { return current; }
void set_device(int64_t index) { Guard().setDevice({type, static_cast<c10::DeviceIndex>(index)}); }
void synchronize() { wait("synchronize"); }
int64_t memory(int64_t index) { return usage.at(index).now; }
int64_t peak(int64_t index) { return usage.at(index).peak; }
void reset_peak(int64_t index) { usage.at(index).peak = usage.at(index).now.load(); }
int64_t limit(int64_t index) { return usage.at(index).limit; }
void set_limit(int64_t index, int64_t bytes) { usage.at(index).limit = bytes; }
void begin_kernel(c10::string_view name) {
  events.add("kernel " + std::string(name));
  ++kernels_running;
}
void end_kernel() { --kernels_running; }
void open_log(bool open) {
  std::lock_guard<std::mutex> guard(events.lock);
  events.open = open;
}
std::tuple<std::vector<std::string>, std::vector<int64_t>> take_log() {
  std::lock_guard<std::mutex> guard(events.lock);
  std::vector<std::string> what;
  std::vector<int64_t> bytes;
  for (auto& [event, size] : events.events) {
    what.push_back(event);
    bytes.push_back(size);
  }
  events.events.clear();
  return {what, bytes};
}
// An operator of another library, which has a kernel for the CPU or one for all devices: one kernel here.
void adopt(const std::string& library, const std::string& op) {
  static std::vector<torch::Library> libraries;
  libraries.emplace_back(torch::Library::IMPL, library, key, __FILE__, __LINE__);
  libraries.back().impl(op.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

}  // namespace

void register_kernels() {
  static torch::Library any(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  any.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  static torch::Library aten(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("resize_", TORCH_FN(at::native::resize_));
  aten.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten.impl("view", TORCH_FN(at::native::view));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("unfold", TORCH_FN(at::native::unfold));
  aten.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  aten.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  aten.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  aten.impl("copy_", copy_);
  aten.impl("_copy_from", copy_from);
  aten.impl("_copy_from_and_resize", copy_from_and_resize);
  aten.impl("_local_scalar_dense", local_scalar_dense);
  aten.impl("equal", equal);
  aten.impl("_fused_sdp_choice", fused_sdp_choice);
  if (type == c10::DeviceType::PrivateUse1)
    aten.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

}  // namespace simulated

TORCH_LIBRARY(simulated, library) {
  using namespace simulated;
  library.def("get_device() -> int", get_device);
  library.def("set_device(int index) -> ()", set_device);
  library.def("synchronize() -> ()", synchronize);
  library.def("memory(int index) -> int", memory);
  library.def("peak(int index) -> int", peak);
  library.def("reset_peak(int index) -> ()", reset_peak);
  library.def("limit(int index) -> int", limit);
  library.def("set_limit(int index, int bytes) -> ()", set_limit);
  library.def("begin_kernel(str name) -> ()", begin_kernel);
  library.def("end_kernel() -> ()", end_kernel);
  library.def("open_log(bool open) -> ()", open_log);
  library.def("take_log() -> (str[], int[])", take_log);
  library.def("adopt(str library, str op) -> ()", adopt);
}

// Make the device, as "cuda" or as PrivateUse1: once, before torch is imported, which asks for CUDA's hooks.
extern "C" void start(bool as_cuda) {
  using namespace simulated;
  type = as_cuda ? c10::DeviceType::CUDA : c10::DeviceType::PrivateUse1;
  key = as_cuda ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
  c10::SetAllocator(type, &device_allocator);
  c10::impl::registerDeviceGuard(type, new Guard());
  if (as_cuda) {
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<CUDAHooks>();
    });
  } else {
    static PrivateUse1Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
  }
  register_kernels();
}
