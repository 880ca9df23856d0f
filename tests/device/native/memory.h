// The memory of the device, the host memory that is pinned, and the log of all that happens.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

constexpr c10::DeviceIndex DEVICES = 2;
// What the device is to torch; set once, by start(), before torch is imported.
inline c10::DeviceType type = c10::DeviceType::PrivateUse1;
inline c10::DispatchKey key = c10::DispatchKey::PrivateUse1;
inline thread_local c10::DeviceIndex current = 0;

// -- the log ----------------------------------------------------------------------------------
// "kernel <operator>", "copy <from> to <to>", "wait <why>", each with the bytes that were copied.
struct Log {
  std::mutex lock;
  bool open = false;
  std::vector<std::pair<std::string, int64_t>> events;

  void add(const std::string& what, int64_t bytes = 0);
};
inline Log events;

// A kernel may copy and call others: what happens inside of one is not told.
inline thread_local int kernels_running = 0;
struct Running {
  explicit Running(const std::string& name) {
    events.add("kernel " + name);
    ++kernels_running;
  }
  Running() { ++kernels_running; }  // no kernel: a step that the log has told already
  ~Running() { --kernels_running; }
  Running(const Running&) = delete;
};

inline void Log::add(const std::string& what, int64_t bytes) {
  if (kernels_running > 0) return;
  std::lock_guard<std::mutex> guard(lock);
  if (open) events.emplace_back(what, bytes);
}

// -- device memory ----------------------------------------------------------------------------
struct Usage {
  std::atomic<int64_t> now{0}, peak{0}, limit{std::numeric_limits<int64_t>::max()};

  void take(int64_t bytes, c10::DeviceIndex index) {
    const auto total = now += bytes;
    if (total > limit) {
      now -= bytes;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device ", int(index), " is out of memory: ", total - bytes,
                       " bytes are in use, ", bytes, " more were asked for, and it has ", limit.load());
    }
    for (auto old = peak.load(); old < total && !peak.compare_exchange_weak(old, total);) {
    }
  }
};
inline std::array<Usage, DEVICES> usage;

// New memory holds no number: what is read before it was written does not look right by luck.
inline void* poisoned(size_t bytes) {
  if (bytes == 0) return nullptr;
  auto* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  return std::memset(data, 0xFF, bytes);
}

struct DeviceAllocator final : c10::Allocator {
  struct Block {
    void* data;
    int64_t bytes;
    c10::DeviceIndex index;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    usage[block->index].now -= block->bytes;
    std::free(block->data);
    delete block;
  }
  c10::DataPtr allocate(size_t bytes) override {
    usage[current].take(static_cast<int64_t>(bytes), current);
    auto* block = new Block{poisoned(bytes), static_cast<int64_t>(bytes), current};
    return {block->data, block, &release, c10::Device(type, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline DeviceAllocator device_allocator;

// -- pinned host memory -----------------------------------------------------------------------
struct PinnedAllocator final : c10::Allocator {
  std::mutex lock;
  std::map<const char*, size_t> blocks;

  static void release(void* data);
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = poisoned(bytes + 1);  // at least one byte, so that an empty tensor can be pinned too
    std::lock_guard<std::mutex> guard(lock);
    blocks[static_cast<char*>(data)] = bytes + 1;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = blocks.upper_bound(static_cast<const char*>(data));
    if (after == blocks.begin()) return false;
    auto block = std::prev(after);
    return static_cast<const char*>(data) < block->first + block->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedAllocator pinned_allocator;

inline void PinnedAllocator::release(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_allocator.lock);
    pinned_allocator.blocks.erase(static_cast<char*>(data));
  }
  std::free(data);
}

}  // namespace simulated
