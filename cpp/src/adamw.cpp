#include "lightning_zero/adamw.h"

#include <algorithm>
#include <cmath>

#include "lightning_zero/thread_pool.h"

namespace lightning_zero {
namespace {

// Elements of a piece: small enough to share out evenly, large enough for a wake-up to pay. Whole cache
// lines.
constexpr std::size_t kSmallest = std::size_t{1} << 16;
constexpr std::size_t kLargest = std::size_t{1} << 20;
constexpr std::size_t kLine = 64;
constexpr std::size_t kPiecesPerThread = 4;

std::size_t piece_length(std::size_t count, std::size_t threads) {
  const std::size_t even = count / (threads * kPiecesPerThread) / kLine * kLine;
  return std::clamp(even, kSmallest, kLargest);
}

std::size_t bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

AdamWArrays slice(const AdamWArrays& a, std::size_t start, std::size_t count) {
  AdamWArrays part = a;
  part.param += start;
  part.exp_avg += start;
  part.exp_avg_sq += start;
  part.grad = static_cast<const char*>(a.grad) + start * bytes(a.grad_dtype);
  if (a.copy_out != nullptr) part.copy_out = static_cast<char*>(a.copy_out) + start * bytes(a.copy_dtype);
  part.count = count;
  return part;
}

}  // namespace

void adamw_parallel(AdamWFunction update, const AdamWCoefficients& coefficients, const AdamWArrays& arrays,
                    std::size_t threads) {
  const std::size_t length = piece_length(arrays.count, threads);
  parallel_for((arrays.count + length - 1) / length, threads, [&](std::size_t i) {
    const std::size_t start = i * length;
    update(coefficients, slice(arrays, start, std::min(length, arrays.count - start)));
  });
}

AdamWCoefficients adamw_coefficients(const AdamWHyperparameters& h) {
  const double step = static_cast<double>(h.step);
  const double bias_correction1 = 1.0 - std::pow(h.beta1, step);
  const double bias_correction2 = 1.0 - std::pow(h.beta2, step);
  const float weight = static_cast<float>(1.0 - h.beta1);

  AdamWCoefficients c{};
  c.grad_scale = static_cast<float>(h.grad_scale);
  c.decay = h.decoupled ? static_cast<float>(1.0 - h.lr * h.weight_decay) : 1.0F;
  c.l2 = h.decoupled ? 0.0F : static_cast<float>(h.weight_decay);
  c.lerp_from_gradient = weight >= 0.5F;
  c.lerp_weight = c.lerp_from_gradient ? weight - 1.0F : weight;
  c.beta2 = static_cast<float>(h.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  c.sqrt_bias_correction2 = static_cast<float>(std::pow(bias_correction2, 0.5));
  c.eps = static_cast<float>(h.eps);
  c.negative_step_size = static_cast<float>(-(h.lr / bias_correction1));
  return c;
}

}  // namespace lightning_zero
