// The choice of the instruction set.
#include "lightning_zero/dispatch.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "numbers.h"

namespace lightning_zero {
namespace {

TEST(DispatchTest, ScalarComesFirstAndIsAlwaysSupported) {
  EXPECT_STREQ(compiled_targets().front().name, "scalar");
  EXPECT_TRUE(compiled_targets().front().supported());
}

TEST(DispatchTest, NoNameMeansTheFastestSupportedTarget) {
  EXPECT_EQ(&resolve_target(""), supported_targets().back());
}

TEST(DispatchTest, FindsEverySupportedTargetAndRefusesTheOthers) {
  for (const Target& target : compiled_targets()) {
    if (target.supported()) {
      EXPECT_EQ(&resolve_target(target.name), &target);
    } else {
      EXPECT_THROW(resolve_target(target.name), std::invalid_argument) << target.name;
    }
  }
}

TEST(DispatchTest, ErrorNamesWhatWasAskedForAndWhatThereIs) {
  for (const std::string name : {"sse2", "AVX2", " ", "scalar "}) {
    try {
      resolve_target(name);
      ADD_FAILURE() << "'" << name << "' was found";
    } catch (const std::invalid_argument& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("'" + name + "'"), std::string::npos) << message;
      for (const Target* target : supported_targets()) {
        EXPECT_NE(message.find(target->name), std::string::npos) << message;
      }
    }
  }
}

}  // namespace
}  // namespace lightning_zero
