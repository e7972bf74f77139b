// The blocks of transfers, and their states after results of the system; shared by both backends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "lightning_zero/disk.h"

namespace lightning_zero {

// The number of tries without progress after which a block fails. For EAGAIN, with pauses, these take about
// ten seconds.
constexpr int kTries = 10000;

// The rest of a block that is still to be transferred.
class Block {
 public:
  enum class Next {
    ends,   // everything was transferred
    again,  // transfer the rest
    later,  // transfer the rest after a pause
    fails   // see failure()
  };

  Block() = default;
  Block(Direction direction, const Transfer& transfer, std::size_t alignment)
      : direction_(direction), rest_(transfer), alignment_(alignment) {}

  Direction direction() const { return direction_; }
  const Transfer& rest() const { return rest_; }

  // Notes the result of a transfer of `rest`: the number of bytes transferred, or a negative errno.
  Next take(std::int64_t result);

  TransferFailure failure() const { return {code_, rest_.offset}; }

 private:
  Direction direction_ = Direction::read;
  Transfer rest_{};
  std::size_t alignment_ = 1;
  int refused_ = 0;
  int short_of_a_block_ = 0;
  int code_ = 0;
};

// Cuts a transfer into blocks, in order.
class Cutter {
 public:
  Cutter(Direction direction, const Transfer& transfer, std::size_t alignment, std::size_t block)
      : direction_(direction), whole_(transfer), alignment_(alignment), block_(block) {}

  std::optional<Block> next();

 private:
  const Direction direction_;
  const Transfer whole_;
  const std::size_t alignment_;
  const std::size_t block_;
  std::size_t start_ = 0;  // position of the next block in the transfer
};

// Keeps the failure with the smaller offset in `first`.
void note_failure(std::optional<TransferFailure>& first, const TransferFailure& failure);

}  // namespace lightning_zero
