// The update rules, written once for all vector types V. They use the operations of torch.optim's
// single-tensor CPU path in the same order (with a fused multiply-add where a build of torch with FMA has
// one), with two exceptions. First, decoupled weight decay is part of the update instead of a separate change
// of the parameter, so that the parameter is rounded once per step, and a decay that is small compared with 1
// keeps its precision. Second, Adam's correction of the second moment is part of the coefficients, which
// saves a division per element.
//
// A rule has two parts, because the state may be stored and rounded in between: `advance` changes the state
// and may replace the gradient by a value that the second part needs; `updated` returns the new parameter.
// `in_blocks` tells whether the state may be stored in 8 bits (blocks.h).
#pragma once

#include "kernels/formats.h"
#include "lightning_zero/update.h"

namespace lightning_zero {
namespace {

// p + update + decay * p
template <class V>
KERNEL_INLINE V with_decay(V p, V update, V decay, bool decays) {
  return p + (decays ? fma(p, decay, update) : update);
}

// Sources: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015); Loshchilov and Hutter,
// "Decoupled Weight Decay Regularization" (2019); amsgrad: Reddi, Kale and Kumar, "On the Convergence of Adam
// and Beyond" (2018).
template <class V, bool kAmsgrad>
struct AdamRule {
  using Coefficients = AdamCoefficients;
  static constexpr int states = kAmsgrad ? 3 : 2;  // exp_avg, exp_avg_sq, max_exp_avg_sq
  static constexpr bool in_blocks = !kAmsgrad;

  const V grad_scale, l2, decay, lerp_weight, beta2, one_minus_beta2, eps, negative_step_size;
  const bool has_l2, decays, lerp_from_gradient;

  explicit AdamRule(const AdamCoefficients& c)
      : grad_scale(V::broadcast(c.grad_scale)),
        l2(V::broadcast(c.l2)),
        decay(V::broadcast(c.decay)),
        lerp_weight(V::broadcast(c.lerp_weight)),
        beta2(V::broadcast(c.beta2)),
        one_minus_beta2(V::broadcast(c.one_minus_beta2)),
        eps(V::broadcast(c.eps)),
        negative_step_size(V::broadcast(c.negative_step_size)),
        has_l2(c.l2 != 0.0F),
        decays(c.decay != 0.0F),
        lerp_from_gradient(c.lerp_from_gradient) {}

  KERNEL_INLINE V advance(V p, V grad, V (&state)[kMaxStates]) const {
    V g = grad * grad_scale;
    if (has_l2) g = fma(p, l2, g);
    const V m = state[0];
    state[0] = fma(lerp_weight, g - m, lerp_from_gradient ? g : m);
    state[1] = fma(one_minus_beta2 * g, g, state[1] * beta2);
    if (kAmsgrad) state[states - 1] = maximum(state[states - 1], state[1]);
    return g;
  }

  KERNEL_INLINE V updated(V p, V, const V (&state)[kMaxStates]) const {
    return with_decay(p, negative_step_size * state[0] / (sqrt(state[states - 1]) + eps), decay, decays);
  }
};

// Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
// Optimization" (2011).
template <class V>
struct AdagradRule {
  using Coefficients = AdagradCoefficients;
  static constexpr int states = 1;  // sum
  static constexpr bool in_blocks = false;

  const V grad_scale, l2, eps, negative_lr;
  const bool has_l2;

  explicit AdagradRule(const AdagradCoefficients& c)
      : grad_scale(V::broadcast(c.grad_scale)),
        l2(V::broadcast(c.l2)),
        eps(V::broadcast(c.eps)),
        negative_lr(V::broadcast(c.negative_lr)),
        has_l2(c.l2 != 0.0F) {}

  KERNEL_INLINE V advance(V p, V grad, V (&state)[kMaxStates]) const {
    V g = grad * grad_scale;
    if (has_l2) g = fma(p, l2, g);
    state[0] = fma(g, g, state[0]);
    return g;
  }

