// Functions that divide arrays among threads: the result depends neither on the number of threads nor on the
// caller.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "buffer.h"
#include "environments.h"
#include "numbers.h"
#include "problem.h"

namespace lightning_zero {
namespace {

constexpr std::size_t kSeveralPieces = (std::size_t{5} << 16) + 77;
constexpr std::size_t kStreamed = (std::size_t{1} << 22) + 4099;  // long enough for streaming stores
constexpr std::size_t kPastStreams = 1000;  // elements before the upper half of an index changes
const RoundingKey kKey = {42, 7, (std::uint64_t{3} << 32) - kPastStreams};

class ParallelTest : public ::testing::TestWithParam<const Target*> {
 protected:
  const Kernels& kernels() const { return GetParam()->kernels; }
};
INSTANTIATE_TEST_SUITE_P(Targets, ParallelTest, ::testing::ValuesIn(supported_targets()), target_name);

TEST_P(ParallelTest, UpdateDoesNotDependOnTheThreads) {
  for (const Layout& layout : kLayouts) {
    const Problem problem{rule_named("AdamW"), layout, DType::bfloat16, DType::bfloat16, kSeveralPieces, 1};
    Arrays expected(problem);
    problem.rule.run(kernels(), expected.view(), kKey, 1);
    for (const std::size_t threads : {std::size_t{2}, std::size_t{3}, std::size_t{7}, SIZE_MAX / 4 + 1}) {
      Arrays actual(problem);
      problem.rule.run(kernels(), actual.view(), kKey, threads);
      ASSERT_TRUE(same_arrays(expected, actual)) << problem << ", " << threads << " threads";
    }
  }
}

TEST_P(ParallelTest, UpdateOfEveryRuleHasTheBitsOfTheScalarTarget) {
  for (const Rule& rule : all_rules()) {
    const Problem problem{rule, kLayouts[1], DType::float32, DType::bfloat16, (std::size_t{1} << 16) + 4099,
                          1};
    Arrays expected(problem);
    Arrays actual(problem);
    rule.run(kScalarKernels, expected.view(), kKey, 2);
    rule.run(kernels(), actual.view(), kKey, 2);
    ASSERT_TRUE(same_arrays(expected, actual)) << problem;
  }
}

TEST_P(ParallelTest, LongCopiesAreStreamedToAnyAddress) {
  std::size_t offset = 1;
  for (const Layout& layout : kLayouts) {
    if (!layout.copies) continue;
    const Problem problem{rule_named("Sgd"), layout, DType::bfloat16, DType::float32, kStreamed, offset += 2};
    Arrays expected(problem);
    Arrays actual(problem);
    problem.rule.run_piece(kernels(), expected.view(), {}, false);
    problem.rule.run(kernels(), actual.view(), kKey, 3);
    ASSERT_TRUE(same_arrays(expected, actual)) << problem;
  }
}

TEST_P(ParallelTest, RoundingDependsOnTheIndexAlone) {
  // Arrays in two parts, cut before or after the position at which the upper half of the index changes.
  const Problem problem{
      rule_named("AdamAmsgradL2SmallBeta1"), kLayouts[0], DType::float32, DType::bfloat16, 3000, 0};
  Arrays whole(problem);
  problem.rule.run(kernels(), whole.view(), kKey, 1);
  for (const std::size_t cut :
       {std::size_t{1}, kPastStreams - 1, kPastStreams, kPastStreams + 1, std::size_t{2999}}) {
    Arrays parts(problem);
    UpdateArrays first = parts.view();
    UpdateArrays second = parts.view();
    first.count = cut;
    second.count -= cut;
    second.param = static_cast<float*>(second.param) + cut;
    second.grad = static_cast<const float*>(second.grad) + cut;
    for (void*& state : second.states) state = static_cast<std::uint16_t*>(state) + cut;
    problem.rule.run(kernels(), first, kKey, 2);
    problem.rule.run(kernels(), second, {kKey.seed, kKey.step, kKey.index + cut}, 2);
    ASSERT_TRUE(same_arrays(whole, parts)) << "cut after " << cut;
  }
}

TEST_P(ParallelTest, RoundingDependsOnSeedStepAndIndex) {
  const Problem problem{rule_named("Lion"), kLayouts[0], DType::float32, DType::bfloat16, 3000, 0};
  const auto state_after = [&](const RoundingKey& key) {
    Arrays arrays(problem);
    problem.rule.run(kernels(), arrays.view(), key, 1);
    return std::string(arrays.states[0]->data(), arrays.states[0]->data() + arrays.states[0]->bytes());
  };
  const std::string state = state_after({1, 2, 3});
  EXPECT_EQ(state_after({1, 2, 3}), state);
  EXPECT_NE(state_after({2, 2, 3}), state);
  EXPECT_NE(state_after({1, 3, 3}), state);
  EXPECT_NE(state_after({1, 2, 4}), state);
  EXPECT_NE(state_after({1, 2, 3 + (std::uint64_t{1} << 32)}), state);
}

TEST_P(ParallelTest, SumOfSquaresDoesNotDependOnTheThreads) {
  for (const DType dtype : kDTypes) {
    Buffer values(item_size(dtype), kSeveralPieces, 1);
    fill_with_samples(values, dtype, 1, dtype == DType::float32 ? 0xBFFFFFFF : 0xBFFF);  // all finite
    const double expected =
        sum_of_squares_parallel(kScalarKernels.sum_of_squares, values.data(), dtype, values.count(), 1);
    EXPECT_TRUE(std::isfinite(expected));
    for (const std::size_t threads : {1, 2, 3, 7}) {
      EXPECT_EQ(
          sum_of_squares_parallel(kernels().sum_of_squares, values.data(), dtype, values.count(), threads),
          expected)
          << name_of(dtype) << ", " << threads << " threads";
    }
  }
}

TEST_P(ParallelTest, SumOfSquaresSeesOneNumberThatIsNotFinite) {
  Buffer values(4, kSeveralPieces);
  values.set_bits(kSeveralPieces - 1, 0x7F800000);
  const auto sum = [&] {
    return sum_of_squares_parallel(kernels().sum_of_squares, values.data(), DType::float32, values.count(),
                                   3);
  };
  EXPECT_TRUE(std::isinf(sum()));
  values.set_bits(1 << 16, 0x7FC00000);
  EXPECT_TRUE(std::isnan(sum()));
}

TEST_P(ParallelTest, SumOfNothingIsZero) {
  EXPECT_EQ(sum_of_squares_parallel(kernels().sum_of_squares, nullptr, DType::float32, 0, 4), 0.0);
}

TEST_P(ParallelTest, SplitAndJoinDoNotDependOnTheThreads) {
  constexpr std::size_t count = (std::size_t{3} << 18) + 77;
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    Buffer whole(4, count, 1), high(2, count, 2), remainder(2, count, 3);
    Buffer expected_whole(4, count), expected_high(2, count), expected_remainder(2, count);
    fill_with_samples(whole, DType::float32, 1);
    fill_with_samples(expected_whole, DType::float32, 1);
    const SplitArrays actual{whole.as<float>(), high.data(), dtype, remainder.as<std::int16_t>(), count};
    const SplitArrays expected{expected_whole.as<float>(), expected_high.data(), dtype,
                               expected_remainder.as<std::int16_t>(), count};
    kernels().split(expected);
    split_parallel(kernels().split, actual, 3);
    EXPECT_TRUE(same_numbers(dtype, expected_high, high));
    EXPECT_EQ(std::memcmp(expected_remainder.data(), remainder.data(), remainder.bytes()), 0);
    kernels().join(expected);
    split_parallel(kernels().join, actual, 3);
    EXPECT_TRUE(same_numbers(DType::float32, expected_whole, whole));
  }
}

TEST_P(ParallelTest, SumsDoNotDependOnTheThreads) {
  constexpr std::size_t count = (std::size_t{3} << 18) + 77;
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    Buffer expected(4, count), actual(4, count, 1), values(item_size(dtype), count, 2);
    for (Buffer* total : {&expected, &actual}) fill_with_samples(*total, DType::float32, 1);
    fill_with_samples(values, dtype, 2);
    kernels().add({expected.as<float>(), values.data(), dtype, count});
    add_parallel(kernels().add, {actual.as<float>(), values.data(), dtype, count}, 3);
    EXPECT_TRUE(same_numbers(DType::float32, expected, actual));

    Buffer whole(item_size(dtype), count), pieces(item_size(dtype), count, 1);
    for (Buffer* total : {&whole, &pieces}) {
      fill_with_samples(*total, dtype, 3);
      const void* const parts[] = {values.data(), total->data()};
      const SumArrays arrays{total->data(), dtype, false, parts, 2, 0.3F, dtype, 0, count};
      total == &whole ? kernels().sum(arrays) : sum_parallel(kernels().sum, arrays, 3);
    }
    EXPECT_TRUE(same_numbers(dtype, whole, pieces));
  }
}

