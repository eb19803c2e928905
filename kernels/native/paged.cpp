// Splits a batch into tasks of one KV head and a run of blocks each, and joins what the runs give.
#include "paged.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "pool.h"

namespace kv {
namespace {

constexpr int kLeastBlocks = 16;   // a run shorter than this is not worth a task of its own
constexpr int kTasksPerThread = 4; // so that a late thread costs at most a quarter of its share
constexpr int kRunBlocks = 128;    // a longer run of few rows is cut: no thread is then late by more than a millisecond or two
constexpr int kFewRows = 16;       // of more rows the sums of all runs would take much memory

// Rows of one sequence's chunk of queries, over one run of its blocks, for one KV head.
struct Piece {
    int sequence, query, queries;  // first query (row of the batch) and how many
    int head;
    int block, blocks;             // run within the sequence's seen blocks
    std::size_t state;             // offset of its sums in the state array
    int runs;                      // pieces that share these rows; they follow one another
};

struct Seen {
    std::vector<const std::uint8_t*> slices;
    std::vector<std::int32_t> starts;
};

// Memory of one thread that is kept between calls: fresh pages cost more than the work on a short context.
class FloatBuffer {
public:
    FloatBuffer() = default;
    ~FloatBuffer() { release(); }
    FloatBuffer(const FloatBuffer&) = delete;
    FloatBuffer& operator=(const FloatBuffer&) = delete;

    // At least `count` floats, 64-byte aligned, of any content; valid until the next call of the same thread.
    float* take(std::size_t count) {
        if (count > size_ || size_ > kKept) {
            release();
            data_ = static_cast<float*>(::operator new(count * sizeof(float), kAlign));
            size_ = count;
        }
        return data_;
    }

private:
    static constexpr std::align_val_t kAlign{64};
    static constexpr std::size_t kKept = std::size_t{4} << 20;  // floats: what a large prefill took is given back

    void release() {
        if (data_ != nullptr) ::operator delete(data_, kAlign);
        data_ = nullptr;
        size_ = 0;
    }

    float* data_ = nullptr;
    std::size_t size_ = 0;
};

thread_local FloatBuffer state_memory;
thread_local FloatBuffer scratch_memory;

Seen seen_blocks(const PagedCall& call, int sequence) {
    Seen seen;
    const int count = call.offsets[sequence + 1] - call.offsets[sequence];
    const std::int64_t last = call.contexts[sequence];
    const std::int64_t first = call.window > 0 ? last - count - call.window + 1 : std::numeric_limits<std::int32_t>::min();
    for (int block = 0; block < call.blocks; ++block) {
        const std::size_t place = static_cast<std::size_t>(sequence) * call.blocks + block;
        const std::int64_t start = call.starts[place];
        if (call.addresses[place] == 0 || start >= last || start + call.shape.tokens <= first) continue;
        seen.slices.push_back(reinterpret_cast<const std::uint8_t*>(call.addresses[place] + call.layer_offset));
        seen.starts.push_back(call.starts[place]);
    }
    return seen;
}

std::size_t state_floats(const PagedCall& call, int rows) {
    return static_cast<std::size_t>(rows) * (padded(call.shape.dim) + kPad);
}

class Batch {
public:
    Batch(const Level& level, const PagedCall& call) : level_(level), call_(call), group_(call.q_heads / call.shape.heads) {
        chunk_ = std::max(1, kRowChunk / group_);
        for (int sequence = 0; sequence < call.sequences; ++sequence) seen_.push_back(seen_blocks(call, sequence));
        cut();
        state_ = state_memory.take(state_size_ + 1);
    }

    void run() {
        parallel_for(static_cast<int>(pieces_.size()), [&](int item) { attend(pieces_[item]); });
        parallel_for(static_cast<int>(firsts_.size()), [&](int item) { finish(firsts_[item]); });
    }

private:
    void cut() {
        std::int64_t chunks = 0;
        for (int s = 0; s < call_.sequences; ++s)
            chunks += (call_.offsets[s + 1] - call_.offsets[s] + chunk_ - 1) / chunk_ * call_.shape.heads;
        const std::int64_t wanted = thread_count() == 1 ? 1 : std::int64_t{kTasksPerThread} * thread_count();
        const int split = static_cast<int>(std::max<std::int64_t>(1, (wanted + chunks - 1) / std::max<std::int64_t>(1, chunks)));
        for (int s = 0; s < call_.sequences; ++s)
            for (int query = call_.offsets[s]; query < call_.offsets[s + 1]; query += chunk_)
                for (int head = 0; head < call_.shape.heads; ++head)
                    cut_runs(s, query, std::min(chunk_, call_.offsets[s + 1] - query), head, split);
    }

    void cut_runs(int sequence, int query, int queries, int head, int split) {
        const int blocks = static_cast<int>(seen_[sequence].slices.size());
        int runs = std::clamp(blocks / kLeastBlocks, 1, split);
        if (queries * group_ <= kFewRows) runs = std::max(runs, (blocks + kRunBlocks - 1) / kRunBlocks);
        firsts_.push_back(pieces_.size());
        for (int run = 0; run < runs; ++run) {
            const int from = static_cast<int>(std::int64_t{blocks} * run / runs);
            const int to = static_cast<int>(std::int64_t{blocks} * (run + 1) / runs);
            pieces_.push_back({sequence, query, queries, head, from, to - from, state_size_, runs});
            state_size_ += state_floats(call_, queries * group_);
        }
    }

    // Sums of a piece, then its rows' largest scores, then their masses.
    float* sums(const Piece& piece) const { return state_ + piece.state; }
    float* tops(const Piece& piece) const { return sums(piece) + rows(piece) * padded(call_.shape.dim); }
    float* masses(const Piece& piece) const { return tops(piece) + rows(piece); }
    int rows(const Piece& piece) const { return piece.queries * group_; }

