// Paged attention of one KV head, written once over the level's `Simd`. Included inside a level's own namespace.
//
// A tile is one head of one block. Query rows are taken up to four at a time against it. Both phases are
// outer-product panels: a vector of tokens (scores) or of channels (values) is decoded once and meets every row
// of the group, and sums stay in registers. While a tile is read, the next tile is prefetched: see ahead.inc.h.

using F = Simd::F;
using I = Simd::I;
constexpr int W = Simd::W;
constexpr float kNone = -__builtin_huge_valf();

// Scratch of one task, cut from AttendTask::scratch.
struct Scratch {
    float* query;        // [rows][dim_stride] scaled
    float* scores;       // [4][kMaxSide]
    std::int32_t* pairs; // [4][kMaxSide] int16 pairs of q, then of p
    float* key_scale;    // [padded(dim)]
    float* key_zero;     // [padded(dim)]
    float* value_scale;  // [padded(tokens)]
};

// What the rows of one row tile see of one block: rows `first..first+count`, tokens [low, high) each and together.
struct RowTile {
    int first, count;
    int low[4], high[4];
    int least, most;
    float decay[4];
};

// Panels name their arrays' bounds at compile time and unroll over them: left to itself, GCC keeps the decoded
// vectors on the stack, which costs a third of the speed.
#define KV_UNROLL _Pragma("GCC unroll 8")

template <Format format, int V, bool part>
inline void load_panel(const std::uint8_t* row, int count, F (&to)[V]) {
    KV_UNROLL for (int v = 0; v < V; ++v) {
        if constexpr (part) to[v] = load_vector_part<format>(row, 0, count);
        else to[v] = load_vector<format>(row, v * W);
    }
}

// A panel covers lanes [from, from + V * W), or `count` < W lanes from `from` when it is the last, partial vector.
struct Panel {
    int from, count;
};

template <Format format, int R, int V, bool part>
inline void score_panel(const std::uint8_t* key, int dim, int tokens, Panel panel, const float* query, int query_stride,
                        float* scores, Ahead& next) {
    constexpr std::ptrdiff_t kBytes = element_bytes(format);
    F sum[R][V];
    KV_UNROLL for (int r = 0; r < R; ++r)
        KV_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = Simd::set1(0.0f);
    const std::ptrdiff_t step = tokens * kBytes;
    const std::uint8_t* row = key + panel.from * kBytes;
    const std::ptrdiff_t pace = next.pace(V * W * kBytes);
    const std::uint8_t* ahead = next.at;
    for (const float *q = query, *end = query + dim; q != end; ++q, row += step, ahead += pace) {
        prefetch(ahead, V * W * kBytes);
        F k[V];
        load_panel<format, V, part>(row, panel.count, k);
        KV_UNROLL for (int r = 0; r < R; ++r) {
            const F weight = Simd::set1(q[r * query_stride]);
            KV_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = Simd::fma(weight, k[v], sum[r][v]);
        }
    }
    next.at = ahead;
    KV_UNROLL for (int r = 0; r < R; ++r)
        KV_UNROLL for (int v = 0; v < V; ++v) Simd::store(scores + r * kMaxSide + panel.from + v * W, sum[r][v]);
}

template <Format format, int R, int V, bool part>
inline void value_panel(const std::uint8_t* value, int dim, Panel panel, const RowTile& tile, const float* weights,
                        float* sums, int sum_stride, Ahead& next) {
    constexpr std::ptrdiff_t kBytes = element_bytes(format);
    F sum[R][V];
    KV_UNROLL for (int r = 0; r < R; ++r)
        KV_UNROLL for (int v = 0; v < V; ++v)
            sum[r][v] = Simd::mul(Simd::load(sums + r * sum_stride + panel.from + v * W), Simd::set1(tile.decay[r]));
    const std::ptrdiff_t step = dim * kBytes;
    const std::uint8_t* row = value + panel.from * kBytes + tile.least * step;
    const std::ptrdiff_t pace = next.pace(V * W * kBytes);
    const std::uint8_t* ahead = next.at;
    for (const float *p = weights + tile.least, *end = weights + tile.most; p != end; ++p, row += step, ahead += pace) {
        prefetch(ahead, V * W * kBytes);
        F x[V];
        load_panel<format, V, part>(row, panel.count, x);
        KV_UNROLL for (int r = 0; r < R; ++r) {
            const F weight = Simd::set1(p[r * kMaxSide]);
            KV_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = Simd::fma(weight, x[v], sum[r][v]);
        }
    }
    next.at = ahead;
    KV_UNROLL for (int r = 0; r < R; ++r)
        KV_UNROLL for (int v = 0; v < V; ++v) Simd::store(sums + r * sum_stride + panel.from + v * W, sum[r][v]);
}

