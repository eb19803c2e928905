// Digests of blocks (digests.h) over the level's `Simd`. Included inside a level's own namespace after elements.inc.h.

// The least, the greatest and the sum of a row of numbers that come W at a time.
struct Spread {
    F low, high, sum;

    explicit Spread(F first) : low(first), high(first), sum(Simd::set1(0.0f)) {}
    void take(F filled, F part) {
        low = Simd::min(low, filled);
        high = Simd::max(high, filled);
        sum = Simd::add(sum, part);
    }
    void put(float* lows, float* highs, float* means, int count) const {
        *lows = -Simd::hmax(Simd::sub(Simd::set1(0.0f), low));
        *highs = Simd::hmax(high);
        *means = Simd::hsum(sum) / static_cast<float>(count);
    }
};

template <Format format>
inline void spread_raw(const DigestTask& task, float* lows, float* highs, float* means) {
    const int tokens = task.shape.tokens;
    for (int c = 0; c < task.shape.dim; ++c) {
        const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(c) * tokens;
        Spread spread(load_filled<format>(task.slice, row, tokens));
        for (int t = 0; t < tokens; t += W)
            spread.take(load_filled<format>(task.slice, row + t, tokens - t), load_up_to<format>(task.slice, row + t, tokens - t));
        spread.put(lows + c, highs + c, means + c, tokens);
    }
}

// Of codes first: a channel's values are `code * scale + zero` with a scale that is not negative.
inline void spread_coded(const DigestTask& task, float* lows, float* highs, float* means) {
    const int tokens = task.shape.tokens, dim = task.shape.dim, half = dim / 2;
    const auto* codes = reinterpret_cast<const std::int8_t*>(task.slice);
    for (int i = 0; i < half; ++i) {
        const std::int8_t* row = codes + 2 * static_cast<std::ptrdiff_t>(i) * tokens;
        for (int side = 0; side < 2; ++side) {
            int low = row[side], high = low, sum = 0;
            for (int t = 0; t < tokens; ++t) {
                const int code = row[2 * t + side];
                low = code < low ? code : low;
                high = code > high ? code : high;
                sum += code;
            }
            const int c = i + side * half;
            lows[c] = static_cast<float>(low);
            highs[c] = static_cast<float>(high);
            means[c] = static_cast<float>(sum) / static_cast<float>(tokens);
        }
    }
    const std::uint8_t* params = task.slice + 2 * static_cast<std::size_t>(dim) * tokens;
    for (int c = 0; c < dim; c += W) {
        const F scale = load_up_to<Format::fp16>(params, c, dim - c), zero = load_up_to<Format::fp16>(params, dim + c, dim - c);
        Simd::store(lows + c, Simd::fma(Simd::load(lows + c), scale, zero));
        Simd::store(highs + c, Simd::fma(Simd::load(highs + c), scale, zero));
        Simd::store(means + c, Simd::fma(Simd::load(means + c), scale, zero));
    }
}

void digest(const DigestTask& task) {
    float *lows = task.scratch, *highs = lows + kMaxSide, *means = highs + kMaxSide;
    switch (task.shape.format) {
        case Format::fp16: spread_raw<Format::fp16>(task, lows, highs, means); break;
        case Format::bf16: spread_raw<Format::bf16>(task, lows, highs, means); break;
        case Format::fp32: spread_raw<Format::fp32>(task, lows, highs, means); break;
        case Format::int8: spread_coded(task, lows, highs, means); break;
    }
    // Rounding to fp16 takes half of 2^-10 of a number, or of the least one that there is.
    const F slack = Simd::set1(0x1p-10f), least = Simd::set1(1e-7f), most = Simd::set1(65504.0f), under = Simd::set1(-65504.0f);
    const auto put = [&](std::uint16_t* to, int c, F x) {
        store_vector<Format::fp16>(reinterpret_cast<std::uint8_t*>(to), c, Simd::max(Simd::min(x, most), under), task.shape.dim - c);
    };
    for (int c = 0; c < task.shape.dim; c += W) {
        const F low = Simd::load(lows + c), high = Simd::load(highs + c);
        put(task.low, c, Simd::sub(Simd::sub(low, Simd::mul(Simd::abs(low), slack)), least));
        put(task.high, c, Simd::add(Simd::fma(Simd::abs(high), slack, high), least));
        put(task.mean, c, Simd::load(means + c));
    }
}

// `count` queries of one KV head against one block's digest of it.
template <int count>
inline void score_rows(const ScoreTask& task, const float* query, const std::uint8_t* low, float* most, float* middle) {
    const int dim = task.dim, row = padded(dim);
    const std::ptrdiff_t form = static_cast<std::ptrdiff_t>(task.heads) * task.group * row;
    const std::ptrdiff_t part = static_cast<std::ptrdiff_t>(task.heads) * dim;  // in elements, from low to high to mean
    F up[count], mean[count];
    for (int g = 0; g < count; ++g) up[g] = mean[g] = Simd::set1(0.0f);
    for (int d = 0; d < dim; d += W) {
        const F lows = load_up_to<Format::fp16>(low, d, dim - d), highs = load_up_to<Format::fp16>(low, part + d, dim - d);
        const F means = load_up_to<Format::fp16>(low, 2 * part + d, dim - d);
        for (int g = 0; g < count; ++g) {
            const float* q = query + g * row + d;
            mean[g] = Simd::fma(Simd::load(q), means, mean[g]);
            up[g] = Simd::fma(Simd::load(q + form), highs, up[g]);
            up[g] = Simd::fma(Simd::load(q + 2 * form), lows, up[g]);
        }
    }
    for (int g = 0; g < count; ++g) most[g] = Simd::hsum(up[g]), middle[g] = Simd::hsum(mean[g]);
}

void score(const ScoreTask& task) {
    const int row = padded(task.dim), q_heads = task.heads * task.group;
    for (int block = 0; block < task.blocks; ++block) {
        const std::uint16_t* digest = task.digests + static_cast<std::ptrdiff_t>(block) * 3 * task.heads * task.dim;
        for (int head = 0; head < task.heads; ++head) {
            const auto* low = reinterpret_cast<const std::uint8_t*>(digest + static_cast<std::ptrdiff_t>(head) * task.dim);
            for (int g = 0; g < task.group; g += 4) {
                const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(block) * q_heads + head * task.group + g;
                const float* query = task.query + static_cast<std::ptrdiff_t>(head * task.group + g) * row;
                float *most = task.most + at, *middle = task.middle + at;
                switch (smaller(task.group - g, 4)) {
                    case 1: score_rows<1>(task, query, low, most, middle); break;
                    case 2: score_rows<2>(task, query, low, most, middle); break;
                    case 3: score_rows<3>(task, query, low, most, middle); break;
                    default: score_rows<4>(task, query, low, most, middle);
                }
            }
        }
    }
}
