// Copies between host and device, by the rules of CUDA's `copy_`: the host's side of an asynchronous one must
// be pinned, have the other side's dtype and lie densely in the same order; otherwise it goes through
// pageable memory, and the host waits: on the way to the host for the copy; on the way to the device, where
// the driver stages the source, for what the stream had to do before, and the copy itself may be under way
// ("API synchronization behavior" in the reference of CUDA's runtime).

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "device.h"
#include "kernels.h"

namespace sim {
namespace {

bool dense_alike(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense() && b.is_non_overlapping_and_dense();
}

double transfer_seconds(const at::Tensor& t, double rate) {
  return scheduler().costs.launch + double(t.nbytes()) / rate;
}

void wait_for_copy(const SignalPtr& signal, const char* name) {
  if (!scheduler().defects.no_copy_waits) wait_for(signal, std::string("blocking ") + name);
}

void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool same = from.scalar_type() == to.scalar_type() && (from.is_contiguous() || dense_alike(from, to));
  // Another dtype or order: the host converts, into pageable memory.
  at::Tensor staged = from, kept;
  if (!same) {
    at::AutoDispatchBelowADInplaceOrView below;
    staged = kept = at::empty_like(to, to.options().device(at::kCPU).pinned_memory(false));
    staged.copy_(from);
  }
  const bool pinned = same && is_pinned(from.const_data_ptr());
  const char* name = "copy to the device";
  if (!pinned) {
    counters().note_pageable(same ? name : "copy to the device, converted", staged.nbytes(), non_blocking);
    if (non_blocking) {
      wait_for_copy(scheduler().record(current_stream()), name);
      at::AutoDispatchBelowADInplaceOrView below;
      if (!kept.defined()) kept = staged.clone();
    }
  }
  at::Tensor source = kept.defined() ? kept : unowned(staged), target = seen(to);
  auto signal = launch(name, Resource::to_device, transfer_seconds(to, scheduler().costs.to_device),
                       [source, target]() mutable { target.copy_(source); });
  if (pinned) note_copy(from.const_data_ptr(), from.nbytes(), signal);
  if (!non_blocking) wait_for_copy(signal, name);
}

void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  // An asynchronous copy converts on the device, a blocking one on the host; the device reorders.
  const bool direct = (to.is_contiguous() || dense_alike(from, to)) &&
                      (non_blocking || from.scalar_type() == to.scalar_type());
  const bool pinned = direct && is_pinned(to.const_data_ptr());
  const char* name = "copy to the host";
  if (!pinned)
    counters().note_pageable(direct ? name : "copy to the host, converted", from.nbytes(), non_blocking);
  at::Tensor source = seen(from), kept;
  if (!direct) {
    at::AutoDispatchBelowADInplaceOrView below;
    kept = at::empty_like(from, from.options().device(at::kCPU).pinned_memory(false));
  }
  at::Tensor target = direct ? unowned(to) : kept;
  // Until the copy has arrived nobody may count on what is there, unless an earlier copy still uses it.
  if (pinned && non_blocking && to.is_contiguous() && !scheduler().defects.no_poison &&
      !copies_in_flight(to.const_data_ptr(), to.nbytes())) {
    memset(to.data_ptr(), 0xFF, to.nbytes());
  }
  auto signal = launch(name, Resource::to_host, transfer_seconds(to, scheduler().costs.to_host),
                       [source, target]() mutable { target.copy_(source); });
  if (pinned) note_copy(to.const_data_ptr(), to.nbytes(), signal);
  if (!non_blocking || !pinned) wait_for_copy(signal, name);
  if (!direct) {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(kept);
  }
}

// Between two devices each one's current stream waits for the other's, as on CUDA.
void on_one_side(const at::Tensor& from, const at::Tensor& to) {
  const double seconds =
      scheduler().costs.launch + double(from.nbytes() + to.nbytes()) / scheduler().costs.memory;
  auto work = [source = seen(from), target = seen(to)]() mutable { target.copy_(source); };
  if (from.device() == to.device()) {
    launch("copy", Resource::compute, seconds, work);
    return;
  }
  const int here = current_stream();
  int there = 0;
  {
    c10::DeviceGuard guard(to.device());
    there = current_stream();
  }
  scheduler().submit(here, {"wait for the other device", nullptr, {scheduler().record(there)}, nullptr});
  auto signal = launch("copy between devices", Resource::compute, seconds, work);
  scheduler().submit(there, {"wait for the other device", nullptr, {signal}, nullptr});
}

}  // namespace

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  c10::DeviceGuard guard(on_device(from) ? from.device() : to.device());
  if (!to.numel()) return to;
  at::Tensor source = from;
  if (from.sizes() != to.sizes()) {
    at::AutoDispatchBelowADInplaceOrView below;
    source = from.expand_as(to);
  }
  if (on_device(from) && on_device(to)) {
    on_one_side(source, to);
  } else if (on_device(to)) {
    to_device(source, to, non_blocking);
  } else {
    to_host(source, to, non_blocking);
  }
  return to;
}

}  // namespace sim
