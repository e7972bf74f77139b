// One pass over memory, which applies a rule (rules.h) to a layout (formats.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/blocks.h"
#include "kernels/formats.h"
#include "kernels/rules.h"
#include "lightning_zero/update.h"

namespace lightning_zero {
namespace {

template <class V, class Rule, class Grad, class Master, class State>
class Update {
  using First = typename Master::First;
  using Second = typename Master::Second;
  using Element = typename State::Element;

  struct Pointers {
    const Grad* grad;
    First* first;
    Second* second;  // may be null
    Element* states[kMaxStates];

    KERNEL_INLINE Pointers at(std::size_t i) const {
      Pointers moved = {grad + i, first + i, second == nullptr ? nullptr : second + i, {}};
      for (int k = 0; k < Rule::states; ++k) moved.states[k] = states[k] + i;
      return moved;
    }
  };

 public:
  Update(const typename Rule::Coefficients& coefficients, const RoundingStream& stream)
      : rule_(coefficients), random_(stream), first_index_(stream.first) {}

  void run(const UpdateArrays& a, bool stream) const {
    Pointers arrays = {static_cast<const Grad*>(a.grad), static_cast<First*>(a.param), nullptr, {}};
    void* const second = Master::streams ? a.copy_out : a.remainder;
    arrays.second = static_cast<Second*>(second);
    for (int k = 0; k < Rule::states; ++k) arrays.states[k] = static_cast<Element*>(a.states[k]);

    std::size_t i = head(second, stream);
    if (i > 0) partial(arrays, 0, i < a.count ? i : a.count);
    if (Master::streams && stream) {
      for (; i + kBlock <= a.count; i += kBlock) block(arrays.at(i), first_index_ + i, true);
    } else {
      for (; i + kBlock <= a.count; i += kBlock) block(arrays.at(i), first_index_ + i, false);
    }
    if (i < a.count) partial(arrays.at(i), i, a.count - i);
  }

 private:
  static constexpr Order kOrder = State::order;
  static constexpr std::size_t kBlock = 2 * V::width;

  // The number of elements before the first whole block. Interleaved blocks must begin at even indices, and
  // stores that bypass the caches need an aligned address; if both are not possible, `stream` becomes false.
  std::size_t head(const void* second, bool& stream) const {
    constexpr std::size_t bytes = kBlock * sizeof(Second);
    const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(second) % bytes;
    const std::size_t aligned = (bytes - misaligned) % bytes / sizeof(Second);
    const bool odd = kOrder == Order::interleaved && (first_index_ + aligned) % 2 != 0;
    const bool possible = misaligned % sizeof(Second) == 0 && !odd;
    stream = stream && Master::streams && second != nullptr && possible;
    if (stream) return aligned;
    return kOrder == Order::interleaved ? first_index_ % 2 : 0;
  }

  // Updates two vectors of elements, the first of which has this index.
  KERNEL_INLINE void block(const Pointers& at, std::size_t index, bool stream) const {
    const Pair<V> p = Master::template load<V, kOrder>(at.first, at.second);
    const Pair<V> grad = load<V, kOrder>(at.grad);
    V first[kMaxStates];
    V second[kMaxStates];
    for (int k = 0; k < Rule::states; ++k) {
      const Pair<V> state = load<V, kOrder>(at.states[k]);
      first[k] = state.first;
      second[k] = state.second;
    }
    const Pair<V> g = {rule_.advance(p.first, grad.first, first),
                       rule_.advance(p.second, grad.second, second)};
    const auto random = random_.at(index);
    for (int k = 0; k < Rule::states; ++k) {
      // The third state, amsgrad's maximum, is rounded like the second, so that equal numbers stay equal.
      const Pair<V> stored = State::template store<V>({first[k], second[k]}, at.states[k],
                                                      k == 0 ? random.first : random.second);
      first[k] = stored.first;
      second[k] = stored.second;
    }
    const Pair<V> updated = {rule_.updated(p.first, g.first, first),
                             rule_.updated(p.second, g.second, second)};
    Master::template store<kOrder>(updated, at.first, at.second, stream);
  }

