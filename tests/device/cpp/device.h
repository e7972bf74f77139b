// The device as torch sees it: current device and streams, the host's waits, generators.

#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "scheduler.h"

namespace sim {

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
int current_stream();
int index_of(const c10::Stream& stream);
c10::Stream stream_at(int index);
// New streams come in turn, from the first: the same program gets the same ones.
void reset_streams();

// What the host does that a real device would make slow, by reason; `observer` hears each: kind, reason,
// bytes.
struct Counters {
  std::mutex mutex;
  std::map<std::string, int64_t> waits;
  std::map<std::string, double> stalls;  // virtual seconds that the host waited
  std::map<std::string, int64_t> pageable;
  std::function<void(const std::string&, const std::string&, int64_t)> observer;
  bool pageable_is_error = false;

  void note_wait(const std::string& why, double seconds);
  void note_pageable(const std::string& why, int64_t bytes, bool asynchronous);
};

Counters& counters();
// The host waits; what stands behind the signal runs.
void wait_for(const SignalPtr& signal, const std::string& why);
void wait_for_stream(int stream, const std::string& why);

// A generator is a seed and a count of draws, as on CUDA: an operator takes its numbers where it is called,
// whenever it runs.
at::Generator generator_of_task(const at::Generator& of_device);
const at::Generator& default_generator(c10::DeviceIndex device);
// Whether the default generators draw what the host's would draw in their place, where values of the device
// do not decide about it: parameters that are made on the device are then those that are made on the host.
bool& draws_as_host();

void install_device();

}  // namespace sim
