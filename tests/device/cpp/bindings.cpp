#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "device.h"
#include "memory.h"
#include "scheduler.h"

namespace py = pybind11;

namespace sim {
namespace {

void observe(const py::object& callback) {
  if (callback.is_none()) {
    counters().observer = nullptr;
    return;
  }
  auto* held = callback.inc_ref().ptr();  // for as long as the process lives: a thread may be calling it
  counters().observer = [held](const std::string& kind, const std::string& why, int64_t bytes) {
    py::gil_scoped_acquire gil;
    py::reinterpret_borrow<py::function>(held)(kind, why, bytes);
  };
}

Mode mode_of(const std::string& name) {
  if (name == "eager") return Mode::eager;
  if (name == "lazy") return Mode::lazy;
  TORCH_CHECK(name == "random", "no schedule ", name, ": eager, lazy, random");
  return Mode::random;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  install_device();
  m.attr("devices") = kDevices;

  m.def(
      "schedule", [](const std::string& mode, uint64_t seed) { scheduler().configure(mode_of(mode), seed); },
      no_gil);
  m.def("pending", [] { return scheduler().pending(); }, no_gil);
  m.def("fault", [](const std::string& name, int64_t skip, bool hangs) {
    scheduler().add_fault({name, skip, hangs});
  });
  m.def("clear_faults", [] { scheduler().clear_faults(); }, no_gil);
  m.def("hang_limit", [](double seconds) { scheduler().set_hang_limit(seconds); });

  py::class_<Defects>(m, "Defects")
      .def_readwrite("no_poison", &Defects::no_poison)
      .def_readwrite("no_events", &Defects::no_events)
      .def_readwrite("no_copy_waits", &Defects::no_copy_waits)
      .def_readwrite("no_record_stream", &Defects::no_record_stream)
      .def_readwrite("no_pinned_care", &Defects::no_pinned_care)
      .def_readwrite("no_unpin_check", &Defects::no_unpin_check)
      .def_readwrite("no_limit", &Defects::no_limit)
      .def_readwrite("no_pageable_count", &Defects::no_pageable_count)
      .def_readwrite("no_wait_count", &Defects::no_wait_count)
      .def_readwrite("no_time", &Defects::no_time)
      .def_readwrite("no_caller_waits", &Defects::no_caller_waits)
      .def_readwrite("no_work_waits", &Defects::no_work_waits);
  m.def("defects", [] { return &scheduler().defects; }, py::return_value_policy::reference);
  m.def("protect", [](bool on) { arena().protect(on); });

  py::class_<CostModel>(m, "CostModel")
      .def_readwrite("flops", &CostModel::flops)
      .def_readwrite("memory", &CostModel::memory)
      .def_readwrite("to_device", &CostModel::to_device)
      .def_readwrite("to_host", &CostModel::to_host)
      .def_readwrite("network", &CostModel::network)
      .def_readwrite("launch", &CostModel::launch)
      .def_readwrite("latency", &CostModel::latency);
  m.def("costs", [] { return &scheduler().costs; }, py::return_value_policy::reference);
  m.def("now", [] { return scheduler().now(); });
  m.def("host_works", [](double seconds) { scheduler().host_works(seconds); }, no_gil);
  m.def("host_reaches", [](double time) { scheduler().host_reaches(time); }, no_gil);
  m.def("host_apart", [](double time) { scheduler().host_apart(time); });
  m.def("clocked", [](bool on) { scheduler().clocked = on; });
  m.def("reset_clock", [] { scheduler().reset_clock(); }, no_gil);
  m.def("trace", [](bool on) { scheduler().trace(on); }, no_gil);
  m.def("spans", [] {
    py::list spans;
    for (const auto& span : scheduler().spans())
      spans.append(py::make_tuple(span.name, span.stream / kStreams, span.stream % kStreams,
                                  int(span.resource), span.start, span.end));
    return spans;
  });

  m.def("waits", [] { return counters().waits; });
  m.def("stalls", [] { return counters().stalls; });
  m.def("pageable", [] { return counters().pageable; });
  m.def("reset_counters", [] {
    counters().waits.clear();
    counters().stalls.clear();
    counters().pageable.clear();
  });
  m.def("pageable_is_error", [](bool is) { counters().pageable_is_error = is; });
  m.def("observe", &observe);

  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(c10::DeviceIndex(device))));
  });
  m.def("draws_as_host", [](bool as_host) { draws_as_host() = as_host; });
  m.def("make_simccl", [](const py::object& inner) {
    auto* backend = inner.cast<c10d::Backend*>();
    return make_simccl(c10::intrusive_ptr<c10d::Backend>::unsafe_reclaim_from_nonowning(backend));
  });
  m.def("reset_streams", &reset_streams);
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", [](int device) { set_current_device(c10::DeviceIndex(device)); });
  m.def("set_limit", [](int device, size_t bytes) { allocator().set_limit(device, bytes); });
  m.def(
      "register_host", [](uintptr_t p, size_t bytes) { register_host(reinterpret_cast<void*>(p), bytes); },
      no_gil);
  m.def("unregister_host", [](uintptr_t p) { unregister_host(reinterpret_cast<void*>(p)); }, no_gil);
}

}  // namespace
}  // namespace sim