  KERNEL_INLINE V updated(V p, V g, const V (&state)[kMaxStates]) const {
    return p + negative_lr * g / (sqrt(state[0]) + eps);
  }
};

// Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023).
template <class V>
struct LionRule {
  using Coefficients = LionCoefficients;
  static constexpr int states = 1;  // exp_avg
  static constexpr bool in_blocks = true;

  const V grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, negative_lr;
  const bool decays;

  explicit LionRule(const LionCoefficients& c)
      : grad_scale(V::broadcast(c.grad_scale)),
        decay(V::broadcast(c.decay)),
        beta1(V::broadcast(c.beta1)),
        one_minus_beta1(V::broadcast(c.one_minus_beta1)),
        beta2(V::broadcast(c.beta2)),
        one_minus_beta2(V::broadcast(c.one_minus_beta2)),
        negative_lr(V::broadcast(c.negative_lr)),
        decays(c.decay != 0.0F) {}

  KERNEL_INLINE V advance(V, V grad, V (&state)[kMaxStates]) const {
    const V g = grad * grad_scale;
    const V direction = sign(fma(g, one_minus_beta1, state[0] * beta1));
    state[0] = fma(g, one_minus_beta2, state[0] * beta2);
    return direction;
  }

  KERNEL_INLINE V updated(V p, V direction, const V (&)[kMaxStates]) const {
    return with_decay(p, negative_lr * direction, decay, decays);
  }
};

// Stochastic gradient descent with Polyak's or Nesterov's momentum, in the form of torch.optim.SGD. Source:
// Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013).
template <class V>
struct MomentumSgdRule {
  using Coefficients = SgdCoefficients;
  static constexpr int states = 1;  // momentum_buffer
  static constexpr bool in_blocks = false;

  const V grad_scale, l2, momentum, one_minus_dampening, negative_lr;
  const bool has_l2, nesterov, first;

  explicit MomentumSgdRule(const SgdCoefficients& c)
      : grad_scale(V::broadcast(c.grad_scale)),
        l2(V::broadcast(c.l2)),
        momentum(V::broadcast(c.momentum)),
        one_minus_dampening(V::broadcast(c.one_minus_dampening)),
        negative_lr(V::broadcast(c.negative_lr)),
        has_l2(c.l2 != 0.0F),
        nesterov(c.nesterov),
        first(c.first) {}

  KERNEL_INLINE V advance(V p, V grad, V (&state)[kMaxStates]) const {
    V g = grad * grad_scale;
    if (has_l2) g = fma(p, l2, g);
    state[0] = first ? g : fma(g, one_minus_dampening, state[0] * momentum);
    return g;
  }

  KERNEL_INLINE V updated(V p, V g, const V (&state)[kMaxStates]) const {
    return fma(nesterov ? fma(state[0], momentum, g) : state[0], negative_lr, p);
  }
};

// Stochastic gradient descent without momentum, which has no state.
template <class V>
struct SgdRule {
  using Coefficients = SgdCoefficients;
  static constexpr int states = 0;
  static constexpr bool in_blocks = false;

  const V grad_scale, l2, negative_lr;
  const bool has_l2;

  explicit SgdRule(const SgdCoefficients& c)
      : grad_scale(V::broadcast(c.grad_scale)),
        l2(V::broadcast(c.l2)),
        negative_lr(V::broadcast(c.negative_lr)),
        has_l2(c.l2 != 0.0F) {}

  KERNEL_INLINE V advance(V p, V grad, V (&)[kMaxStates]) const {
    const V g = grad * grad_scale;
    return has_l2 ? fma(p, l2, g) : g;
  }

  KERNEL_INLINE V updated(V p, V g, const V (&)[kMaxStates]) const { return fma(g, negative_lr, p); }
};

}  // namespace
}  // namespace lightning_zero
