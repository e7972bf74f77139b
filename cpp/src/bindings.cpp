// Python bindings for raw addresses. lightning_zero.ops checks the tensors in Python before it calls them.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lightning_zero/disk.h"
#include "lightning_zero/disk_rings.h"
#include "lightning_zero/dispatch.h"
#include "lightning_zero/processes.h"
#include "lightning_zero/thread_pool.h"

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

UpdateArrays arrays(std::size_t count, std::uintptr_t param, DType param_dtype, std::uintptr_t remainder,
                    std::uintptr_t copy_out, DType copy_dtype, Ties copy_ties, std::uintptr_t grad,
                    DType grad_dtype, const std::vector<std::uintptr_t>& states, DType state_dtype,
                    const std::vector<std::uintptr_t>& scales) {
  if (states.size() > kMaxStates || scales.size() > kMaxStates)
    throw std::invalid_argument("too many state arrays");
  UpdateArrays a{pointer<void>(param),
                 param_dtype,
                 pointer<std::int16_t>(remainder),
                 pointer<void>(copy_out),
                 copy_dtype,
                 copy_ties,
                 pointer<const void>(grad),
                 grad_dtype,
                 {},
                 state_dtype,
                 count};
  for (std::size_t k = 0; k < states.size(); ++k) a.states[k] = pointer<void>(states[k]);
  for (std::size_t k = 0; k < scales.size(); ++k) a.scales[k] = pointer<std::uint8_t>(scales[k]);
  return a;
}

template <class Coefficients>
void update(UpdateFunction<Coefficients> function, const Coefficients& coefficients,
            const UpdateArrays& arrays, const RoundingKey& key, std::size_t threads) {
  const py::gil_scoped_release release;
  update_parallel(function, coefficients, arrays, key, threads);
}

void adam(const std::string& isa, const UpdateArrays& arrays, const RoundingKey& key, std::size_t threads,
          double lr, double beta1, double beta2, double eps, double weight_decay, std::int64_t step,
          double grad_scale, bool decoupled, bool amsgrad) {
  const AdamCoefficients c =
      adam_coefficients(lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled, amsgrad);
  update(resolve_target(isa).kernels.adam, c, arrays, key, threads);
}

void adagrad(const std::string& isa, const UpdateArrays& arrays, const RoundingKey& key, std::size_t threads,
             double lr, double lr_decay, double eps, double weight_decay, std::int64_t step,
             double grad_scale) {
  const AdagradCoefficients c = adagrad_coefficients(lr, lr_decay, eps, weight_decay, step, grad_scale);
  update(resolve_target(isa).kernels.adagrad, c, arrays, key, threads);
}

void lion(const std::string& isa, const UpdateArrays& arrays, const RoundingKey& key, std::size_t threads,
          double lr, double beta1, double beta2, double weight_decay, double grad_scale) {
  const LionCoefficients c = lion_coefficients(lr, beta1, beta2, weight_decay, grad_scale);
  update(resolve_target(isa).kernels.lion, c, arrays, key, threads);
}

void sgd(const std::string& isa, const UpdateArrays& arrays, const RoundingKey& key, std::size_t threads,
         double lr, double momentum, double dampening, bool nesterov, double weight_decay, bool first,
         double grad_scale) {
  const SgdCoefficients c =
      sgd_coefficients(lr, momentum, dampening, nesterov, weight_decay, first, grad_scale);
  update(resolve_target(isa).kernels.sgd, c, arrays, key, threads);
}

double sum_of_squares(const std::string& isa, std::uintptr_t values, DType dtype, std::size_t count,
                      std::size_t threads) {
  const SumOfSquaresFunction sum = resolve_target(isa).kernels.sum_of_squares;
  const py::gil_scoped_release release;
  return sum_of_squares_parallel(sum, pointer<const void>(values), dtype, count, threads);
}

void add(const std::string& isa, std::uintptr_t total, std::uintptr_t values, DType dtype, std::size_t count,
         std::size_t threads) {
  const AddFunction function = resolve_target(isa).kernels.add;
  const py::gil_scoped_release release;
  add_parallel(function, {pointer<float>(total), pointer<const void>(values), dtype, count}, threads);
}

void sum_parts(const std::string& isa, std::uintptr_t total, DType total_dtype, bool add,
               const std::vector<std::uintptr_t>& parts, float factor, DType dtype, std::size_t count,
               std::size_t threads) {
  if (parts.empty()) throw std::invalid_argument("there are no parts to sum");
  if (total_dtype != DType::float32 && (add || total_dtype != dtype)) {
    throw std::invalid_argument(
        "the total must be float32, or have the dtype of the parts and not be added to");
  }
  const SumFunction function = resolve_target(isa).kernels.sum;
  std::vector<const void*> arrays;
  for (const std::uintptr_t part : parts) arrays.push_back(pointer<const void>(part));
  const py::gil_scoped_release release;
  sum_parallel(
      function,
      {pointer<void>(total), total_dtype, add, arrays.data(), arrays.size(), factor, dtype, 0, count},
      threads);
}

