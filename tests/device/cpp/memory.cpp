#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace sim {
namespace {

constexpr size_t kArena = size_t(64) << 30;  // of addresses
constexpr size_t kUnit = 512;
constexpr auto kAll = size_t(c10::CachingAllocator::StatType::AGGREGATE);

std::string megabytes(size_t bytes) {
  char text[32];
  snprintf(text, sizeof text, "%.2f MiB", double(bytes) / (1 << 20));
  return text;
}

void poison(char* memory, size_t bytes, int stream, const char* name) {
  if (scheduler().defects.no_poison) return;
  scheduler().submit_poison(stream, name, [memory, bytes] { memset(memory, 0xFF, bytes); });
}

}  // namespace

Arena& arena() {
  static auto* the = new Arena;
  return *the;
}

void Arena::map() {
  if (device_) return;
  const int file = memfd_create("simulated device", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no memory for the simulated device");
  constexpr int flags = MAP_SHARED | MAP_NORESERVE;
  void* device = mmap(nullptr, kArena, PROT_NONE, flags, file, 0);
  void* kernel = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, flags, file, 0);
  close(file);
  TORCH_CHECK(device != MAP_FAILED && kernel != MAP_FAILED, "no address space for the simulated device");
  device_ = static_cast<char*>(device);
  kernel_ = static_cast<char*>(kernel);
}

char* Arena::take(size_t bytes) {
  TORCH_CHECK(used_ + bytes <= kArena, "the simulated device has no addresses left");
  used_ += bytes;
  return device_ + used_ - bytes;
}

void Arena::protect(bool on) {
  map();
  mprotect(device_, kArena, on ? PROT_NONE : PROT_READ | PROT_WRITE);
}

void Arena::drop(void* p, size_t bytes) {
  const auto page = size_t(sysconf(_SC_PAGESIZE));
  const auto first = size_t(seen(p)), begin = (first + page - 1) / page * page,
             end = (first + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_REMOVE);
}

// ------------------------------------------------------------------------------ the device's allocator

Allocator& allocator() {
  static auto* the = new Allocator;
  return *the;
}

void Allocator::release(void* pointer) { allocator().give_back(pointer); }

at::DataPtr Allocator::allocate(size_t bytes) {
  void* pointer = bytes ? take(bytes) : nullptr;
  scheduler().go_on();
  return {pointer, pointer, &release, c10::Device(kType, current_device())};
}

void Allocator::copy_data(void*, const void*, std::size_t) const {
  TORCH_CHECK(false, "the simulated device copies by tasks");
}

void* Allocator::take(size_t bytes) {
  Block block{(bytes + kUnit - 1) / kUnit * kUnit, bytes, current_stream(), {}};
  const int device = block.stream / kStreams;
  Lock lock(mutex_);
  arena().map();
  reclaim();
  make_room(device, block.size, lock);
  void* pointer = nullptr;
  auto& fitting = free_[{block.stream, block.size}];
  if (!fitting.empty()) {
    pointer = fitting.back();
    fitting.pop_back();
  } else {
    pointer = arena().take(block.size);
    poison(arena().seen(pointer), block.size, block.stream, "poison new memory");
    stats_[device].reserved_bytes[kAll].increase(block.size);
  }
  auto& stats = stats_[device];
  stats.allocation[kAll].increase(1);
  stats.allocated_bytes[kAll].increase(block.size);
  stats.active_bytes[kAll].increase(block.size);
  stats.requested_bytes[kAll].increase(block.asked);
  blocks_[pointer] = block;
  return pointer;
}

// As CUDA: what is freed but still in use is waited for before the error.
void Allocator::make_room(int device, size_t bytes, Lock& lock) {
  auto& stats = stats_[device];
  const auto fits = [&] {
    return scheduler().defects.no_limit ||
           size_t(stats.active_bytes[kAll].current) + bytes <= limits_[device];
  };
  if (fits()) return;
  stats.num_alloc_retries++;
  std::vector<SignalPtr> awaited;
  for (const auto& entry : limbo_) awaited.insert(awaited.end(), entry.signals.begin(), entry.signals.end());
  lock.unlock();
  for (const auto& signal : awaited) scheduler().finish(signal);
  lock.lock();
  reclaim();
  if (fits()) return;
  stats.num_ooms++;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "the simulated device ", device,
                   " is out of memory: ", megabytes(bytes), " were asked for, ",
                   megabytes(limits_[device] - stats.active_bytes[kAll].current), " of ",
                   megabytes(limits_[device]), " are free");
}

void Allocator::give_back(void* pointer) {
  const Lock lock(mutex_);
  auto found = blocks_.find(pointer);
  if (found == blocks_.end()) return;
  Block block = found->second;
  blocks_.erase(found);
  auto& stats = stats_[block.stream / kStreams];
  stats.allocation[kAll].decrease(1);
  stats.allocated_bytes[kAll].decrease(block.size);
  stats.requested_bytes[kAll].decrease(block.asked);
  std::vector<SignalPtr> signals;
  for (int stream : block.uses) signals.push_back(scheduler().record_alone(stream));
  limbo_.push_back({signals, pointer, block});
  reclaim();
}

