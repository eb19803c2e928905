// What the Python faces share: levels by name, and shapes from Python. Errors are ValueError.
#pragma once

#include <string>
#include <tuple>

#include "levels.h"

namespace kv {

using ShapeTuple = std::tuple<int, int, int, int>;  // heads, dim, tokens, format

const Level& level_of(const std::string& name);  // the best one for ""
Shape shape_of(const ShapeTuple& shape);

}  // namespace kv
