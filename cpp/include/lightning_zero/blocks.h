// Optimizer state with 8 bits per element and one scale per block of elements.
//
// An element is a small floating-point number: 4 bits of the significand and 3 bits of the exponent beside a
// sign, or 4 bits of the exponent without one, with gradual underflow as in IEEE 754. The former is the
// companding law of ITU-T recommendation G.711 (A-law, 1972), the latter its continuation to more segments.
// The scale of a block is a power of two, as the "E8M0" scales of the Open Compute Project's "Microscaling
// formats (MX)" (2023), so that numbers are converted between blocks and fp32 by shifts. Scales for blocks of
// a few hundred elements are from Dettmers et al., "8-bit optimizers via block-wise quantization" (2022).
#pragma once

#include <cstddef>
#include <cstdint>

namespace lightning_zero {

// Elements i of a parameter with equal i / kBlockLength share a scale.
constexpr std::size_t kBlockLength = 256;

// The same `count` numbers in two representations: in fp32 and in blocks.
struct BlockArrays {
  float* whole;
  std::uint8_t* codes;
  std::uint8_t* scales;  // one per block: the exponent of its largest number, biased as in fp32
  bool is_signed;        // unsigned numbers have one more bit of exponent
  std::size_t lead;      // number of elements of the first block before the first number
  std::size_t count;
};

// Computes one representation from the other, by one target; rounds to nearest, with ties away from zero.
using BlockFunction = void (*)(const BlockArrays&);

// Runs `convert` on up to `threads` threads (at least 1).
void convert_blocks_parallel(BlockFunction convert, const BlockArrays& arrays, std::size_t threads);

}  // namespace lightning_zero