void Allocator::reclaim() {
  auto held = std::move(limbo_);
  limbo_.clear();
  for (auto& entry : held) {
    const auto& signals = entry.signals;
    if (std::any_of(signals.begin(), signals.end(), [](const SignalPtr& signal) { return !signal->done; })) {
      limbo_.push_back(std::move(entry));
      continue;
    }
    const Block& block = entry.block;
    stats_[block.stream / kStreams].active_bytes[kAll].decrease(block.size);
    poison(arena().seen(entry.pointer), block.size, block.stream, "poison freed memory");
    free_[{block.stream, block.size}].push_back(entry.pointer);
  }
}

// The addresses stay with their stream; the machine gets the pages.
void Allocator::emptyCache(c10::MempoolId_t) {
  scheduler().finish_all();
  const Lock lock(mutex_);
  reclaim();
  for (auto& [key, pointers] : free_)
    for (void* pointer : pointers)
      if (scheduler().idle(key.first))
        arena().drop(pointer, key.second);  // another thread may have given it work
}

void Allocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  const Lock lock(mutex_);
  auto found = blocks_.find(data.get());
  if (scheduler().defects.no_record_stream) return;
  if (found != blocks_.end() && found->second.stream != index_of(stream))
    found->second.uses.insert(index_of(stream));
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device) {
  const Lock lock(mutex_);
  return stats_[device];
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex device) {
  const Lock lock(mutex_);
  auto& all = stats_[device];
  for (auto* stat :
       {&all.allocation, &all.allocated_bytes, &all.reserved_bytes, &all.active_bytes, &all.requested_bytes})
    (*stat)[kAll].reset_accumulated();
}

void Allocator::resetPeakStats(c10::DeviceIndex device) {
  const Lock lock(mutex_);
  auto& all = stats_[device];
  for (auto* stat :
       {&all.allocation, &all.allocated_bytes, &all.reserved_bytes, &all.active_bytes, &all.requested_bytes})
    (*stat)[kAll].reset_peak();
}

std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex device) {
  const Lock lock(mutex_);
  return {limits_[device] - size_t(stats_[device].active_bytes[kAll].current), limits_[device]};
}

// --------------------------------------------------------------------------------------- pinned memory

namespace {

struct Copy {
  const char *begin, *end;
  SignalPtr signal;
};

std::mutex pinned_mutex;
std::map<const char*, const char*> pinned;  // begin -> end
std::vector<Copy> copies;                   // perhaps on their way

// Freed memory that a copy may still read or write is kept, as CUDA's host allocator does.
struct HostAllocator final : at::HostAllocator {
  static inline std::mutex mutex;  // guards the vector
  static inline std::vector<std::pair<char*, size_t>> limbo;

  static void reclaim() {
    const std::lock_guard<std::mutex> lock(mutex);
    auto held = std::move(limbo);
    limbo.clear();
    for (auto& [p, bytes] : held) {
      if (copies_in_flight(p, bytes) && !scheduler().defects.no_pinned_care) {
        limbo.push_back({p, bytes});
        continue;
      }
      if (!scheduler().defects.no_poison) memset(p, 0xFF, bytes);
      free(p);
    }
  }

  static void release(void* pointer) {
    auto* p = static_cast<char*>(pointer);
    size_t bytes = 0;
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      auto found = pinned.find(p);
      bytes = size_t(found->second - found->first);
      pinned.erase(found);
    }
    {
      const std::lock_guard<std::mutex> lock(mutex);
      limbo.push_back({p, bytes});
    }
    reclaim();
  }

  at::DataPtr allocate(size_t bytes) override {
    reclaim();
    auto* p = static_cast<char*>(bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr);
    if (p) register_host(p, bytes);
    return {p, p, bytes ? &release : &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies are known by their range
  void empty_cache() override { reclaim(); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

HostAllocator host_allocator;

}  // namespace

bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned.upper_bound(static_cast<const char*>(p));
  return next != pinned.begin() && static_cast<const char*>(p) < std::prev(next)->second;
}

void register_host(void* p, size_t bytes) {
  auto* begin = static_cast<const char*>(p);
  TORCH_CHECK(bytes, "no memory to pin");
  TORCH_CHECK(!is_pinned(begin) && !is_pinned(begin + bytes - 1), "this memory is pinned already");
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned[begin] = begin + bytes;
}

void unregister_host(void* p) {
  auto* begin = static_cast<const char*>(p);
  const char* end = nullptr;
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    auto found = pinned.find(begin);
    TORCH_CHECK(found != pinned.end(), "no pinned memory begins at this address");
    end = found->second;
    pinned.erase(found);
  }
  if (scheduler().defects.no_unpin_check) return;
  TORCH_CHECK(!copies_in_flight(begin, size_t(end - begin)), "unpinned under a copy: ", end - begin,
              " bytes of host memory, which a stream has still to copy from or to");
}

void note_copy(const void* p, size_t bytes, const SignalPtr& signal) {
  auto* begin = static_cast<const char*>(p);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  copies.erase(
      std::remove_if(copies.begin(), copies.end(), [](const Copy& copy) { return copy.signal->done.load(); }),
      copies.end());
  copies.push_back({begin, begin + bytes, signal});
}

bool copies_in_flight(const void* p, size_t bytes) {
  auto* begin = static_cast<const char*>(p);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return std::any_of(copies.begin(), copies.end(), [&](const Copy& copy) {
    return !copy.signal->done && copy.begin < begin + bytes && begin < copy.end;
  });
}

void install_memory() {
  c10::SetAllocator(kType, &allocator());
  at::setHostAllocator(kType, &host_allocator);
}

at::Allocator* pinned_allocator() { return &host_allocator; }

}  // namespace sim
