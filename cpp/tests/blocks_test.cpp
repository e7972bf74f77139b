// 8-bit state in blocks: conversions and updates of pieces, in guarded memory.
#include "lightning_zero/blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "numbers.h"
#include "problem.h"

namespace lightning_zero {
namespace {

constexpr std::size_t kCounts[] = {0, 1, 15, 16, 31, 32, 33, 100, 255, 256, 257, 271, 512, 700};
constexpr std::size_t kLeads[] = {0, 1, 16, 240, 255};

// The number of blocks that contain any of `count` elements, the first of which is element `lead` of its
// block.
std::size_t blocks_touched(std::size_t lead, std::size_t count) {
  return count == 0 ? 0 : (lead + count + kBlockLength - 1) / kBlockLength;
}

struct Converted {
  Converted(std::size_t lead, std::size_t count)
      : whole(4, count, 1), codes(1, count, 3), scales(1, blocks_touched(lead, count), 1) {}
  BlockArrays view(bool is_signed, std::size_t lead) {
    return {whole.as<float>(), codes.data(), scales.data(), is_signed, lead, whole.count()};
  }
  Buffer whole, codes, scales;
};

bool same_bytes(const Buffer& a, const Buffer& b) { return std::memcmp(a.data(), b.data(), a.bytes()) == 0; }

class BlocksTest : public ::testing::TestWithParam<const Target*> {
 protected:
  const Kernels& kernels() const { return GetParam()->kernels; }
};
INSTANTIATE_TEST_SUITE_P(Targets, BlocksTest, ::testing::ValuesIn(supported_targets()), target_name);

TEST_P(BlocksTest, ConversionsHaveTheBitsOfTheScalarTarget) {
  for (const bool is_signed : {true, false}) {
    for (const std::size_t lead : kLeads) {
      for (const std::size_t count : kCounts) {
        Converted expected(lead, count), actual(lead, count);
        fill_with_samples(expected.whole, DType::float32, count + lead);
        fill_with_samples(actual.whole, DType::float32, count + lead);
        kScalarKernels.quantize(expected.view(is_signed, lead));
        kernels().quantize(actual.view(is_signed, lead));
        ASSERT_TRUE(same_bytes(expected.codes, actual.codes)) << count << " from " << lead;
        ASSERT_TRUE(same_bytes(expected.scales, actual.scales)) << count << " from " << lead;
        kScalarKernels.dequantize(expected.view(is_signed, lead));
        kernels().dequantize(actual.view(is_signed, lead));
        ASSERT_TRUE(same_numbers(DType::float32, expected.whole, actual.whole));
      }
    }
  }
}

TEST_P(BlocksTest, ParallelConversionsDoNotDependOnTheThreads) {
  constexpr std::size_t lead = 100, count = (std::size_t{2} << 18) + 77;  // three pieces
  for (const bool is_signed : {true, false}) {
    Converted expected(lead, count);
    fill_with_samples(expected.whole, DType::float32, 1);
    kernels().quantize(expected.view(is_signed, lead));
    kernels().dequantize(expected.view(is_signed, lead));
    for (const std::size_t threads : {1, 2, 3}) {
      Converted actual(lead, count);
      fill_with_samples(actual.whole, DType::float32, 1);
      convert_blocks_parallel(kernels().quantize, actual.view(is_signed, lead), threads);
      ASSERT_TRUE(same_bytes(expected.codes, actual.codes)) << threads;
      ASSERT_TRUE(same_bytes(expected.scales, actual.scales)) << threads;
      convert_blocks_parallel(kernels().dequantize, actual.view(is_signed, lead), threads);
      ASSERT_TRUE(same_numbers(DType::float32, expected.whole, actual.whole)) << threads;
    }
  }
}

// The value of a code in double, according to the documentation of the format.
double value_of(std::uint8_t code, std::uint8_t scale, bool is_signed) {
  if (scale == 0) return 0.0;
  const int magnitude = is_signed ? code & 0x7F : code;
  const int top = is_signed ? 7 : 15;
  const int exponent = magnitude >> 4;
  const int significand = (magnitude & 15) + (exponent > 0 ? 16 : 0);
  const double value =
      std::ldexp(significand, (exponent > 0 ? exponent : 1) - top - 4 + static_cast<int>(scale) - 127);
  return is_signed && code >= 128 ? -value : value;
}

TEST_P(BlocksTest, EveryCodeHasItsValueAndIsStoredAgain) {
  constexpr std::size_t count = 255 * kBlockLength;  // all scales of finite numbers
  for (const bool is_signed : {true, false}) {
    Converted arrays(0, count);
    for (std::size_t i = 0; i < count; ++i) {
      arrays.codes.set_bits(i, i / kBlockLength == 0 ? 0 : static_cast<std::uint32_t>(i % kBlockLength));
    }
    for (std::size_t b = 0; b < 255; ++b) arrays.scales.set_bits(b, static_cast<std::uint32_t>(b));
    kernels().dequantize(arrays.view(is_signed, 0));
    for (std::size_t i = 0; i < count; ++i) {
      const auto code = static_cast<std::uint8_t>(arrays.codes.bits(i));
      const auto scale = static_cast<std::uint8_t>(arrays.scales.bits(i / kBlockLength));
      ASSERT_EQ(float_of(arrays.whole.bits(i)), value_of(code, scale, is_signed)) << +code << ' ' << +scale;
    }
    Converted again(0, count);
    std::memcpy(again.whole.data(), arrays.whole.data(), arrays.whole.bytes());
    kernels().quantize(again.view(is_signed, 0));
    ASSERT_TRUE(same_bytes(arrays.codes, again.codes));
    ASSERT_TRUE(same_bytes(arrays.scales, again.scales));
  }
}

TEST_P(BlocksTest, WithoutASignNumbersHaveTheCodesOfTheirMagnitudes) {
  constexpr std::size_t count = 2 * kBlockLength + 40;
  Converted positive(3, count), negative(3, count);
  for (std::size_t i = 0; i < count; ++i) {
    const float x = std::ldexp(1.0F + static_cast<float>(i % 19) / 19, static_cast<int>(i % 23) - 30);
    positive.whole.as<float>()[i] = x;
    negative.whole.as<float>()[i] = -x;
  }
  kernels().quantize(positive.view(false, 3));
  kernels().quantize(negative.view(false, 3));
  ASSERT_TRUE(same_bytes(positive.codes, negative.codes));
  ASSERT_TRUE(same_bytes(positive.scales, negative.scales));
}

// A step with state in blocks, filled with samples that depend on the arguments only.
class BlockState {
 public:
  BlockState(const Problem& problem, std::size_t lead) : arrays_(problem) {
    const std::size_t blocks = blocks_touched(lead, problem.count);
    for (int k = 0; k < problem.rule.states; ++k) {
      scales_.push_back(std::make_unique<Buffer>(1, blocks));
      for (std::size_t b = 0; b < blocks; ++b) {
        scales_[k]->set_bits(b, b % 7 == 5 ? 255 : b % 7 == 3 ? 0 : static_cast<std::uint32_t>(120 + b % 5));
      }
    }
  }
  UpdateArrays view() {
    UpdateArrays a = arrays_.view();
    for (std::size_t k = 0; k < scales_.size(); ++k) a.scales[k] = scales_[k]->data();
    return a;
  }
  friend ::testing::AssertionResult same_state(const BlockState& a, const BlockState& b) {
    auto result = same_arrays(a.arrays_, b.arrays_);
    for (std::size_t k = 0; k < a.scales_.size() && result; ++k) {
      if (!same_bytes(*a.scales_[k], *b.scales_[k])) {
        result = ::testing::AssertionFailure() << "the scales of state " << k << " differ";
      }
    }
    return result;
  }