TEST_P(ParallelTest, NothingDependsOnTheFloatingPointEnvironmentOfTheCaller) {
  const auto on_thread = [](const std::function<void()>& body) { std::thread(body).join(); };
  const Problem problem{rule_named("AdamW"), kLayouts[3], DType::float16, DType::float32, kSeveralPieces, 1};
  Arrays expected(problem);
  problem.rule.run(kernels(), expected.view(), kKey, 1);
  // More threads than in any earlier test, since new threads inherit the environment of the caller.
  for (const std::size_t threads : {1, 2, 9}) {
    Arrays actual(problem);
    on_thread([&] {
      const HostileFloatingPoint hostile;
      problem.rule.run(kernels(), actual.view(), kKey, threads);
    });
    ASSERT_TRUE(same_arrays(expected, actual)) << threads << " threads";
  }

  Buffer whole(4, 1001), high(2, 1001), remainder(2, 1001);
  for (std::size_t i = 0; i < whole.count(); ++i) whole.set_bits(i, static_cast<std::uint32_t>(i * 9973));
  on_thread([&] {
    const HostileFloatingPoint hostile;
    const SplitArrays arrays{whole.as<float>(), high.data(), DType::float16, remainder.as<std::int16_t>(),
                             1001};
    split_parallel(kernels().split, arrays, 1);
    split_parallel(kernels().join, arrays, 1);
  });
  for (std::size_t i = 0; i < whole.count(); ++i) {
    ASSERT_NEAR(float_of(whole.bits(i)), float_of(static_cast<std::uint32_t>(i * 9973)), 0x1p-40) << i;
  }

  Buffer subnormal(4, kSeveralPieces);
  for (std::size_t i = 0; i < subnormal.count(); ++i) subnormal.set_bits(i, 1);
  for (const std::size_t threads : {1, 2}) {
    double sum = 0.0;
    on_thread([&] {
      const HostileFloatingPoint hostile;
      sum = sum_of_squares_parallel(kernels().sum_of_squares, subnormal.data(), DType::float32,
                                    subnormal.count(), threads);
    });
    EXPECT_EQ(sum, static_cast<double>(kSeveralPieces) * 0x1p-298) << threads << " threads";
    Buffer total(4, kSeveralPieces);
    on_thread([&] {
      const HostileFloatingPoint hostile;
      add_parallel(kernels().add, {total.as<float>(), subnormal.data(), DType::float32, total.count()},
                   threads);
    });
    EXPECT_TRUE(same_numbers(DType::float32, subnormal, total)) << threads << " threads";
    Buffer copy(4, kSeveralPieces);
    on_thread([&] {
      const HostileFloatingPoint hostile;
      const void* const parts[] = {copy.data(), subnormal.data()};
      const SumArrays arrays{copy.data(), DType::float32, false, parts,       2,
                             1.0F,        DType::float32, 0,     copy.count()};
      sum_parallel(kernels().sum, arrays, threads);
    });
    EXPECT_TRUE(same_numbers(DType::float32, subnormal, copy)) << threads << " threads";
  }
}

TEST(ParallelUpdateTest, EmptyArraysNeedNoMemory) {
  for (const Rule& rule : all_rules()) {
    for (const std::size_t threads : {1, 4})
      rule.run(resolve_target("").kernels, UpdateArrays{}, kKey, threads);
  }
}

TEST(ParallelUpdateTest, CallersDoNotDisturbEachOther) {
  const Kernels& kernels = resolve_target("").kernels;
  const Problem problem{
      rule_named("SgdNesterov"), kLayouts[1], DType::bfloat16, DType::float32, kSeveralPieces, 0};
  Arrays expected(problem);
  problem.rule.run(kernels, expected.view(), kKey, 1);
  std::vector<std::unique_ptr<Arrays>> all;
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < 4; ++caller) {
    Arrays& arrays = *all.emplace_back(std::make_unique<Arrays>(problem));
    callers.emplace_back([&, caller] { problem.rule.run(kernels, arrays.view(), kKey, 1 + caller); });
  }
  for (std::thread& caller : callers) caller.join();
  for (const auto& arrays : all) EXPECT_TRUE(same_arrays(expected, *arrays));
}

}  // namespace
}  // namespace lightning_zero
