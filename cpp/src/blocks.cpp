#include "lightning_zero/blocks.h"

#include <algorithm>

#include "lightning_zero/floating_point.h"
#include "lightning_zero/thread_pool.h"

namespace lightning_zero {

void convert_blocks_parallel(BlockFunction convert, const BlockArrays& a, std::size_t threads) {
  constexpr std::size_t kPiece = std::size_t{1} << 18;  // whole blocks; only the first piece may begin in one
  const std::size_t all = a.count == 0 ? 0 : a.lead + a.count;
  parallel_for((all + kPiece - 1) / kPiece, threads, [&](std::size_t i) {
    const DefaultFloatingPoint environment;
    const std::size_t start = std::max(i * kPiece, a.lead) - a.lead;
    const std::size_t stop = std::min((i + 1) * kPiece, all) - a.lead;
    convert({a.whole + start, a.codes + start, a.scales + i * (kPiece / kBlockLength), a.is_signed,
             i == 0 ? a.lead : 0, stop - start});
  });
}

}  // namespace lightning_zero
