// Tensors as kernels see them, and how operators become tasks.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>

#include "memory.h"
#include "scheduler.h"

namespace sim {

inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

// A tensor of the host over the device's memory. It keeps nothing alive, as a CUDA kernel does not.
at::Tensor seen(const at::Tensor& t);

// The same for a tensor of the host.
at::Tensor unowned(const at::Tensor& t);

// Enqueues work in the current stream; it runs as on a plain CPU, whatever the thread that runs it was about
// to do.
SignalPtr launch(const std::string& name, Resource resource, double seconds, std::function<void()> run);

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype,
                         c10::Device device);

// `copy_`, where one of the two is on the device.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

// Any operator: a task in which the host's kernel runs.
void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
