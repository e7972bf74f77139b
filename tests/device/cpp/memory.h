// Memory: the device's arena and its caching allocator, and host memory that the device may copy from and to.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// One range of memory, mapped twice: where tensors point nobody may read or write (the host crashes there);
// kernels use the second mapping.
class Arena {
 public:
  void map();
  char* take(size_t bytes);
  char* seen(const void* p) const { return kernel_ + (static_cast<const char*>(p) - device_); }
  void protect(bool on);
  // Gives the pages that lie wholly in the range back to the machine.
  void drop(void* p, size_t bytes);

 private:
  char* device_ = nullptr;
  char* kernel_ = nullptr;
  size_t used_ = 0;
};

Arena& arena();

struct Block {
  size_t size = 0;  // rounded up
  size_t asked = 0;
  int stream = 0;
  std::set<int> uses;  // other streams
};

// As CUDA's: a block is given out again to its own stream at once, whatever that stream has still to do, and
// waits for the streams that `record_stream` named.
class Allocator final : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override;
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
  void set_limit(int device, size_t bytes) { limits_[device] = bytes; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  static void release(void* pointer);
  void* take(size_t bytes);
  void make_room(int device, size_t bytes, Lock& lock);
  void give_back(void* pointer);
  void reclaim();

  // Guards the members below. No task runs while a thread has it: a task may wait for another process, and
  // threads that free a tensor have Python's lock.
  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::map<std::pair<int, size_t>, std::vector<void*>> free_;  // by stream and size
  struct Limbo {
    std::vector<SignalPtr> signals;
    void* pointer;
    Block block;
  };
  std::vector<Limbo> limbo_;  // freed, and in use by other streams
  size_t limits_[kDevices] = {size_t(4) << 30, size_t(4) << 30, size_t(4) << 30, size_t(4) << 30};
  c10::CachingDeviceAllocator::DeviceStats stats_[kDevices];
};

Allocator& allocator();

// Pinned host memory: what the host allocator gives, and what was registered.
bool is_pinned(const void* p);
void register_host(void* p, size_t bytes);
void unregister_host(void* p);
// A copy on its way; `p` is the host's end.
void note_copy(const void* p, size_t bytes, const SignalPtr& signal);
bool copies_in_flight(const void* p, size_t bytes);
void install_memory();
at::Allocator* pinned_allocator();

}  // namespace sim
