// Operators that torch composes of others on the host, or that have kernels of their own on devices.

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include "kernels.h"

namespace sim {
namespace {

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  return gradient.mul(mask).mul(scale);
}

at::Tensor biased(const at::Tensor& x, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? x + *bias : x;
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal,
                     std::optional<double> scale, bool grouped) {
  const bool fused =
      dropout == 0 && !grouped && query.dim() == 4 && query.size(-1) == value.size(-1) &&
      (!mask || !mask->defined() || (!mask->requires_grad() && mask->scalar_type() != at::kBool));
  if (fused) {  // the host's kernel: the same bits
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal,
                                                            std::nullopt, scale, grouped));
}

// Cells of recurrent networks have kernels of their own on devices. Their last result is for the kernel's
// backward; here autograd goes through the parts.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, const at::Tensor& hidden,
                                                         const at::Tensor& cell,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
  const auto gates = biased(hidden, hidden_bias) + biased(input, input_bias);
  const auto parts = gates.chunk(4, 1);
  const auto next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input, const at::Tensor& hidden,
                                            const at::Tensor& before,
                                            const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  const auto from_input = biased(input, input_bias).chunk(3, 1);
  const auto from_hidden = biased(hidden, hidden_bias).chunk(3, 1);
  const auto reset = (from_hidden[0] + from_input[0]).sigmoid();
  const auto keep = (from_hidden[1] + from_input[1]).sigmoid();
  const auto next = (from_input[2] + from_hidden[2] * reset).tanh();
  return {(before - next) * keep + next, before};
}

// Convolutions have an entry of their own for devices that torch does not know: made on the host's side of a
// task.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  torch::jit::Stack stack{input, weight, bias, stride, padding, dilation, transposed, output_padding, groups};
  kernel(op, &stack);
  return stack.back().toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  const std::array<c10::SymInt, 1> bias{channels};
  torch::jit::Stack stack{gradient,       input,   weight,   c10::SymIntArrayRef(bias),
                          stride,         padding, dilation, transposed,
                          output_padding, groups,  mask};
  kernel(op, &stack);
  auto tensor = [](const c10::IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); };
  return {tensor(stack[0]), tensor(stack[1]), tensor(stack[2])};
}

// The host's has an `out=` whose size it decides.
at::Tensor mse_loss(const at::Tensor& input, const at::Tensor& target, int64_t reduction) {
  const auto difference = input - target;
  const auto loss = difference * difference;
  if (reduction == at::Reduction::None) return loss;
  return reduction == at::Reduction::Mean ? loss.mean() : loss.sum();
}

// The host's kernel takes real numbers alone.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  const bool real = at::isFloatingType(self.scalar_type());
  torch::jit::Stack stack{real ? self : self.to(at::kDouble), bins, low, high};
  kernel(op, &stack);
  return stack.back().toTensor().to(self.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("histc", histc);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("scaled_dot_product_attention", attention);
  m.impl("mse_loss", mse_loss);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("scaled_dot_product_attention", attention);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

}  // namespace sim
