// Which copy is the fastest here: the forms that a level offers, timed once in a process, and the choice.
#pragma once

#include <cstddef>
#include <vector>

#include "task.h"

namespace kv {

constexpr std::size_t kLargeCopy = std::size_t{1} << 20;  // bytes of a call; copies of less stay in the caches

struct CopySpeed {
    const CopyForm* form;
    double bytes_per_second;  // of one thread
};

// `speeds` has what was measured, `form` is the one of them that is taken.
struct CopyChoice {
    const CopyForm* form;
    std::vector<CopySpeed> speeds;
};

struct CopyChoices {
    CopyChoice small_plain, small_summed, large_plain, large_summed;
    double seconds;  // that measuring took
};

// All forms of a level, the plain one first.
std::vector<const CopyForm*> copy_forms(const Level& level);

// Measured at the first call for a level, some milliseconds, and kept as long as the process lives.
const CopyChoices& copy_choices(const Level& level);

// The form for a call that copies `total` bytes, on this processor's best level.
const CopyForm& chosen_copy(bool summed, std::size_t total);

}  // namespace kv