// Sums of `count` pair products for the panel's lanes; `codes` holds rows of `columns` pairs.
template <int R, int V, bool part>
inline void pair_panel(const std::int8_t* codes, int count, int columns, Panel panel, const std::int32_t* pairs,
                       I (&sums)[R][V], Ahead& next) {
    I sum[R][V];  // apart from `sums`, which has an address and so would live in memory
    KV_UNROLL for (int r = 0; r < R; ++r)
        KV_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = Simd::set1_int(0);
    const std::int8_t* row = codes + 2 * panel.from;
    const std::ptrdiff_t pace = next.pace(2 * V * W);
    const std::uint8_t* ahead = next.at;
    for (const std::int32_t *q = pairs, *end = pairs + count; q != end; ++q, row += 2 * columns, ahead += pace) {
        prefetch(ahead, 2 * V * W);
        I k[V];
        KV_UNROLL for (int v = 0; v < V; ++v) {
            if constexpr (part) k[v] = Simd::load_pairs_part(row, panel.count);
            else k[v] = Simd::load_pairs(row + 2 * v * W);
        }
        KV_UNROLL for (int r = 0; r < R; ++r) {
            const I weight = Simd::set1_int(q[r * kMaxSide]);
            KV_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = Simd::dot_pairs(sum[r][v], k[v], weight);
        }
    }
    next.at = ahead;
    KV_UNROLL for (int r = 0; r < R; ++r)
        KV_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = sum[r][v];
}

// Calls `body(width, partial, panel)`, the first two as types, for panels of at most V vectors covering `length`.
template <int V, typename Body>
inline void over_panels(int length, const Body& body, int from = 0) {
    for (; from + V * W <= length; from += V * W)
        body(std::integral_constant<int, V>{}, std::false_type{}, Panel{from, W});
    if constexpr (V > 1) over_panels<V / 2>(length, body, from);
    else if (from < length) body(std::integral_constant<int, 1>{}, std::true_type{}, Panel{from, length - from});
}

constexpr int kFinePairs = kMaxSide / 2;  // a row's pairs, and from here on those of what their rounding leaves
constexpr float kFineParts = 65534.0f;    // that lies in -0.5..0.5 of a unit: this makes int16 of it

// Scale `values` (count floats, padded) to int16 and pack halves side by side; returns the size of one unit.
inline float pack_halves(const float* values, int count, std::int32_t* pairs) {
    const int half = count / 2;
    F most = Simd::set1(0.0f);
    for (int i = 0; i < count; i += W) most = Simd::max(most, Simd::abs(Simd::load(values + i)));
    const float unit = Simd::hmax(most) / 32767.0f;
    const F inverse = Simd::set1(unit > 0.0f ? 1.0f / unit : 0.0f);
    for (int i = 0; i < half; i += W) {
        const I low = Simd::to_int(Simd::mul(Simd::load(values + i), inverse));
        const I high = Simd::to_int(Simd::mul(Simd::load(values + half + i), inverse));
        Simd::store_int(pairs + i, Simd::pack_pairs(low, high));
    }
    return unit;
}

// Pack what pack_halves(values, count, ...) with this unit has rounded away, in parts of a unit.
inline void pack_rests(const float* values, int count, float unit, std::int32_t* pairs) {
    const int half = count / 2;
    const F inverse = Simd::set1(unit > 0.0f ? 1.0f / unit : 0.0f), parts = Simd::set1(kFineParts);
    const auto rest = [&](const float* at) {
        const F units = Simd::mul(Simd::load(at), inverse), whole = Simd::to_float(Simd::to_int(units));
        return Simd::to_int(Simd::mul(Simd::sub(units, whole), parts));
    };
    for (int i = 0; i < half; i += W)
        Simd::store_int(pairs + i, Simd::pack_pairs(rest(values + i), rest(values + half + i)));
}