    void attend(const Piece& piece) const {
        const Seen& seen = seen_[piece.sequence];
        const std::size_t skip = head_bytes(call_.shape) * piece.head;
        std::vector<const std::uint8_t*> tiles(seen.slices.begin() + piece.block,
                                               seen.slices.begin() + piece.block + piece.blocks);
        for (const std::uint8_t*& tile : tiles) tile += skip;
        const int end = call_.offsets[piece.sequence + 1];
        AttendTask task{};
        task.query_stride = static_cast<std::int64_t>(call_.q_heads) * call_.shape.dim;
        task.query = call_.query + piece.query * task.query_stride + static_cast<std::int64_t>(piece.head) * group_ * call_.shape.dim;
        task.group = group_;
        task.rows = rows(piece);
        task.first_place = call_.contexts[piece.sequence] - (end - piece.query);
        task.tiles = tiles.data();
        task.starts = seen.starts.data() + piece.block;
        task.blocks = piece.blocks;
        task.shape = call_.shape;
        task.scale = call_.scale;
        task.soft_cap = call_.soft_cap;
        task.window = call_.window;
        task.scratch = scratch_memory.take(attend_scratch_floats());
        task.sums = sums(piece);
        task.top = tops(piece);
        task.mass = masses(piece);
        level_.attend(task);
    }

    // Join the runs of pieces_[first..first + runs) and write their rows of out and lse.
    void finish(std::size_t first) const {
        const Piece& head = pieces_[first];
        const int dim = call_.shape.dim;
        for (int row = 0; row < rows(head); ++row) {
            const std::int64_t place = (static_cast<std::int64_t>(head.query) + row / group_) * call_.q_heads +
                                       head.head * group_ + row % group_;
            float* out = call_.out + place * dim;
            std::fill(out, out + dim, 0.0f);
            float top = -std::numeric_limits<float>::infinity(), mass = 0.0f;
            for (int run = 0; run < head.runs; ++run) top = std::max(top, tops(pieces_[first + run])[row]);
            for (int run = 0; run < head.runs && std::isfinite(top); ++run) {
                const Piece& piece = pieces_[first + run];
                const float share = std::exp(tops(piece)[row] - top);
                mass += share * masses(piece)[row];
                const float* from = sums(piece) + static_cast<std::size_t>(row) * padded(dim);
                for (int d = 0; d < dim; ++d) out[d] += share * from[d];
            }
            for (int d = 0; d < dim && mass > 0.0f; ++d) out[d] /= mass;
            call_.lse[place] = mass > 0.0f ? top + std::log(mass) : -std::numeric_limits<float>::infinity();
        }
    }

    const Level& level_;
    const PagedCall& call_;
    const int group_;
    int chunk_ = 1;  // queries attended together
    std::vector<Seen> seen_;
    std::vector<Piece> pieces_;
    std::vector<std::size_t> firsts_;  // places in pieces_ where other rows begin
    std::size_t state_size_ = 0;
    float* state_ = nullptr;
};

void merge_row(const MergeCall& call, std::int64_t place) {
    const float none = -std::numeric_limits<float>::infinity();
    float top = call.sinks != nullptr ? call.sinks[place % call.heads] : none;
    for (const float* lse : call.lses) top = std::max(top, lse[place]);
    float* out = call.out + place * call.dim;
    std::fill(out, out + call.dim, 0.0f);
    call.lse[place] = none;
    if (!std::isfinite(top)) return;
    float total = call.sinks != nullptr ? std::exp(call.sinks[place % call.heads] - top) : 0.0f;
    for (const float* lse : call.lses) total += std::exp(lse[place] - top);
    for (std::size_t part = 0; part < call.outs.size(); ++part) {
        const float share = std::exp(call.lses[part][place] - top) / total;
        const float* from = call.outs[part] + place * call.dim;
        for (int d = 0; d < call.dim; ++d) out[d] += share * from[d];
    }
    call.lse[place] = top + std::log(total);
}

// Body gets the task of one head of one slice.
template <typename Body>
void over_heads(const CodecCall& call, const Body& body) {
    Shape coded = call.shape;
    coded.format = Format::int8;
    const std::size_t raw_head = head_bytes(call.shape), coded_head = head_bytes(coded);
    parallel_for(call.count, [&](int slice) {
        float* scratch = scratch_memory.take(attend_scratch_floats());
        for (int head = 0; head < call.shape.heads; ++head)
            body(CodecTask{call.shape, call.raw + slice * call.raw_stride + head * raw_head,
                           call.coded + slice * call.coded_stride + head * coded_head,
                           scratch});
    });
}

}  // namespace

void paged_attention(const Level& level, const PagedCall& call) { Batch(level, call).run(); }

void merge(const MergeCall& call) {
    constexpr std::int64_t kRows = 256;
    const std::int64_t places = call.rows * call.heads;
    parallel_for(static_cast<int>((places + kRows - 1) / kRows), [&](int item) {
        for (std::int64_t place = item * kRows; place < std::min(places, (item + 1) * kRows); ++place) merge_row(call, place);
    });
}

bool quantise(const Level& level, const CodecCall& call) {
    std::atomic<bool> accepted{true};
    over_heads(call, [&](const CodecTask& task) {
        if (accepted.load(std::memory_order_relaxed) && !level.quantise(task)) accepted = false;
    });
    return accepted;
}

void dequantise(const Level& level, const CodecCall& call) {
    over_heads(call, [&](const CodecTask& task) { level.dequantise(task); });
}

}  // namespace kv