void convert(SplitFunction function, std::uintptr_t whole, std::uintptr_t high, DType dtype,
             std::uintptr_t remainder, std::size_t count, std::size_t threads) {
  const SplitArrays arrays = {pointer<float>(whole), pointer<void>(high), dtype,
                              pointer<std::int16_t>(remainder), count};
  const py::gil_scoped_release release;
  split_parallel(function, arrays, threads);
}

void convert_blocks(BlockFunction function, std::uintptr_t whole, std::uintptr_t codes, std::uintptr_t scales,
                    bool is_signed, std::size_t lead, std::size_t count, std::size_t threads) {
  const BlockArrays arrays = {pointer<float>(whole),
                              pointer<std::uint8_t>(codes),
                              pointer<std::uint8_t>(scales),
                              is_signed,
                              lead,
                              count};
  const py::gil_scoped_release release;
  convert_blocks_parallel(function, arrays, threads);
}

// A failure as (code, offset).
using FailurePair = std::pair<int, std::uint64_t>;

std::optional<FailurePair> transfer(DiskPool& pool, int file, std::uintptr_t address, std::size_t bytes,
                                    std::uint64_t offset, std::size_t alignment, bool write) {
  const py::gil_scoped_release release;
  const auto failure = pool.transfer(write ? Direction::write : Direction::read,
                                     {file, pointer<void>(address), bytes, offset}, alignment);
  if (!failure) return std::nullopt;
  return FailurePair{failure->code, failure->offset};
}

// Makes an object. A std::system_error becomes an OSError with its errno.
template <class Made, class... Arguments>
std::unique_ptr<Made> make(Arguments... arguments) {
  try {
    return std::make_unique<Made>(arguments...);
  } catch (const std::system_error& error) {
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    throw py::error_already_set();
  }
}