// Whether rounding q (with K's scale) to multiples of `unit` may move a score by 1e-4: codes are about 70, roundings 0.3
// units, and both of random sign. Channels of a wide range make it so.
inline bool too_coarse(float unit, int dim) { return 20.0f * unit * (20.0f * unit) * dim > 1e-8f; }

// Scores of the packed rows: `constant` plus the pairs' sums, or with `rest` the scores so far plus those of the rests.
template <int R, bool rest>
inline void pair_scores(const AttendTask& task, const Scratch& scratch, const std::uint8_t* tile, const float* unit,
                        const float* constant, Ahead& next) {
    const int dim = task.shape.dim, tokens = task.shape.tokens;
    over_panels<Simd::panel(R)>(tokens, [&](auto width, auto part, Panel panel) {
        constexpr int V = decltype(width)::value;
        I sum[R][V];
        pair_panel<R, V, decltype(part)::value>(reinterpret_cast<const std::int8_t*>(tile), dim / 2, tokens, panel,
                                                scratch.pairs + (rest ? kFinePairs : 0), sum, next);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) {
                float* at = scratch.scores + r * kMaxSide + panel.from + v * W;
                const F base = rest ? Simd::load(at) : Simd::set1(constant[r]);
                const F size = Simd::set1(rest ? unit[r] / kFineParts : unit[r]);
                Simd::store(at, Simd::fma(Simd::to_float(sum[r][v]), size, base));
            }
    });
}

template <int R>
inline void int8_scores(const AttendTask& task, const Scratch& scratch, const std::uint8_t* tile, int first,
                        Ahead& next) {
    const int dim = task.shape.dim, stride = padded(dim) + W;
    float unit[R], constant[R];
    alignas(64) float scaled[R][kMaxSide + 2 * kPad];
    bool coarse = false;
    for (int r = 0; r < R; ++r) {
        const float* query = scratch.query + (first + r) * stride;
        F sum = Simd::set1(0.0f);
        int d = 0;
        for (; d < dim; d += W) {
            const F q = Simd::load(query + d);
            Simd::store(scaled[r] + d, Simd::mul(q, Simd::load(scratch.key_scale + d)));
            sum = Simd::fma(q, Simd::load(scratch.key_zero + d), sum);
        }
        for (; d < padded(dim) + W; d += W) Simd::store(scaled[r] + d, Simd::set1(0.0f));
        constant[r] = Simd::hsum(sum);
        unit[r] = pack_halves(scaled[r], dim, scratch.pairs + r * kMaxSide);
        next.step();
        coarse = coarse || too_coarse(unit[r], dim);
    }
    pair_scores<R, false>(task, scratch, tile, unit, constant, next);
    if (!coarse) return;
    for (int r = 0; r < R; ++r) pack_rests(scaled[r], dim, unit[r], scratch.pairs + r * kMaxSide + kFinePairs);
    Ahead none{tile, 0};
    pair_scores<R, true>(task, scratch, tile, unit, constant, none);
}

template <int R>
inline void int8_values(const AttendTask& task, const Scratch& scratch, const std::uint8_t* tile, const RowTile& rows,
                        Ahead& next) {
    const int dim = task.shape.dim, tokens = task.shape.tokens, stride = padded(dim);
    const std::size_t skip = static_cast<std::size_t>(dim) * tokens;
    float unit[R];
    for (int r = 0; r < R; ++r) {
        float* weights = scratch.scores + r * kMaxSide;
        for (int t = 0; t < padded(tokens); t += W)
            Simd::store(weights + t, Simd::mul(Simd::load(weights + t), Simd::load(scratch.value_scale + t)));
        // The scale of a slot not yet written may be anything.
        for (int t = 0; t < rows.least; ++t) weights[t] = 0.0f;
        for (int t = rows.most; t < padded(tokens); ++t) weights[t] = 0.0f;
        unit[r] = pack_halves(weights, tokens, scratch.pairs + r * kMaxSide);
        next.step();
    }
    over_panels<Simd::panel(R)>(dim, [&](auto width, auto part, Panel panel) {
        constexpr int V = decltype(width)::value;
        I sum[R][V];
        pair_panel<R, V, decltype(part)::value>(reinterpret_cast<const std::int8_t*>(tile + skip), tokens / 2, dim, panel,
                                                scratch.pairs, sum, next);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) {
                float* at = task.sums + (rows.first + r) * stride + panel.from + v * W;
                const F kept = Simd::mul(Simd::load(at), Simd::set1(rows.decay[r]));
                Simd::store(at, Simd::fma(Simd::to_float(sum[r][v]), Simd::set1(unit[r]), kept));
            }
    });
}

