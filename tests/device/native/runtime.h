// What torch asks of a device: streams (there is one, in order), the current index, and the hooks of both forms.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace simulated {

// -- copies to pinned memory that nobody has waited for ---------------------------------------
struct Unfinished {
  std::mutex lock;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // where to, and what was there when it was asked for

  void finish() {
    std::lock_guard<std::mutex> guard(lock);
    for (auto& [to, value] : copies) to.copy_(value);
    copies.clear();
  }
};
inline Unfinished unfinished;

inline void wait(const std::string& why) {
  events.add("wait " + why);
  unfinished.finish();
}

// -- device guard -----------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return simulated::type; }
  c10::Device getDevice() const override { return {simulated::type, current}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto old = getDevice();
    setDevice(device);
    return old;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == simulated::type, "not a device of this backend: ", device);
    TORCH_CHECK(device.index() < DEVICES, "device ordinal out of range: ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}

  void synchronizeStream(const c10::Stream&) const override { wait("synchronize"); }
  void synchronizeEvent(void*) const override { wait("synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait("synchronize"); }
};

// -- hooks: the same answers for either form --------------------------------------------------
template <typename Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : std::exchange(current, index);
  }
  bool isPinnedPtr(const void* data) const override { return pinned_allocator.holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return {type, current}; }
};

struct PrivateUse1Hooks final : Hooks<at::PrivateUse1HooksInterface> {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "random numbers of the simulated device come from the generator of the CPU");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

struct CUDAHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  c10::DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return DEVICES; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  void deviceSynchronize(c10::DeviceIndex) const override { wait("synchronize"); }
};

}  // namespace simulated
