// Digests of blocks: what is kept of a block's K to rank it without reading it. See kernels/digest.py.
#pragma once

#include <cstdint>

#include "levels.h"

namespace kv {

// Digests of `count` slices, fp16 [count][3][heads][dim]: minimum, maximum and mean over the tokens, the first two
// rounded outward.
void digest_slices(const Level& level, const std::int64_t* addresses, int count, const Shape& shape, std::uint16_t* into);

// Upper bound and mean of the scores that queries fp32 [heads * group][dim] have in each block: fp32 [blocks][heads *
// group]. `task.query` is `query` here and in the forms that the levels take inside.
void digest_scores(const Level& level, const ScoreTask& task);

}  // namespace kv
