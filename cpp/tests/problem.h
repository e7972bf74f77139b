// Optimizer steps for tests: a rule, and arrays in one of the layouts.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "lightning_zero/dispatch.h"
#include "numbers.h"

namespace lightning_zero {

// An update rule with its coefficients, for any target.
struct Rule {
  std::string name;
  int states;
  std::function<void(const Kernels&, const UpdateArrays&, const RoundingStream&, bool stream)> run_piece;
  std::function<void(const Kernels&, const UpdateArrays&, const RoundingKey&, std::size_t threads)> run;
  // Computes the step in double: changes the parameter and the states.
  std::function<void(double& p, double g, double* state)> reference;
};

template <class Coefficients>
Rule make_rule(std::string name, int states, UpdateFunction<Coefficients> Kernels::* kernel,
               const Coefficients& c, std::function<void(double&, double, double*)> reference) {
  return {std::move(name), states,
          [=](const Kernels& kernels, const UpdateArrays& arrays, const RoundingStream& random, bool stream) {
            (kernels.*kernel)(c, arrays, random, stream);
          },
          [=](const Kernels& kernels, const UpdateArrays& arrays, const RoundingKey& key,
              std::size_t threads) { update_parallel(kernels.*kernel, c, arrays, key, threads); },
          std::move(reference)};
}

// The rules, with every branch of each.
inline const std::vector<Rule>& all_rules() {
  const auto adam = [](std::string name, double beta1, double weight_decay, bool decoupled, bool amsgrad) {
    constexpr double lr = 0.01, beta2 = 0.999, eps = 1e-8, scale = 0.5;
    constexpr int step = 3;
    return make_rule(std::move(name), amsgrad ? 3 : 2, &Kernels::adam,
                     adam_coefficients(lr, beta1, beta2, eps, weight_decay, step, scale, decoupled, amsgrad),
                     [=](double& p, double g, double* s) {
                       g *= scale;
                       if (decoupled) {
                         p *= 1 - lr * weight_decay;  // of the parameter before the step
                       } else {
                         g += weight_decay * p;
                       }
                       s[0] = beta1 * s[0] + (1 - beta1) * g;
                       s[1] = beta2 * s[1] + (1 - beta2) * g * g;
                       if (amsgrad) s[2] = std::max(s[2], s[1]);
                       const double corrected = std::sqrt(s[amsgrad ? 2 : 1] / (1 - std::pow(beta2, step)));
                       p -= lr / (1 - std::pow(beta1, step)) * s[0] / (corrected + eps);
                     });
  };
  const auto adagrad = [] {
    return make_rule("Adagrad", 1, &Kernels::adagrad, adagrad_coefficients(0.1, 0.01, 1e-10, 0.1, 5, -2.0),
                     [](double& p, double g, double* s) {
                       g = -2.0 * g + 0.1 * p;
                       s[0] += g * g;
                       p -= 0.1 / 1.04 * g / (std::sqrt(s[0]) + 1e-10);
                     });
  };
  const auto lion = [](std::string name, double weight_decay) {
    return make_rule(std::move(name), 1, &Kernels::lion,
                     lion_coefficients(0.01, 0.9, 0.99, weight_decay, 1.0),
                     [=](double& p, double g, double* s) {
                       const double direction = 0.9 * s[0] + 0.1 * g;
                       p = p * (1 - 0.01 * weight_decay) - 0.01 * ((direction > 0) - (direction < 0));
                       s[0] = 0.99 * s[0] + 0.01 * g;
                     });
  };
  const auto sgd = [](std::string name, double momentum, bool nesterov, double weight_decay, bool first) {
    const double dampening = nesterov ? 0.0 : 0.25;
    return make_rule(std::move(name), momentum == 0.0 ? 0 : 1, &Kernels::sgd,
                     sgd_coefficients(0.1, momentum, dampening, nesterov, weight_decay, first, 0.5),
                     [=](double& p, double g, double* s) {
                       g = 0.5 * g + weight_decay * p;
                       if (momentum != 0.0) {
                         s[0] = first ? g : momentum * s[0] + (1 - dampening) * g;
                         g = nesterov ? g + momentum * s[0] : s[0];
                       }
                       p -= 0.1 * g;
                     });
  };
  static const std::vector<Rule> rules = {
      adam("AdamW", 0.9, 0.1, true, false),
      adam("AdamAmsgradL2SmallBeta1", 0.25, 0.1, false, true),
      adagrad(),
      lion("Lion", 0.0),
      lion("LionDecay", 0.1),
      sgd("Sgd", 0.0, false, 0.1, false),
      sgd("SgdMomentumFirst", 0.9, false, 0.0, true),
      sgd("SgdMomentum", 0.9, false, 0.0, false),
      sgd("SgdNesterov", 0.9, true, 0.1, false),
  };
  return rules;
}

inline const Rule& rule_named(const std::string& name) {
  for (const Rule& rule : all_rules()) {
    if (rule.name == name) return rule;
  }
  throw std::invalid_argument(name);
}

struct Layout {
  const char* name;
  DType param;  // 16 bit: split
  bool copies;
  DType copy;
  Ties ties;
};

constexpr Layout kLayouts[] = {
    {"Whole", DType::float32, false, DType::bfloat16, Ties::even},
    {"WholeWithBFloat16", DType::float32, true, DType::bfloat16, Ties::even},
    {"WholeWithBFloat16Away", DType::float32, true, DType::bfloat16, Ties::away},
    {"WholeWithFloat16", DType::float32, true, DType::float16, Ties::even},
    {"SplitBFloat16", DType::bfloat16, false, DType::bfloat16, Ties::even},
    {"SplitFloat16", DType::float16, false, DType::float16, Ties::even},
};
constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16};
constexpr DType kStateDTypes[] = {DType::float32, DType::bfloat16};

