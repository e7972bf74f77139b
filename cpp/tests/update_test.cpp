// The kernels of the update rules, each on one piece.
#include "lightning_zero/update.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "problem.h"

namespace lightning_zero {
namespace {

constexpr std::size_t kLongest = 70;                                  // four of the widest vectors and a rest
const RoundingStream kRandom = {0x12345678, 0x9ABCDEF0, 0xFFFFFFF0};  // the index passes 2^32

class UpdateTest : public ::testing::TestWithParam<std::tuple<const Target*, std::string>> {
 protected:
  const Kernels& kernels() const { return std::get<0>(GetParam())->kernels; }
  const Rule& rule() const { return rule_named(std::get<1>(GetParam())); }

  void expect_as_scalar(const Problem& problem, bool stream = false) const {
    Arrays expected(problem);
    Arrays actual(problem);
    problem.rule.run_piece(kScalarKernels, expected.view(), kRandom, false);
    problem.rule.run_piece(kernels(), actual.view(), kRandom, stream);
    ASSERT_TRUE(same_arrays(expected, actual)) << problem << (stream ? ", streamed" : "");
  }
};

INSTANTIATE_TEST_SUITE_P(Targets, UpdateTest,
                         ::testing::Combine(::testing::ValuesIn(supported_targets()), ::testing::ValuesIn([] {
                                              std::vector<std::string> names;
                                              for (const Rule& rule : all_rules()) names.push_back(rule.name);
                                              return names;
                                            }())),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)->name) + "_" + std::get<1>(info.param);
                         });