  // Updates fewer elements than a block has, in a padded copy, so that they are computed like all others.
  [[gnu::noinline]] void partial(const Pointers& at, std::size_t offset, std::size_t count) const {
    // The copy of an interleaved block begins at an even index. It has room for all elements: the first ones
    // end and the last ones begin at an even index, too.
    const std::size_t lead = kOrder == Order::interleaved ? (first_index_ + offset) % 2 : 0;
    Grad grad[kBlock] = {};
    First first[kBlock] = {};
    Second second[kBlock] = {};
    Element states[kMaxStates][kBlock] = {};
    std::memcpy(grad + lead, at.grad, count * sizeof(Grad));
    std::memcpy(first + lead, at.first, count * sizeof(First));
    if (at.second != nullptr) std::memcpy(second + lead, at.second, count * sizeof(Second));
    for (int k = 0; k < Rule::states; ++k) {
      std::memcpy(states[k] + lead, at.states[k], count * sizeof(Element));
    }
    block({grad, first, second, {states[0], states[1], states[2]}}, first_index_ + offset - lead, false);
    std::memcpy(at.first, first + lead, count * sizeof(First));
    if (at.second != nullptr) std::memcpy(at.second, second + lead, count * sizeof(Second));
    for (int k = 0; k < Rule::states; ++k) {
      std::memcpy(at.states[k], states[k] + lead, count * sizeof(Element));
    }
  }

  const Rule rule_;
  const typename State::template Random<V> random_;
  const std::size_t first_index_;  // index of the first element in the stream
};

// Dispatch from the dtypes of the arrays at run time to template arguments, one dtype at a time.

template <class V, class Rule, class Grad, class Master>
void with_master(const typename Rule::Coefficients& c, const UpdateArrays& a, const RoundingStream& r,
                 bool s) {
  if constexpr (Rule::in_blocks) {
    if (a.state_dtype == DType::int8) return BlockUpdate<V, Rule, Grad, Master>(c, r).run(a, s);
  }
  if (Rule::states > 0 && a.state_dtype == DType::bfloat16) {
    Update<V, Rule, Grad, Master, BFloat16State>(c, r).run(a, s);
  } else {
    Update<V, Rule, Grad, Master, Float32State>(c, r).run(a, s);
  }
}

template <class V, class Rule, class Grad>
void with_grad(const typename Rule::Coefficients& c, const UpdateArrays& a, const RoundingStream& r, bool s) {
  if (a.param_dtype == DType::bfloat16) return with_master<V, Rule, Grad, SplitBFloat16>(c, a, r, s);
  if (a.param_dtype == DType::float16) return with_master<V, Rule, Grad, SplitFloat16>(c, a, r, s);
  if (a.copy_dtype == DType::float16) return with_master<V, Rule, Grad, WholeMaster<Float16>>(c, a, r, s);
  if (a.copy_ties == Ties::away) return with_master<V, Rule, Grad, WholeMaster<BFloat16Away>>(c, a, r, s);
  return with_master<V, Rule, Grad, WholeMaster<BFloat16>>(c, a, r, s);
}

template <class V, class Rule>
void update(const typename Rule::Coefficients& c, const UpdateArrays& a, const RoundingStream& r, bool s) {
  switch (a.grad_dtype) {
    case DType::float32:
      return with_grad<V, Rule, float>(c, a, r, s);
    case DType::bfloat16:
      return with_grad<V, Rule, BFloat16>(c, a, r, s);
    case DType::float16:
      return with_grad<V, Rule, Float16>(c, a, r, s);
    case DType::int8:
      return;  // not a dtype of gradients
  }
}

template <class V>
void adam(const AdamCoefficients& c, const UpdateArrays& a, const RoundingStream& r, bool s) {
  c.amsgrad ? update<V, AdamRule<V, true>>(c, a, r, s) : update<V, AdamRule<V, false>>(c, a, r, s);
}

template <class V>
void sgd(const SgdCoefficients& c, const UpdateArrays& a, const RoundingStream& r, bool s) {
  c.momentum == 0.0F ? update<V, SgdRule<V>>(c, a, r, s) : update<V, MomentumSgdRule<V>>(c, a, r, s);
}

}  // namespace
}  // namespace lightning_zero
