// Choice of the instruction set at run time.
#pragma once

#include <string>
#include <vector>

#include "lightning_zero/add.h"
#include "lightning_zero/blocks.h"
#include "lightning_zero/reduce.h"
#include "lightning_zero/split.h"
#include "lightning_zero/update.h"

namespace lightning_zero {

// The kernels of one instruction set.
struct Kernels {
  UpdateFunction<AdamCoefficients> adam;
  UpdateFunction<AdagradCoefficients> adagrad;
  UpdateFunction<LionCoefficients> lion;
  UpdateFunction<SgdCoefficients> sgd;
  SumOfSquaresFunction sum_of_squares;
  AddFunction add;
  SumFunction sum;
  SplitFunction split;       // whole to split
  SplitFunction join;        // split to whole
  BlockFunction quantize;    // fp32 to blocks
  BlockFunction dequantize;  // blocks to fp32
};

extern const Kernels kScalarKernels;
#ifdef LIGHTNING_ZERO_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

struct Target {
  const char* name;
  bool (*supported)();  // whether the CPU and the operating system support it
  const Kernels& kernels;
};

// The targets in this binary, slowest first.
const std::vector<Target>& compiled_targets();

// The target with this name, or the fastest supported one if `name` is empty. Throws std::invalid_argument if
// the name is unknown or the machine lacks the instruction set.
const Target& resolve_target(const std::string& name);

}  // namespace lightning_zero
