#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "memory.h"

namespace sim {
namespace {

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local int streams_of_thread[kDevices] = {};
std::atomic<int> next_stream{0};

}  // namespace

c10::DeviceIndex current_device() { return device_of_thread; }
void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device < kDevices, "there is no simulated device ", int(device), ", only ", kDevices);
  if (device >= 0) device_of_thread = device;
}
int current_stream() { return device_of_thread * kStreams + streams_of_thread[device_of_thread]; }
int index_of(const c10::Stream& stream) { return stream.device_index() * kStreams + int(stream.id()); }
c10::Stream stream_at(int index) {
  const c10::Device device(kType, c10::DeviceIndex(index / kStreams));
  return c10::Stream(c10::Stream::UNSAFE, device, index % kStreams);
}

void reset_streams() { next_stream = 0; }

Counters& counters() {
  static auto* the = new Counters;
  return *the;
}

void Counters::note_pageable(const std::string& why, int64_t bytes, bool asynchronous) {
  if (scheduler().defects.no_pageable_count) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    pageable[why] += bytes;
  }
  if (observer) observer("pageable", why, bytes);
  TORCH_CHECK(!pageable_is_error || !asynchronous, why, ": an asynchronous copy of ", bytes,
              " bytes, and the host's memory is not pinned");
}

void Counters::note_wait(const std::string& why, double seconds) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    waits[why]++;
    stalls[why] += std::max(0.0, seconds);
  }
  if (observer) observer("wait", why, 0);
}

void wait_for(const SignalPtr& signal, const std::string& why) {
  if (!scheduler().defects.no_wait_count) counters().note_wait(why, signal->time - scheduler().now());
  scheduler().host_reaches(signal->time);
  scheduler().finish(signal);
}

void wait_for_stream(int stream, const std::string& why) { wait_for(scheduler().record(stream), why); }

// ------------------------------------------------------------------------------------------ generators

namespace {

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == int64_t(sizeof(uint64_t[2])),
                "the state of a generator has 16 bytes, this has ", state.numel());
    const auto* bytes = static_cast<const char*>(state.data());
    memcpy(&seed_, bytes, sizeof seed_);
    memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({int64_t(sizeof(uint64_t[2]))}, at::kByte);
    memcpy(state.data_ptr(), &seed_, sizeof seed_);
    memcpy(state.data_ptr<uint8_t>() + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }

 private:
  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

}  // namespace

at::Generator generator_of_task(const at::Generator& of_device) {
  auto* generator = of_device.unsafeGetGeneratorImpl();
  std::lock_guard<std::mutex> lock(generator->mutex_);
  const uint64_t offset = generator->get_offset();
  generator->set_offset(offset + 4);
  // The generator of the host seeds itself with 32 bits: the two are mixed (splitmix64).
  uint64_t mixed = generator->current_seed() + (offset + 1) * 0x9E3779B97F4A7C15;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
  return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
}

bool& draws_as_host() {
  static bool as_host = false;
  return as_host;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kDevices; index++)
      made->push_back(at::make_generator<SimGenerator>(c10::DeviceIndex(index)));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

// ------------------------------------------------------------------------------------- guard and hooks

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_of_thread = device.index();
  }
  static int index(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return stream_at(index(device) * kStreams + streams_of_thread[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_at(index(device) * kStreams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_at(index(device) * kStreams + 1 + next_stream++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    streams_of_thread[stream.device_index()] = int(stream.id());
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override { return scheduler().idle(index_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for_stream(index_of(stream), "synchronize a stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    auto last = std::make_shared<Signal>();  // one wait, for all streams
    std::vector<SignalPtr> all;
    for (int id = 0; id < kStreams; id++)
      if (!scheduler().idle(device * kStreams + id))
        all.push_back(scheduler().record(device * kStreams + id));
    scheduler().submit(device * kStreams, {"synchronize", nullptr, all, last});
    wait_for(last, "synchronize the device");
  }

  using Event = SignalPtr;
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    auto signal = scheduler().record(index_of(stream));
    if (scheduler().defects.no_events) {
      signal = std::make_shared<Signal>();
      signal->done = true;
    }
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = signal;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    scheduler().submit(index_of(stream),
                       {"wait for an event", nullptr, {*static_cast<Event*>(event)}, nullptr});
  }
  bool queryEvent(void* event) const override {
    return !event || scheduler().seen_done(**static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(*static_cast<Event*>(event), "synchronize an event");
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK(from && to && (*static_cast<Event*>(from))->done && (*static_cast<Event*>(to))->done,
                "an event between which time is asked for has not been reached");
    return 1e3 * ((*static_cast<Event*>(to))->time - (*static_cast<Event*>(from))->time);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, current_device()}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<SimGenerator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::DataPtr fresh = allocator().allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept) {
      char *to = arena().seen(fresh.get()), *from = arena().seen(storage.data());
      scheduler().submit(current_stream(),
                         {"resize", [to, from, kept] { memcpy(to, from, kept); }, {}, nullptr});
    }
    const_cast<c10::Storage&>(storage).set_data_ptr(std::move(fresh));
    const_cast<c10::Storage&>(storage).set_nbytes(bytes);
  }
};

}  // namespace

void install_device() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  install_memory();
  at::globalContext().lazyInitDevice(kType);  // before it nothing counts as pinned
}

}  // namespace sim