std::unique_ptr<SharedMemory> make_shared_memory(std::size_t bytes, std::optional<int> file) {
  return file ? make<SharedMemory>(*file, bytes) : make<SharedMemory>(bytes);
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
      .value("int8", DType::int8)
      .finalize();

  m.def("compiled_isas", [] { return names(false); });
  m.def("supported_isas", [] { return names(true); });
  m.def(
      "resolve_isa", [](const std::string& name) { return std::string(resolve_target(name).name); },
      py::arg("name"));
  py::native_enum<Ties>(m, "Ties", "enum.Enum")
      .value("even", Ties::even)
      .value("away", Ties::away)
      .finalize();

  py::class_<UpdateArrays>(m, "UpdateArrays")
      .def(py::init(&arrays), py::kw_only(), py::arg("count"), py::arg("param"), py::arg("param_dtype"),
           py::arg("remainder"), py::arg("copy_out"), py::arg("copy_dtype"), py::arg("copy_ties"),
           py::arg("grad"), py::arg("grad_dtype"), py::arg("states"), py::arg("state_dtype"),
           py::arg("scales"));
  py::class_<RoundingKey>(m, "RoundingKey")
      .def(py::init<std::uint64_t, std::uint64_t, std::uint64_t>(), py::kw_only(), py::arg("seed"),
           py::arg("step"), py::arg("index"));

  m.def("adam", &adam, py::kw_only(), py::arg("isa"), py::arg("arrays"), py::arg("key"), py::arg("threads"),
        py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
        py::arg("step"), py::arg("grad_scale"), py::arg("decoupled"), py::arg("amsgrad"));
  m.def("adagrad", &adagrad, py::kw_only(), py::arg("isa"), py::arg("arrays"), py::arg("key"),
        py::arg("threads"), py::arg("lr"), py::arg("lr_decay"), py::arg("eps"), py::arg("weight_decay"),
        py::arg("step"), py::arg("grad_scale"));
  m.def("lion", &lion, py::kw_only(), py::arg("isa"), py::arg("arrays"), py::arg("key"), py::arg("threads"),
        py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("weight_decay"), py::arg("grad_scale"));
  m.def("sgd", &sgd, py::kw_only(), py::arg("isa"), py::arg("arrays"), py::arg("key"), py::arg("threads"),
        py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("nesterov"),
        py::arg("weight_decay"), py::arg("first"), py::arg("grad_scale"));
  py::class_<AdamCoefficients>(m, "AdamCoefficients")
      .def(py::init(&adam_coefficients), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale"),
           py::arg("decoupled"), py::arg("amsgrad"))
      .def_readonly("grad_scale", &AdamCoefficients::grad_scale)
      .def_readonly("l2", &AdamCoefficients::l2)
      .def_readonly("decay", &AdamCoefficients::decay)
      .def_readonly("lerp_weight", &AdamCoefficients::lerp_weight)
      .def_readonly("lerp_from_gradient", &AdamCoefficients::lerp_from_gradient)
      .def_readonly("beta2", &AdamCoefficients::beta2)
      .def_readonly("one_minus_beta2", &AdamCoefficients::one_minus_beta2)
      .def_readonly("eps", &AdamCoefficients::eps)
      .def_readonly("negative_step_size", &AdamCoefficients::negative_step_size);
  py::class_<AdagradCoefficients>(m, "AdagradCoefficients")
      .def(py::init(&adagrad_coefficients), py::kw_only(), py::arg("lr"), py::arg("lr_decay"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale"))
      .def_readonly("grad_scale", &AdagradCoefficients::grad_scale)
      .def_readonly("l2", &AdagradCoefficients::l2)
      .def_readonly("eps", &AdagradCoefficients::eps)
      .def_readonly("negative_lr", &AdagradCoefficients::negative_lr);
  py::class_<LionCoefficients>(m, "LionCoefficients")
      .def(py::init(&lion_coefficients), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("weight_decay"), py::arg("grad_scale"))
      .def_readonly("grad_scale", &LionCoefficients::grad_scale)
      .def_readonly("decay", &LionCoefficients::decay)
      .def_readonly("beta1", &LionCoefficients::beta1)
      .def_readonly("one_minus_beta1", &LionCoefficients::one_minus_beta1)
      .def_readonly("beta2", &LionCoefficients::beta2)
      .def_readonly("one_minus_beta2", &LionCoefficients::one_minus_beta2)
      .def_readonly("negative_lr", &LionCoefficients::negative_lr);
  py::class_<SgdCoefficients>(m, "SgdCoefficients")
      .def(py::init(&sgd_coefficients), py::kw_only(), py::arg("lr"), py::arg("momentum"),
           py::arg("dampening"), py::arg("nesterov"), py::arg("weight_decay"), py::arg("first"),
           py::arg("grad_scale"))
      .def_readonly("grad_scale", &SgdCoefficients::grad_scale)
      .def_readonly("l2", &SgdCoefficients::l2)
      .def_readonly("momentum", &SgdCoefficients::momentum)
      .def_readonly("one_minus_dampening", &SgdCoefficients::one_minus_dampening)
      .def_readonly("negative_lr", &SgdCoefficients::negative_lr)
      .def_readonly("nesterov", &SgdCoefficients::nesterov)
      .def_readonly("first", &SgdCoefficients::first);

  m.def("sum_of_squares", &sum_of_squares, py::kw_only(), py::arg("isa"), py::arg("values"), py::arg("dtype"),
        py::arg("count"), py::arg("threads"));

  m.def("add", &add, py::kw_only(), py::arg("isa"), py::arg("total"), py::arg("values"), py::arg("dtype"),
        py::arg("count"), py::arg("threads"));
  m.def("sum_parts", &sum_parts, py::kw_only(), py::arg("isa"), py::arg("total"), py::arg("total_dtype"),
        py::arg("add"), py::arg("parts"), py::arg("factor"), py::arg("dtype"), py::arg("count"),
        py::arg("threads"));

  m.def(
      "split",
      [](const std::string& isa, std::uintptr_t whole, std::uintptr_t high, DType dtype,
         std::uintptr_t remainder, std::size_t count, std::size_t threads) {
        convert(resolve_target(isa).kernels.split, whole, high, dtype, remainder, count, threads);
      },
      py::kw_only(), py::arg("isa"), py::arg("whole"), py::arg("high"), py::arg("dtype"),
      py::arg("remainder"), py::arg("count"), py::arg("threads"));
  m.def(
      "join",
      [](const std::string& isa, std::uintptr_t whole, std::uintptr_t high, DType dtype,
         std::uintptr_t remainder, std::size_t count, std::size_t threads) {
        convert(resolve_target(isa).kernels.join, whole, high, dtype, remainder, count, threads);
      },
      py::kw_only(), py::arg("isa"), py::arg("whole"), py::arg("high"), py::arg("dtype"),
      py::arg("remainder"), py::arg("count"), py::arg("threads"));
  m.def(
      "quantize",
      [](const std::string& isa, std::uintptr_t whole, std::uintptr_t codes, std::uintptr_t scales,
         bool is_signed, std::size_t lead, std::size_t count, std::size_t threads) {
        convert_blocks(resolve_target(isa).kernels.quantize, whole, codes, scales, is_signed, lead, count,
                       threads);
      },
      py::kw_only(), py::arg("isa"), py::arg("whole"), py::arg("codes"), py::arg("scales"),
      py::arg("is_signed"), py::arg("lead"), py::arg("count"), py::arg("threads"));
  m.def(
      "dequantize",
      [](const std::string& isa, std::uintptr_t whole, std::uintptr_t codes, std::uintptr_t scales,
         bool is_signed, std::size_t lead, std::size_t count, std::size_t threads) {
        convert_blocks(resolve_target(isa).kernels.dequantize, whole, codes, scales, is_signed, lead, count,
                       threads);
      },
      py::kw_only(), py::arg("isa"), py::arg("whole"), py::arg("codes"), py::arg("scales"),
      py::arg("is_signed"), py::arg("lead"), py::arg("count"), py::arg("threads"));
  m.def("block_length", [] { return kBlockLength; });
  m.def(
      "fill_with_zeros",
      [](std::uintptr_t memory, std::size_t bytes, std::size_t threads) {
        const py::gil_scoped_release release;
        fill_with_zeros(pointer<void>(memory), bytes, threads);
      },
      py::kw_only(), py::arg("memory"), py::arg("nbytes"), py::arg("threads"));
  m.def("bind_threads", &bind_threads, py::arg("cores"), py::arg("together"));

  py::class_<DiskPool>(m, "DiskPool")
      .def("transfer", &transfer, py::kw_only(), py::arg("file"), py::arg("address"), py::arg("nbytes"),
           py::arg("offset"), py::arg("alignment"), py::arg("write"));
  py::class_<DiskThreads, DiskPool>(m, "DiskThreads")
      .def(py::init(&make<DiskThreads, std::size_t, std::size_t>), py::kw_only(), py::arg("depth"),
           py::arg("block"));
  py::class_<DiskRings, DiskPool>(m, "DiskRings")
      .def(py::init(&make<DiskRings, std::size_t, std::size_t>), py::kw_only(), py::arg("depth"),
           py::arg("block"));
  m.def("io_uring_refusal", &io_uring_refusal);

  py::class_<SharedMemory>(m, "SharedMemory", py::buffer_protocol())
      .def(py::init(&make_shared_memory), py::arg("nbytes"), py::arg("file") = py::none())
      .def_property_readonly("file", &SharedMemory::file)
      .def("close_file", &SharedMemory::close_file)
      .def_buffer([](SharedMemory& memory) {
        const auto bytes = static_cast<py::ssize_t>(memory.bytes());
        return py::buffer_info(static_cast<std::uint8_t*>(memory.data()), bytes);
      });
  m.def(
      "announce",
      [](std::uintptr_t signal, std::uint32_t value) { return pointer<Signal>(signal)->announce(value); },
      py::arg("signal"), py::arg("value"));
  m.def(
      "wait_for",
      [](std::uintptr_t signal, std::uint32_t value, double seconds) {
        const py::gil_scoped_release release;
        return pointer<Signal>(signal)->wait(value, seconds);
      },
      py::arg("signal"), py::arg("value"), py::arg("seconds"));
  m.def(
      "sleep_for",
      [](std::uintptr_t signal, std::uint32_t value) { return pointer<Signal>(signal)->sleep(value); },
      py::arg("signal"), py::arg("value"));
  m.def(
      "read_memory",
      [](std::int64_t process, std::uintptr_t address, std::uintptr_t target, std::size_t bytes) {
        const py::gil_scoped_release release;
        return read_memory(process, address, pointer<void>(target), bytes);
      },
      py::arg("process"), py::arg("address"), py::arg("target"), py::arg("nbytes"));
  m.def(
      "read_table",
      [](std::int64_t process, std::uintptr_t table, std::size_t count, std::size_t bytes,
         std::uintptr_t pieces) {
        const py::gil_scoped_release release;
        return read_table(process, table, count, bytes, pointer<Piece>(pieces));
      },
      py::arg("process"), py::arg("table"), py::arg("count"), py::arg("nbytes"), py::arg("pieces"));
  m.def(
      "read_pieces",
      [](std::int64_t process, std::uintptr_t pieces, std::size_t count, std::size_t start,
         std::uintptr_t target, std::size_t bytes) {
        const py::gil_scoped_release release;
        return read_pieces(process, pointer<const Piece>(pieces), count, start, pointer<void>(target), bytes);
      },
      py::arg("process"), py::arg("pieces"), py::arg("count"), py::arg("start"), py::arg("target"),
      py::arg("nbytes"));
}
