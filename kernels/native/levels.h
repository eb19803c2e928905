// Which instruction-set levels this processor and this build have.
#pragma once

#include <string>

#include "task.h"

namespace kv {

constexpr const char* kLevelNames[] = {"avx512", "avx2", "portable"};  // best first

// Null where the processor or the build has no such level.
const Level* supported_level(const std::string& name);

const Level& best_level();

}  // namespace kv
