#include "lightning_zero/update.h"

#ifdef LIGHTNING_ZERO_X86
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "lightning_zero/blocks.h"
#include "lightning_zero/floating_point.h"
#include "lightning_zero/thread_pool.h"

namespace lightning_zero {
namespace {

// The smallest number of elements in a piece: large enough to be worth waking a thread up, small enough to
// balance the load. A multiple of a block, and so of a cache line.
constexpr std::size_t kSmallest = std::size_t{1} << 16;
constexpr std::size_t kLargest = std::size_t{1} << 20;
constexpr std::size_t kPiecesPerThread = 4;

// From this number of elements on, a copy would not stay in the caches until it is read, so stores bypass
// them.
constexpr std::size_t kStream = std::size_t{1} << 22;

std::size_t piece_length(std::size_t count, std::size_t threads) {
  const std::size_t even = count / threads / kPiecesPerThread / kBlockLength * kBlockLength;
  return std::clamp(even, kSmallest, kLargest);
}

template <class T>
T* advance(T* array, DType dtype, std::size_t elements) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return array == nullptr ? nullptr : static_cast<Byte*>(array) + elements * item_size(dtype);
}

// The part [start, start + count) of `a`, whose first element is element `lead` of its block.
UpdateArrays slice(const UpdateArrays& a, std::size_t start, std::size_t count, std::size_t lead) {
  UpdateArrays part = a;
  part.param = advance(a.param, a.param_dtype, start);
  part.remainder = a.remainder == nullptr ? nullptr : a.remainder + start;
  part.copy_out = advance(a.copy_out, a.copy_dtype, start);
  part.grad = advance(a.grad, a.grad_dtype, start);
  for (std::size_t k = 0; k < kMaxStates; ++k) {
    part.states[k] = advance(a.states[k], a.state_dtype, start);
    if (a.scales[k] != nullptr) part.scales[k] = a.scales[k] + (lead + start) / kBlockLength;
  }
  part.count = count;
  return part;
}

// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

RoundingStream stream_at(const RoundingKey& key, std::uint64_t index) {
  const std::uint64_t mixed = splitmix64(splitmix64(splitmix64(key.seed) ^ key.step) ^ (index >> 32));
  return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32),
          static_cast<std::uint32_t>(index)};
}

}  // namespace

template <class Coefficients>
void update_parallel(UpdateFunction<Coefficients> update, const Coefficients& coefficients,
                     const UpdateArrays& arrays, const RoundingKey& key, std::size_t threads) {
  const std::size_t length = piece_length(arrays.count, threads);
  const bool stream = arrays.count >= kStream;
  // Pieces begin at the borders of blocks.
  const std::size_t lead = arrays.state_dtype == DType::int8 ? key.index % kBlockLength : 0;
  const std::size_t all = arrays.count == 0 ? 0 : lead + arrays.count;
  parallel_for((all + length - 1) / length, threads, [&](std::size_t i) {
    const DefaultFloatingPoint environment;
    const std::size_t stop = std::min(all, (i + 1) * length) - lead;
    for (std::size_t start = std::max(i * length, lead) - lead; start < stop;) {
      const std::uint64_t index = key.index + start;
      const std::uint64_t same_stream = (std::uint64_t{1} << 32) - (index & 0xFFFFFFFFU);
      const std::size_t count = std::min<std::uint64_t>(stop - start, same_stream);
      update(coefficients, slice(arrays, start, count, lead), stream_at(key, index), stream);
      start += count;
    }
#ifdef LIGHTNING_ZERO_X86
    if (stream)
      _mm_sfence();  // orders the streamed stores before the store that tells others that the piece is done
#endif
  });
}

#define LIGHTNING_ZERO_INSTANTIATE(Coefficients)                                                        \
  template void update_parallel(UpdateFunction<Coefficients>, const Coefficients&, const UpdateArrays&, \
                                const RoundingKey&, std::size_t)
LIGHTNING_ZERO_INSTANTIATE(AdamCoefficients);
LIGHTNING_ZERO_INSTANTIATE(AdagradCoefficients);
LIGHTNING_ZERO_INSTANTIATE(LionCoefficients);
LIGHTNING_ZERO_INSTANTIATE(SgdCoefficients);
#undef LIGHTNING_ZERO_INSTANTIATE

AdamCoefficients adam_coefficients(double lr, double beta1, double beta2, double eps, double weight_decay,
                                   std::int64_t step, double grad_scale, bool decoupled, bool amsgrad) {
  const DefaultFloatingPoint environment;  // here and below, since a coefficient may be subnormal
  const double t = static_cast<double>(step);
  const double bias_correction1 = 1.0 - std::pow(beta1, t);
  const double bias_correction2 = 1.0 - std::pow(beta2, t);
  const float weight = static_cast<float>(1.0 - beta1);

  AdamCoefficients c{};
  c.grad_scale = static_cast<float>(grad_scale);
  c.l2 = decoupled ? 0.0F : static_cast<float>(weight_decay);
  c.decay = decoupled ? static_cast<float>(-(lr * weight_decay)) : 0.0F;
  c.lerp_from_gradient = weight >= 0.5F;
  c.lerp_weight = c.lerp_from_gradient ? weight - 1.0F : weight;
  c.beta2 = static_cast<float>(beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  c.eps = static_cast<float>(eps * std::sqrt(bias_correction2));
  c.negative_step_size = static_cast<float>(-(lr / bias_correction1) * std::sqrt(bias_correction2));
  c.amsgrad = amsgrad;
  return c;
}

AdagradCoefficients adagrad_coefficients(double lr, double lr_decay, double eps, double weight_decay,
                                         std::int64_t step, double grad_scale) {
  const DefaultFloatingPoint environment;
  AdagradCoefficients c{};
  c.grad_scale = static_cast<float>(grad_scale);
  c.l2 = static_cast<float>(weight_decay);
  c.eps = static_cast<float>(eps);
  c.negative_lr = static_cast<float>(-(lr / (1.0 + static_cast<double>(step - 1) * lr_decay)));
  return c;
}

LionCoefficients lion_coefficients(double lr, double beta1, double beta2, double weight_decay,
                                   double grad_scale) {
  const DefaultFloatingPoint environment;
  LionCoefficients c{};
  c.grad_scale = static_cast<float>(grad_scale);
  c.decay = static_cast<float>(-(lr * weight_decay));
  c.beta1 = static_cast<float>(beta1);
  c.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  c.beta2 = static_cast<float>(beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  c.negative_lr = static_cast<float>(-lr);
  return c;
}

SgdCoefficients sgd_coefficients(double lr, double momentum, double dampening, bool nesterov,
                                 double weight_decay, bool first, double grad_scale) {
  const DefaultFloatingPoint environment;
  SgdCoefficients c{};
  c.grad_scale = static_cast<float>(grad_scale);
  c.l2 = static_cast<float>(weight_decay);
  c.momentum = static_cast<float>(momentum);
  c.one_minus_dampening = static_cast<float>(1.0 - dampening);
  c.negative_lr = static_cast<float>(-lr);
  c.nesterov = nesterov;
  c.first = first;
  return c;
}

}  // namespace lightning_zero
