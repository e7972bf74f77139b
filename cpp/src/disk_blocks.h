// The blocks of transfers, and what the system's answers make of one; both backends share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lightning_zero/disk.h"

namespace lightning_zero {

// Tries without any progress after which something is given up: of EAGAIN, with its pauses, after about ten
// seconds.
constexpr int kTries = 10000;

// What is left of a block.
class Block {
 public:
  enum class Next {
    ends,   // all was transferred
    again,  // the rest is to be transferred
    later,  // likewise, after a pause
    fails   // see failure()
  };

  Block() = default;
  Block(Direction direction, const Transfer& transfer, std::size_t alignment)
      : direction_(direction), rest_(transfer), alignment_(alignment) {}

  Direction direction() const { return direction_; }
  const Transfer& rest() const { return rest_; }

  // Takes note of the answer to a transfer of `rest`: the bytes that were transferred, or an errno negated.
  Next take(std::int64_t result);

  TransferFailure failure() const { return {code_, rest_.file, rest_.offset}; }

 private:
  Direction direction_ = Direction::read;
  Transfer rest_{};
  std::size_t alignment_ = 1;
  int refused_ = 0;
  int short_of_a_block_ = 0;
  int code_ = 0;
};

// Cuts transfers into blocks, one after the other.
class Cutter {
 public:
  Cutter(Direction direction, const std::vector<Transfer>& transfers, std::size_t alignment,
         std::size_t block)
      : direction_(direction), transfers_(transfers), alignment_(alignment), block_(block) {}

  std::optional<Block> next();

 private:
  const Direction direction_;
  const std::vector<Transfer>& transfers_;
  const std::size_t alignment_;
  const std::size_t block_;
  std::size_t transfer_ = 0;
  std::size_t start_ = 0;  // in that transfer
};

// Keeps the failure at the smaller offset.
void note_failure(std::optional<TransferFailure>& first, const TransferFailure& failure);

}  // namespace lightning_zero
