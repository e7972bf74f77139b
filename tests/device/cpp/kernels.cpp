#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cmath>
#include <map>

#include "device.h"
#include "inference.h"

namespace sim {

at::Tensor seen(const at::Tensor& t) {
  if (!on_device(t)) return t;
  const auto options = t.options().device(at::kCPU).requires_grad(false);
  void* memory = t.numel() ? arena().seen(t.const_data_ptr()) : nullptr;
  at::AutoDispatchBelowADInplaceOrView below;
  return at::from_blob(memory, t.sizes(), t.strides(), options);
}

at::Tensor unowned(const at::Tensor& t) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto options = t.options().requires_grad(false).pinned_memory(false);
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), options);
}

SignalPtr launch(const std::string& name, Resource resource, double seconds, std::function<void()> run) {
  auto signal = std::make_shared<Signal>();
  Task task{name, nullptr, {}, signal, false, resource, seconds};
  task.run = [run = std::move(run)] {
    Plain plain;
    run();
  };
  scheduler().submit(current_stream(), std::move(task));
  return signal;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype,
                         c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, at::GetAllocator(kType),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

namespace {

// ----------------------------------------------------------------------------------- tensors and views

at::Tensor make_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                        std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  return empty_strided(size, stride, c10::dtype_or_default(dtype), c10::device_or_default(device));
}

at::Tensor make_empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                      std::optional<c10::Device> device, std::optional<bool>,
                      std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, at::GetAllocator(kType),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t bytes = (impl->storage_offset() + impl->numel()) * self.itemsize();
  if (impl->numel() && bytes > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  return self;
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }

at::Tensor& set_part(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                     c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_(to, from.sym_sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  wait_for_stream(current_stream(), "item");
  return seen(self).item();
}

// `parameter.data = ` a tensor of the device, whose parameter is on the host: torch allows it between CPU and
// CUDA.
bool same_kind_of_tensor(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && (t.is_cpu() || on_device(t));
  };
  return dense(self) && dense(from);
}

// ---------------------------------------------------------------------------------------- any operator

// One call of an operator, on its way to a task.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        schema_(op.schema()),
        count_(schema_.arguments().size()),
        returns_(schema_.returns().size()),
        arguments_(torch::jit::last(*stack, count_).vec()) {
    find_device();
  }

  std::vector<c10::IValue> run() {
    c10::DeviceGuard guard(*device_);
    check_devices();
    if (draws_as_host() && is_draw()) return draw();
    infer_results();
    make_inputs();
    return known_ ? enqueue() : run_now();
  }

 private:
  const std::string& name() const { return schema_.name(); }

  void find_device() {
    auto look = [&](const at::Tensor& t) {
      if (on_device(t) && !device_) device_ = t.device();
      return t;
    };
    for (const auto& argument : arguments_) mapped(argument, look);
    for (const auto& argument : arguments_)
      if (argument.isDevice() && !device_) device_ = argument.toDevice();
    TORCH_CHECK(device_, name(), " has no tensor of the simulated device");
  }

  void check_devices() {
    const bool indexes = name().find("index") != std::string::npos;  // indices may be on the host
    auto check = [&](const at::Tensor& t) {
      TORCH_CHECK(t.device() == *device_ || t.dim() == 0 || (indexes && t.is_cpu()), name(),
                  ": Expected all tensors to be on the same device, but one is on ", t.device(),
                  ", others on ", *device_);
      return t;
    };
    for (const auto& argument : arguments_) mapped(argument, check);
  }

  void infer_results() {
    auto found = results_of(op_, arguments_);
    known_ = found.known;
    results_ = std::move(found.values);
  }

  // The arguments as the kernel sees them; scalars of the host are read now, and random numbers drawn.
  void make_inputs() {
    std::map<const c10::TensorImpl*, at::Tensor> made;  // what is given twice is one: attention asks for that
    auto as_seen = [&](const at::Tensor& t) {
      auto& one = made[t.unsafeGetTensorImpl()];
      if (!one.defined()) one = on_device(t) ? seen(t) : as_number(t.detach().clone(), t);
      return one;
    };
    for (size_t i = 0; i < count_; i++) {
      const auto& argument = arguments_[i];
      if (argument.isDevice()) {
        inputs_.push_back(c10::Device(c10::kCPU));
      } else if (argument.isGenerator() || takes_generator(i)) {
        const auto& of_device =
            argument.isGenerator() ? argument.toGenerator() : default_generator(device_->index());
        TORCH_CHECK(of_device.device().type() == kType, name(), ": the generator is on ", of_device.device());
        inputs_.push_back(generator_of_task(of_device));
      } else {
        inputs_.push_back(mapped(argument, as_seen));
      }
    }
  }

  bool takes_generator(size_t i) const {
    return schema_.arguments()[i].type()->str().find("Generator") != std::string::npos;
  }

  // Whether it only fills what it returns with random numbers of the default generator.
  bool is_draw() const {
    bool draws = false;
    for (size_t i = 0; i < count_; i++) {
      const bool reads = arguments_[i].isTensor() && !schema_.arguments()[i].alias_info();
      if (reads || (takes_generator(i) && !arguments_[i].isNone())) return false;
      draws |= takes_generator(i);
    }
    return draws && returns_ == 1 && schema_.returns()[0].alias_info();
  }

  // With the host's generator, now; a task copies the numbers.
  std::vector<c10::IValue> draw() {
    auto drawn = [](const at::Tensor& t) { return at::empty_like(t, at::kCPU); };
    for (const auto& argument : arguments_) inputs_.push_back(mapped(argument, drawn));
    Plain plain;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inputs_);
    const auto filled = arguments_[*returned_argument(0)];
    launch(name(), Resource::compute, seconds({filled}),
           [from = inputs_.back().toTensor(), to = seen(filled.toTensor())] { to.copy_(from); });
    return {filled};
  }

  // Which argument a return is, where it is one.
  std::optional<size_t> returned_argument(size_t index) const {
    const auto* alias = schema_.returns()[index].alias_info();
    if (!alias) return std::nullopt;
    TORCH_CHECK(alias->isWrite(), name(), " is a view, and needs a kernel of its own");
    for (size_t i = 0; i < count_; i++)
      if (const auto* other = schema_.arguments()[i].alias_info(); other && *other == *alias) return i;
    return std::nullopt;
  }

  // Shapes depend on values: the host waits, as on CUDA.
  std::vector<c10::IValue> run_now() {
    wait_for_stream(current_stream(), name());
    {
      Plain plain;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inputs_);
    }
    auto values = torch::jit::last(inputs_, returns_).vec();
    auto made = [&](const at::Tensor& t) {
      auto out = empty_strided(t.sizes(), t.strides(), t.scalar_type(), *device_);
      auto value = t.detach();
      if (t.numel())
        launch(name(), Resource::compute, 0, [value, out = seen(out)]() mutable { out.copy_(value); });
      return out;
    };
    std::vector<c10::IValue> outputs;
    for (size_t i = 0; i < returns_; i++) {
      const auto same = returned_argument(i);
      outputs.push_back(same ? arguments_[*same] : mapped(values[i], made));
    }
    return outputs;
  }

  // The results are made at once, and filled by a task.
  std::vector<c10::IValue> enqueue() {
    std::vector<c10::IValue> outputs, targets(returns_);
    auto made = [&](const at::Tensor& t) {
      return empty_strided(t.sizes(), t.strides(), t.scalar_type(), *device_);
    };
    for (size_t i = 0; i < returns_; i++) {
      if (const auto same = returned_argument(i)) {
        const auto& argument = arguments_[*same];
        if (argument.isTensor() && argument.toTensor().sizes() != results_[i].toTensor().sizes()) {  // `out=`
          resize_(argument.toTensor(), c10::fromIntArrayRefSlow(results_[i].toTensor().sizes()),
                  std::nullopt);
          inputs_[*same] = seen(argument.toTensor());
        }
        outputs.push_back(argument);
        continue;
      }
      outputs.push_back(mapped(results_[i], made));
      targets[i] = mapped(outputs.back(), [](const at::Tensor& t) { return seen(t); });
    }
    launch(name(), Resource::compute, seconds(outputs),
           [op = op_, inputs = std::move(inputs_), targets, returns = returns_]() mutable {
             op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inputs);
             fill(targets, torch::jit::last(inputs, returns).vec());
           });
    return outputs;
  }

  static void fill(const std::vector<c10::IValue>& targets, const std::vector<c10::IValue>& values) {
    for (size_t i = 0; i < targets.size(); i++) {
      if (targets[i].isTensor() && targets[i].toTensor().defined())
        targets[i].toTensor().copy_(values[i].toTensor());
      if (!targets[i].isTensorList()) continue;
      const auto to = targets[i].toTensorVector(), from = values[i].toTensorVector();
      for (size_t j = 0; j < to.size(); j++) to[j].copy_(from[j]);
    }
  }

  // Of the cost model: what is read and written at the memory's rate, or products at that of arithmetic.
  double seconds(const std::vector<c10::IValue>& outputs) const {
    double bytes = 0, largest = 0, product = 1;
    int matrices = 0;
    double times = 1;
    auto count = [&](const at::Tensor& t) {
      bytes += times * double(t.nbytes());
      return t;
    };
    for (size_t i = 0; i < count_; i++) {
      const auto& argument = schema_.arguments()[i];
      times = argument.alias_info() && argument.alias_info()->isWrite() && !argument.is_out() ? 2 : 1;
      mapped(arguments_[i], count);
    }
    times = 1;
    for (size_t i = 0; i < returns_; i++)
      if (!returned_argument(i)) mapped(outputs[i], count);
    auto multiply = [&](const at::Tensor& t) {
      if (t.dim() < 2) return t;
      product *= double(t.numel());
      largest = std::max(largest, double(t.dim() > 2 ? t.size(0) : 1));
      matrices++;
      return t;
    };
    // (n x k)(k x m) -> (n x m): the sizes multiply to the square of n k m; a batch multiplies all three.
    static const std::set<std::string> products = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"};
    double flops = 0;
    if (products.count(name())) {
      const size_t first = arguments_.size() > 3 ? 1 : 0;
      mapped(arguments_[first], multiply);
      mapped(arguments_[first + 1], multiply);
      mapped(outputs[0], multiply);
      if (matrices == 3) flops = 2 * std::sqrt(product / std::max(1.0, largest));
    }
    const auto& costs = scheduler().costs;
    return costs.launch + std::max(bytes / costs.memory, flops / costs.flops);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const size_t count_, returns_;
  std::vector<c10::IValue> arguments_;
  std::optional<c10::Device> device_;
  bool known_ = false;
  std::vector<c10::IValue> results_;  // on the meta device
  torch::jit::Stack inputs_;
};

}  // namespace

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto outputs = Call(op, stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& output : outputs) stack->push_back(std::move(output));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", make_empty);
  m.impl("empty_strided", make_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", same_kind_of_tensor);
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&kernel>());  // as on CUDA one kernel
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  // On CUDA it has no entry for a device: subclasses of tensors that see operators do not see it.
  m.impl("_has_compatible_shallow_copy_type", same_kind_of_tensor);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

}  // namespace sim