struct Problem {
  const Rule& rule;
  Layout layout;
  DType grad;
  DType state;
  std::size_t count;
  std::size_t offset;  // of the arrays from an aligned address, in elements; it differs between the arrays
};

inline std::ostream& operator<<(std::ostream& out, const Problem& p) {
  return out << p.rule.name << ' ' << p.layout.name << ", gradient " << name_of(p.grad) << ", states "
             << name_of(p.state) << ", " << p.count << " elements, offset " << p.offset;
}

// The arrays of a problem, filled with samples that depend on the problem only.
class Arrays {
 public:
  explicit Arrays(const Problem& problem)
      : problem_(problem),
        param(item_size(problem.layout.param), problem.count, problem.offset),
        remainder(2, problem.layout.param == DType::float32 ? 0 : problem.count, 3 * problem.offset),
        copy(2, problem.layout.copies ? problem.count : 0, problem.offset),
        grad(item_size(problem.grad), problem.count, 2 * problem.offset) {
    const std::size_t seed = problem.count + 100 * problem.offset;
    fill_with_samples(param, problem.layout.param, seed);
    fill_with_samples(remainder, DType::bfloat16, seed + 1);  // any 16 bits are a valid distance
    fill_with_samples(grad, problem.grad, seed + 2);
    for (int k = 0; k < problem.rule.states; ++k) {
      states[k] = std::make_unique<Buffer>(item_size(problem.state), problem.count, problem.offset + k + 1);
      // Sums of squares are not negative.
      const std::uint32_t all_but_sign = problem.state == DType::float32 ? 0x7FFFFFFFU : 0x7FFFU;
      const bool squares = k > 0 || problem.rule.name == "Adagrad";
      fill_with_samples(*states[k], problem.state, seed + 3 + k, squares ? all_but_sign : 0xFFFFFFFFU);
    }
  }

  UpdateArrays view() {
    const bool split = problem_.layout.param != DType::float32;
    UpdateArrays a{param.data(),
                   problem_.layout.param,
                   split ? remainder.as<std::int16_t>() : nullptr,
                   problem_.layout.copies ? copy.data() : nullptr,
                   problem_.layout.copy,
                   problem_.layout.ties,
                   grad.data(),
                   problem_.grad,
                   {},
                   problem_.state,
                   problem_.count};
    for (int k = 0; k < problem_.rule.states; ++k) a.states[k] = states[k]->data();
    return a;
  }

  friend ::testing::AssertionResult same_arrays(const Arrays& a, const Arrays& b) {
    const auto labelled = [](const char* name, ::testing::AssertionResult result) {
      return result ? result : result << " in " << name;
    };
    auto result = labelled("param", same_numbers(a.problem_.layout.param, a.param, b.param));
    // A remainder is an integer, so different bits are different numbers.
    if (result && std::memcmp(a.remainder.data(), b.remainder.data(), a.remainder.bytes()) != 0) {
      result = ::testing::AssertionFailure() << "the remainders differ";
    }
    if (result) result = labelled("copy", same_numbers(a.problem_.layout.copy, a.copy, b.copy));
    for (int k = 0; k < a.problem_.rule.states && result; ++k) {
      result = labelled("a state", same_numbers(a.problem_.state, *a.states[k], *b.states[k]));
    }
    return result;
  }

 private:
  const Problem problem_;

 public:
  Buffer param, remainder, copy, grad;
  std::array<std::unique_ptr<Buffer>, kMaxStates> states;
};

}  // namespace lightning_zero