// Turn one row's scores into weights in place, and bring its running maximum and mass up to date.
inline float soften_row(const AttendTask& task, float* scores, int row, int low, int high) {
    const int width = padded(task.shape.tokens);
    if (low >= high) {
        for (int t = 0; t < width; t += W) Simd::store(scores + t, Simd::set1(0.0f));
        return 1.0f;
    }
    if (task.soft_cap > 0.0f) {
        const F cap = Simd::set1(task.soft_cap), inverse = Simd::set1(1.0f / task.soft_cap);
        for (int t = 0; t < width; t += W)
            Simd::store(scores + t, Simd::mul(cap, tanh_vector(Simd::mul(Simd::load(scores + t), inverse))));
    }
    for (int t = 0; t < low; ++t) scores[t] = kNone;
    for (int t = high; t < width; ++t) scores[t] = kNone;
    F most = Simd::set1(kNone);
    for (int t = 0; t < width; t += W) most = Simd::max(most, Simd::load(scores + t));
    const float before = task.top[row], here = Simd::hmax(most);
    const float top = here > before ? here : before;
    const float decay = here > before ? exp_one(before - top) : 1.0f;
    F sum = Simd::set1(0.0f);
    for (int t = 0; t < width; t += W) {
        const F weight = exp_vector(Simd::sub(Simd::load(scores + t), Simd::set1(top)));
        Simd::store(scores + t, weight);
        sum = Simd::add(sum, weight);
    }
    task.top[row] = top;
    task.mass[row] = task.mass[row] * decay + Simd::hsum(sum);
    return decay;
}

// Fill in what each row of the tile sees of a block that starts at `start`; false when no row sees any of it.
inline bool see(const AttendTask& task, int start, RowTile& tile) {
    tile.least = task.shape.tokens;
    tile.most = 0;
    for (int r = 0; r < tile.count; ++r) {
        const int place = task.first_place + (tile.first + r) / task.group;
        tile.high[r] = larger(0, smaller(task.shape.tokens, place - start + 1));
        tile.low[r] = task.window > 0 ? larger(0, place - task.window + 1 - start) : 0;
        if (tile.low[r] >= tile.high[r]) continue;
        tile.least = smaller(tile.least, tile.low[r]);
        tile.most = larger(tile.most, tile.high[r]);
    }
    return tile.least < tile.most;
}

template <Format format, int R>
inline void attend_rows(const AttendTask& task, const Scratch& scratch, const std::uint8_t* tile, RowTile& rows,
                        Ahead& next) {
    const int dim = task.shape.dim, tokens = task.shape.tokens, stride = padded(dim);
    if constexpr (format == Format::int8) {
        int8_scores<R>(task, scratch, tile, rows.first, next);
    } else {
        over_panels<Simd::panel(R)>(tokens, [&](auto width, auto part, Panel panel) {
            score_panel<format, R, decltype(width)::value, decltype(part)::value>(
                tile, dim, tokens, panel, scratch.query + rows.first * (stride + W), stride + W, scratch.scores, next);
        });
    }
    for (int r = 0; r < R; ++r) {
        rows.decay[r] = soften_row(task, scratch.scores + r * kMaxSide, rows.first + r, rows.low[r], rows.high[r]);
        next.step();
    }
    if constexpr (format == Format::int8) {
        int8_values<R>(task, scratch, tile, rows, next);
    } else {
        const std::size_t skip = static_cast<std::size_t>(dim) * tokens * element_bytes(format);
        over_panels<Simd::panel(R)>(dim, [&](auto width, auto part, Panel panel) {
            value_panel<format, R, decltype(width)::value, decltype(part)::value>(
                tile + skip, dim, panel, rows, scratch.scores, task.sums + rows.first * stride, stride, next);
        });
    }
}

