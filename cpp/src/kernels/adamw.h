// AdamW in one pass over memory, written once for every vector type V.
//
// Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), and Kingma and Ba, "Adam" (2015),
// with the operations and roundings of torch.optim's single-tensor CPU path. Internal linkage, because each
// target compiles this file with flags of its own; for the same reason no inline function of the standard
// library is called here.
#pragma once

#include <cstddef>
#include <cstring>

#include "lightning_zero/adamw.h"
#include "simd/types.h"

namespace lightning_zero {
namespace {

template <class V>
struct AdamWStep {
  const V grad_scale, decay, l2, lerp_weight, beta2, one_minus_beta2, sqrt_bias_correction2, eps,
      negative_step_size;
  const bool has_l2, lerp_from_gradient;

  explicit AdamWStep(const AdamWCoefficients& c)
      : grad_scale(V::broadcast(c.grad_scale)),
        decay(V::broadcast(c.decay)),
        l2(V::broadcast(c.l2)),
        lerp_weight(V::broadcast(c.lerp_weight)),
        beta2(V::broadcast(c.beta2)),
        one_minus_beta2(V::broadcast(c.one_minus_beta2)),
        sqrt_bias_correction2(V::broadcast(c.sqrt_bias_correction2)),
        eps(V::broadcast(c.eps)),
        negative_step_size(V::broadcast(c.negative_step_size)),
        has_l2(c.l2 != 0.0F),
        lerp_from_gradient(c.lerp_from_gradient) {}

  // One vector; `copy` may be null.
  template <class Grad, class Copy>
  void update(float* param, float* exp_avg, float* exp_avg_sq, const Grad* grad, Copy* copy) const {
    V p = V::load(param) * decay;
    V g = V::load(grad) * grad_scale;
    if (has_l2) g = fma(p, l2, g);

    V m = V::load(exp_avg);
    m = fma(lerp_weight, g - m, lerp_from_gradient ? g : m);
    const V v = fma(one_minus_beta2 * g, g, V::load(exp_avg_sq) * beta2);
    const V denominator = sqrt(v) / sqrt_bias_correction2 + eps;
    p = p + negative_step_size * m / denominator;

    m.store(exp_avg);
    v.store(exp_avg_sq);
    p.store(param);
    if (copy != nullptr) p.store(copy);
  }
};

// The last elements go through a full vector of padding, so that a tail is rounded as everything else.
template <class V, class Grad, class Copy>
void adamw_tail(const AdamWStep<V>& step, float* param, float* exp_avg, float* exp_avg_sq, const Grad* grad,
                Copy* copy, std::size_t count) {
  float p[V::width] = {};
  float m[V::width] = {};
  float v[V::width] = {};
  Grad g[V::width] = {};
  Copy c[V::width] = {};
  std::memcpy(p, param, count * sizeof(float));
  std::memcpy(m, exp_avg, count * sizeof(float));
  std::memcpy(v, exp_avg_sq, count * sizeof(float));
  std::memcpy(g, grad, count * sizeof(Grad));
  step.update(p, m, v, g, c);
  std::memcpy(param, p, count * sizeof(float));
  std::memcpy(exp_avg, m, count * sizeof(float));
  std::memcpy(exp_avg_sq, v, count * sizeof(float));
  if (copy != nullptr) std::memcpy(copy, c, count * sizeof(Copy));
}

template <class V, class Grad, class Copy>
void adamw_loop(const AdamWCoefficients& coefficients, const AdamWArrays& a) {
  const AdamWStep<V> step(coefficients);
  const auto* grad = static_cast<const Grad*>(a.grad);
  auto* copy = static_cast<Copy*>(a.copy_out);
  std::size_t i = 0;
  for (; i + V::width <= a.count; i += V::width) {
    step.update(a.param + i, a.exp_avg + i, a.exp_avg_sq + i, grad + i, copy == nullptr ? nullptr : copy + i);
  }
  if (i < a.count) {
    adamw_tail(step, a.param + i, a.exp_avg + i, a.exp_avg_sq + i, grad + i,
               copy == nullptr ? nullptr : copy + i, a.count - i);
  }
}

template <class V, class Grad>
void adamw_with_grad(const AdamWCoefficients& coefficients, const AdamWArrays& arrays) {
  if (arrays.copy_dtype == DType::float16) {
    adamw_loop<V, Grad, Float16>(coefficients, arrays);
  } else {
    adamw_loop<V, Grad, BFloat16>(coefficients, arrays);
  }
}

template <class V>
void adamw(const AdamWCoefficients& coefficients, const AdamWArrays& arrays) {
  switch (arrays.grad_dtype) {
    case DType::float32:
      return adamw_with_grad<V, float>(coefficients, arrays);
    case DType::bfloat16:
      return adamw_with_grad<V, BFloat16>(coefficients, arrays);
    case DType::float16:
      return adamw_with_grad<V, Float16>(coefficients, arrays);
  }
}

}  // namespace
}  // namespace lightning_zero
