// Python bindings on raw addresses. lightning_zero.ops checks what Python can check about the tensors.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lightning_zero/dispatch.h"

namespace py = pybind11;

namespace lightning_zero {
namespace {

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::vector<std::string> names(bool supported_only) {
  std::vector<std::string> result;
  for (const Target& target : compiled_targets()) {
    if (!supported_only || target.supported()) result.emplace_back(target.name);
  }
  return result;
}

void adamw(const std::string& isa, std::uintptr_t param, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq,
           std::uintptr_t grad, DType grad_dtype, std::uintptr_t copy_out, DType copy_dtype,
           std::size_t count, double lr, double beta1, double beta2, double eps, double weight_decay,
           std::int64_t step, double grad_scale, bool decoupled, std::size_t threads) {
  const AdamWFunction update = resolve_target(isa).adamw;
  const AdamWCoefficients coefficients =
      adamw_coefficients({lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled});
  const AdamWArrays arrays = {pointer<float>(param),
                              pointer<float>(exp_avg),
                              pointer<float>(exp_avg_sq),
                              pointer<const void>(grad),
                              grad_dtype,
                              pointer<void>(copy_out),
                              copy_dtype,
                              count};
  const py::gil_scoped_release release;
  adamw_parallel(update, coefficients, arrays, threads);
}

}  // namespace
}  // namespace lightning_zero

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  using namespace lightning_zero;
  m.doc() = "Optimizer kernels on host memory, compiled per instruction set.";

  py::native_enum<DType>(m, "DType", "enum.Enum")
      .value("float32", DType::float32)
      .value("bfloat16", DType::bfloat16)
      .value("float16", DType::float16)
      .finalize();

  m.def("compiled_isas", [] { return names(false); });
  m.def("supported_isas", [] { return names(true); });
  m.def(
      "resolve_isa", [](const std::string& name) { return std::string(resolve_target(name).name); },
      py::arg("name"));
  m.def("adamw", &adamw, py::kw_only(), py::arg("isa"), py::arg("param"), py::arg("exp_avg"),
        py::arg("exp_avg_sq"), py::arg("grad"), py::arg("grad_dtype"), py::arg("copy_out"),
        py::arg("copy_dtype"), py::arg("count"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
        py::arg("eps"), py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale"), py::arg("decoupled"),
        py::arg("threads"));
}