template <Format format>
inline void attend_tile(const AttendTask& task, const Scratch& scratch, int block) {
    const std::uint8_t* tile = task.tiles[block];
    const int dim = task.shape.dim, tokens = task.shape.tokens;
    const std::uint8_t* next_tile = block + 1 < task.blocks ? task.tiles[block + 1] : nullptr;
    const int steps = (format == Format::int8 ? 3 : 1) * smaller(task.rows, 4);
    Ahead next{tile, 0};
    if (next_tile) next = {next_tile, Ahead::share_beside(steps, 2 * dim * tokens * element_bytes(format))};
    if constexpr (format == Format::int8) {
        const std::uint8_t* params = tile + 2 * static_cast<std::size_t>(dim) * tokens;
        widen_half(params, scratch.key_scale, dim);
        widen_half(params + 2 * dim, scratch.key_zero, dim);
        widen_half(params + 4 * dim, scratch.value_scale, tokens);
        // First, not in its turn: the next tile begins with its parameters, which lie last.
        if (next_tile) prefetch(next_tile + 2 * static_cast<std::size_t>(dim) * tokens, 2 * (2 * dim + tokens));
    }
    RowTile rows{};
    for (rows.first = 0; rows.first < task.rows; rows.first += rows.count) {
        const int left = task.rows - rows.first;
        rows.count = left > 4 && left < 8 ? (left + 1) / 2 : smaller(left, 4);
        if (!see(task, task.starts[block], rows)) continue;
        switch (rows.count) {
            case 1: attend_rows<format, 1>(task, scratch, tile, rows, next); break;
            case 2: attend_rows<format, 2>(task, scratch, tile, rows, next); break;
            case 3: attend_rows<format, 3>(task, scratch, tile, rows, next); break;
            default: attend_rows<format, 4>(task, scratch, tile, rows, next); break;
        }
        next.share = 0;  // one row tile brings the next tile in
    }
}

inline Scratch cut_scratch(const AttendTask& task) {
    Scratch scratch{};
    scratch.query = task.scratch;
    scratch.scores = scratch.query + static_cast<std::size_t>(kRowChunk) * (kMaxSide + kPad);
    scratch.pairs = reinterpret_cast<std::int32_t*>(scratch.scores + 4 * kMaxSide);
    scratch.key_scale = scratch.scores + 8 * kMaxSide;
    scratch.key_zero = scratch.key_scale + kMaxSide;
    scratch.value_scale = scratch.key_zero + kMaxSide;
    return scratch;
}

void attend(const AttendTask& task) {
    const Scratch scratch = cut_scratch(task);
    const int dim = task.shape.dim, stride = padded(dim) + W;
    for (int r = 0; r < task.rows; ++r) {
        const float* from = task.query + (r / task.group) * task.query_stride + (r % task.group) * dim;
        for (int d = 0; d < dim; ++d) scratch.query[r * stride + d] = from[d] * task.scale;
        for (int d = dim; d < stride; ++d) scratch.query[r * stride + d] = 0.0f;
        for (int d = 0; d < padded(dim); ++d) task.sums[r * padded(dim) + d] = 0.0f;
        task.top[r] = kNone;
        task.mass[r] = 0.0f;
    }
    for (int i = 0; i < 4 * kMaxSide; ++i) scratch.scores[i] = 0.0f;
    for (int block = 0; block < task.blocks; ++block) {
        switch (task.shape.format) {
            case Format::fp16: attend_tile<Format::fp16>(task, scratch, block); break;
            case Format::bf16: attend_tile<Format::bf16>(task, scratch, block); break;
            case Format::fp32: attend_tile<Format::fp32>(task, scratch, block); break;
            case Format::int8: attend_tile<Format::int8>(task, scratch, block); break;
        }
    }
}