 private:
  Arrays arrays_;
  std::vector<std::unique_ptr<Buffer>> scales_;
};

const char* const kRules[] = {"AdamW", "LionDecay", "Lion"};

TEST_P(BlocksTest, UpdatesHaveTheBitsOfTheScalarTarget) {
  for (const char* const rule : kRules) {
    for (const Layout& layout : kLayouts) {
      for (const DType grad : kDTypes) {
        for (const std::size_t lead : {std::size_t{0}, std::size_t{241}}) {
          for (const std::size_t count : kCounts) {
            const RoundingStream random = {0x12345678, 0x9ABCDEF0, static_cast<std::uint32_t>(512 + lead)};
            const Problem problem{rule_named(rule), layout, grad, DType::int8, count, count * 5 % 17};
            BlockState expected(problem, lead);
            problem.rule.run_piece(kScalarKernels, expected.view(), random, false);
            for (const bool stream : {false, true}) {
              BlockState actual(problem, lead);
              problem.rule.run_piece(kernels(), actual.view(), random, stream);
              ASSERT_TRUE(same_state(expected, actual)) << problem << ", lead " << lead;
            }
          }
        }
      }
    }
  }
}

TEST_P(BlocksTest, ParallelUpdatesDoNotDependOnTheThreads) {
  constexpr std::size_t count = (std::size_t{3} << 16) + 77;
  for (const std::uint64_t index : {std::uint64_t{0}, (std::uint64_t{3} << 32) - 1001}) {
    const Problem problem{rule_named("AdamW"), kLayouts[4], DType::bfloat16, DType::int8, count, 1};
    BlockState expected(problem, index % kBlockLength);
    problem.rule.run(kernels(), expected.view(), {42, 7, index}, 1);
    for (const std::size_t threads : {2, 3, 7}) {
      BlockState actual(problem, index % kBlockLength);
      problem.rule.run(kernels(), actual.view(), {42, 7, index}, threads);
      ASSERT_TRUE(same_state(expected, actual)) << threads << " threads, from " << index;
    }
  }
}

}  // namespace
}  // namespace lightning_zero