TEST_P(UpdateTest, HasTheBitsOfTheScalarTarget) {
  for (const Layout& layout : kLayouts) {
    for (const DType grad : kDTypes) {
      for (const DType state : kStateDTypes) {
        for (std::size_t count = 0; count <= kLongest; ++count) {
          expect_as_scalar({rule(), layout, grad, state, count, count * 5 % 17});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(UpdateTest, StreamsAnyLengthToAnyAddress) {
  for (const Layout& layout : kLayouts) {
    for (std::size_t count = 0; count <= kLongest; ++count) {
      for (std::size_t offset = count % 3; offset < 16; offset += 3) {
        expect_as_scalar({rule(), layout, DType::bfloat16, DType::float32, count, offset}, true);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(UpdateTest, ComputesTheRule) {
  Arrays arrays({rule(), kLayouts[0], DType::float32, DType::float32, kLongest, 1});
  std::vector<double> params;
  std::vector<std::array<double, kMaxStates>> states(kLongest);
  for (std::size_t i = 0; i < kLongest; ++i) {
    const auto number = [i](int k) { return static_cast<float>(std::sin(7.0 * static_cast<double>(i) + k)); };
    arrays.param.set_bits(i, bits_of(number(0)));
    arrays.grad.set_bits(i, bits_of(number(1)));
    double p = number(0);
    for (int k = 0; k < rule().states; ++k) {
      arrays.states[k]->set_bits(i, bits_of(std::abs(number(2 + k))));
      states[i][k] = std::abs(number(2 + k));
    }
    rule().reference(p, number(1), states[i].data());
    params.push_back(p);
  }
  rule().run_piece(kernels(), arrays.view(), kRandom, false);
  for (std::size_t i = 0; i < kLongest; ++i) {
    // The terms of Lion's direction cancel only near an optimum; none of the numbers above is so close to
    // one.
    EXPECT_NEAR(float_of(arrays.param.bits(i)), params[i], 1e-6) << "element " << i;
    for (int k = 0; k < rule().states; ++k) {
      EXPECT_NEAR(float_of(arrays.states[k]->bits(i)), states[i][k], 1e-6)
          << "element " << i << " state " << k;
    }
  }
}

class LayoutTest : public ::testing::TestWithParam<const Target*> {};
INSTANTIATE_TEST_SUITE_P(Targets, LayoutTest, ::testing::ValuesIn(supported_targets()), target_name);

constexpr std::size_t kMany = 20011;

TEST_P(LayoutTest, CopyIsTheNearestNumber) {
  for (const Layout& layout : kLayouts) {
    if (!layout.copies) continue;
    const Problem problem{rule_named("Sgd"), layout, DType::float32, DType::float32, kMany, 3};
    for (const bool stream : {false, true}) {
      Arrays arrays(problem);
      problem.rule.run_piece(GetParam()->kernels, arrays.view(), kRandom, stream);
      for (std::size_t i = 0; i < kMany; ++i) {
        const float p = float_of(arrays.param.bits(i));
        const double expected = nearest(layout.copy, p, layout.ties);
        ASSERT_TRUE(same_value(decode(layout.copy, arrays.copy.bits(i)), expected))
            << layout.name << ' ' << p;
        if (std::isnan(p) && layout.copy == DType::bfloat16) {
          ASSERT_EQ(arrays.copy.bits(i), 0x7FC0U);
        }
      }
    }
  }
}

TEST_P(LayoutTest, SplitMasterIsUpdatedAsTheWholeOne) {
  for (const Layout& layout : kLayouts) {
    if (layout.param == DType::float32) continue;
    for (const Rule& rule : all_rules()) {
      Arrays split({rule, layout, DType::float32, DType::bfloat16, kMany, 1});
      Arrays whole({rule, kLayouts[0], DType::float32, DType::bfloat16, kMany, 1});
      SplitArrays both{whole.param.as<float>(), split.param.data(), layout.param,
                       split.remainder.as<std::int16_t>(), kMany};
      GetParam()->kernels.join(both);
      rule.run_piece(GetParam()->kernels, split.view(), kRandom, false);
      rule.run_piece(GetParam()->kernels, whole.view(), kRandom, false);

      Buffer high(2, kMany);
      Buffer remainder(2, kMany);
      both.high = high.data();
      both.remainder = remainder.as<std::int16_t>();
      GetParam()->kernels.split(both);
      EXPECT_TRUE(same_numbers(layout.param, split.param, high)) << rule.name << ' ' << layout.name;
      EXPECT_EQ(std::memcmp(split.remainder.data(), remainder.data(), remainder.bytes()), 0)
          << rule.name << ' ' << layout.name;
    }
  }
}

TEST_P(LayoutTest, BFloat16StateIsANeighbourAndRightInTheMean) {
  const Rule& rule = rule_named("AdamAmsgradL2SmallBeta1");
  Arrays rounded({rule, kLayouts[0], DType::float32, DType::bfloat16, kMany, 0});
  Arrays exact({rule, kLayouts[0], DType::float32, DType::float32, kMany, 0});
  for (std::size_t i = 0; i < kMany; ++i) {
    for (int k = 0; k < 3; ++k) exact.states[k]->set_bits(i, rounded.states[k]->bits(i) << 16);
  }
  rule.run_piece(GetParam()->kernels, rounded.view(), kRandom, false);
  rule.run_piece(GetParam()->kernels, exact.view(), kRandom, false);
  // Not the third state, which is the maximum of a rounded and an exact number.
  for (int k = 0; k < 2; ++k) {
    double sum = 0.0;
    int inexact = 0;
    for (std::size_t i = 0; i < kMany; ++i) {
      const double x = float_of(exact.states[k]->bits(i));
      const double stored = decode(DType::bfloat16, rounded.states[k]->bits(i));
      const double unit = unit_of(DType::bfloat16, std::isfinite(x) ? x : 0.0);
      if (!std::isfinite(x) || std::isinf(stored)) continue;
      ASSERT_LT(std::abs(stored - x), unit) << "element " << i << " state " << k;
      if (stored != x) {
        sum += (stored - x) / unit;
        ++inexact;
      }
    }
    // The limit is five standard deviations of errors that are uniform in the worst case.
    ASSERT_GT(inexact, 5000);
    EXPECT_LT(std::abs(sum), 5.0 * std::sqrt(inexact / 4.0)) << "state " << k;
  }
}

}  // namespace
}  // namespace lightning_zero
