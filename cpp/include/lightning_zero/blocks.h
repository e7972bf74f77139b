// State of an optimizer in 8 bits per element, with one scale for every block of elements.
//
// An element is a small floating-point number: 4 bits of the significand and 3 bits of the exponent beside a
// sign, or 4 bits of the exponent without one, with gradual underflow as in IEEE 754. The former is the
// companding law of ITU-T recommendation G.711 (A-law, 1972), the latter its continuation to more segments.
// The scale of a block is a power of two, so that numbers in a block and in fp32 become each other by shifts,
// without rounding: the "E8M0" scales of the Open Compute Project's "Microscaling formats (MX)" (2023). That
// 8-bit state needs a scale for each block of a few hundred elements is from Dettmers et al., "8-bit
// optimizers via block-wise quantization" (2022).
#pragma once

#include <cstddef>
#include <cstdint>

namespace lightning_zero {

// Elements i of a parameter with equal i / kBlockLength share a scale.
constexpr std::size_t kBlockLength = 256;

// The number of blocks that `count` elements touch, of which the first is element `lead` of its block.
constexpr std::size_t blocks_touched(std::size_t lead, std::size_t count) {
  return count == 0 ? 0 : (lead + count + kBlockLength - 1) / kBlockLength;
}

// `count` numbers twice: in fp32, and in blocks.
struct BlockArrays {
  float* whole;
  std::uint8_t* codes;
  std::uint8_t* scales;  // one for each block: the exponent of its largest number, biased as in fp32
  bool is_signed;        // without a sign, numbers have one more bit of the exponent
  std::size_t lead;      // elements of the first block before the first number
  std::size_t count;
};

// Fills one representation from the other, by one target: rounded to nearest, halfway away from zero.
using BlockFunction = void (*)(const BlockArrays&);

// Runs `convert` on up to `threads` threads (at least 1).
void convert_blocks_parallel(BlockFunction convert, const BlockArrays& arrays, std::size_t threads);

}  // namespace lightning_zero
