#include "digests.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace kv {

namespace {
constexpr int kSlicesTogether = 64;
constexpr int kBlocksTogether = 1024;  // one item of the pool: about 100 us of work

constexpr int items(int count, int together) { return (count + together - 1) / together; }
}  // namespace

void digest_slices(const Level& level, const std::int64_t* addresses, int count, const Shape& shape, std::uint16_t* into) {
    const std::size_t head = head_bytes(shape), part = static_cast<std::size_t>(shape.heads) * shape.dim;
    parallel_for(items(count, kSlicesTogether), [&](int item) {
        alignas(64) float scratch[3 * kMaxSide];
        for (int i = item * kSlicesTogether; i < std::min(count, (item + 1) * kSlicesTogether); ++i) {
            for (int h = 0; h < shape.heads; ++h) {
                std::uint16_t* low = into + 3 * part * i + static_cast<std::size_t>(h) * shape.dim;
                level.digest({shape, reinterpret_cast<const std::uint8_t*>(addresses[i]) + h * head, scratch, low, low + part, low + 2 * part});
            }
        }
    });
}

void digest_scores(const Level& level, const ScoreTask& task) {
    const int rows = task.heads * task.group, row = padded(task.dim);
    // The query as it is, its part above zero and its part below: rows padded with zeros.
    std::vector<float> forms(3 * static_cast<std::size_t>(rows) * row, 0.0f);
    for (int r = 0; r < rows; ++r) {
        for (int d = 0; d < task.dim; ++d) {
            const float x = task.query[static_cast<std::size_t>(r) * task.dim + d];
            const std::size_t at = static_cast<std::size_t>(r) * row + d, form = static_cast<std::size_t>(rows) * row;
            forms[at] = x;
            forms[at + form] = std::max(x, 0.0f);
            forms[at + 2 * form] = std::min(x, 0.0f);
        }
    }
    parallel_for(items(task.blocks, kBlocksTogether), [&](int item) {
        const int begin = item * kBlocksTogether;
        ScoreTask part = task;
        part.query = forms.data();
        part.digests += static_cast<std::size_t>(begin) * 3 * task.heads * task.dim;
        part.blocks = std::min(kBlocksTogether, task.blocks - begin);
        part.most += static_cast<std::size_t>(begin) * rows;
        part.middle += static_cast<std::size_t>(begin) * rows;
        level.score(part);
    });
}

}  // namespace kv
