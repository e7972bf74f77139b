// Choice of the instruction set at run time.
#pragma once

#include <string>
#include <vector>

#include "lightning_zero/adamw.h"

namespace lightning_zero {

struct Target {
  const char* name;
  bool (*supported)();  // by the CPU and the operating system
  AdamWFunction adamw;
};

// The targets in this binary, slowest first.
const std::vector<Target>& compiled_targets();

// The target of that name, or the fastest supported one if `name` is empty. Throws std::invalid_argument
// if the name is unknown or the machine lacks the instruction set.
const Target& resolve_target(const std::string& name);

}  // namespace lightning_zero
