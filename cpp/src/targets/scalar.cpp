#include "simd/scalar.h"
#include "kernels/add.h"
#include "kernels/blocks.h"
#include "kernels/split.h"
#include "kernels/sum_of_squares.h"
#include "kernels/update.h"
#include "lightning_zero/dispatch.h"

namespace lightning_zero {

const Kernels kScalarKernels = {
    adam<ScalarFloat>,
    update<ScalarFloat, AdagradRule<ScalarFloat>>,
    update<ScalarFloat, LionRule<ScalarFloat>>,
    sgd<ScalarFloat>,
    sum_of_squares<ScalarSquares>,
    add<ScalarFloat>,
    sum<ScalarFloat>,
    split<ScalarFloat>,
    join<ScalarFloat>,
    quantize<ScalarFloat>,
    dequantize<ScalarFloat>,
};

}  // namespace lightning_zero
