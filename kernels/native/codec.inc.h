// The int8 codec of docs/format-slices.md, over the level's `Simd`. Included inside a level's
// own namespace after attend.inc.h. Every operation is one the document names, so all levels give the same bytes.

constexpr float kLargest = 60000.0f;
constexpr float kInverse127 = 1.0f / 127.0f;

// A row's last vector when the row's length is no multiple of W: missing lanes repeat the first element.
template <Format format>
inline F load_filled(const std::uint8_t* base, std::ptrdiff_t index, int count) {
    if (count >= W) return load_vector<format>(base, index);
    float lanes[W], filled[W];
    const F part = load_vector_part<format>(base, index, count);
    Simd::store(lanes, part);
    Simd::store(filled, Simd::set1(lanes[0]));
    Simd::store_part(filled, part, count);
    return Simd::load(filled);
}

// Round to fp16, write it to the coded slice, and return the rounded values; -0 is stored as +0.
inline F put_half(std::uint8_t* at, int index, F x, int count) {
    const F positive = Simd::add(Simd::round_half(x), Simd::set1(0.0f));
    store_vector<Format::fp16>(at, index, positive, count);
    return positive;
}

inline F reciprocal(F scale) {
    // 1 / 0 is Inf; the comparison turns it into 0, and every other scale is at least 2^-24.
    return Simd::keep_from(Simd::div(Simd::set1(1.0f), scale), scale, Simd::set1(5.0e-8f));
}

inline I to_codes(F x, F centre, F inverse) {
    const F scaled = Simd::mul(Simd::sub(x, centre), inverse);
    return Simd::to_int(Simd::max(Simd::min(scaled, Simd::set1(127.0f)), Simd::set1(-127.0f)));
}

// Encode rows i and i + rows / 2 side by side: `centre` and `inverse` are by row.
template <Format format>
inline void encode_pairs(const std::uint8_t* from, int rows, int columns, const float* centre, const float* inverse,
                         std::int8_t* codes) {
    const int half = rows / 2;
    for (int i = 0; i < half; ++i) {
        const F low_centre = Simd::set1(centre ? centre[i] : 0.0f), low_inverse = Simd::set1(inverse[i]);
        const F high_centre = Simd::set1(centre ? centre[i + half] : 0.0f), high_inverse = Simd::set1(inverse[i + half]);
        const std::ptrdiff_t low_row = static_cast<std::ptrdiff_t>(i) * columns;
        const std::ptrdiff_t high_row = static_cast<std::ptrdiff_t>(i + half) * columns;
        for (int j = 0; j < columns; j += W) {
            const int left = columns - j;
            const I low = to_codes(load_up_to<format>(from, low_row + j, left), low_centre, low_inverse);
            const I high = to_codes(load_up_to<format>(from, high_row + j, left), high_centre, high_inverse);
            std::int8_t* at = codes + 2 * (low_row + j);
            left >= W ? Simd::store_pairs(at, low, high) : Simd::store_pairs_part(at, low, high, left);
        }
    }
}

template <Format format>
inline bool quantise_key(const CodecTask& task, std::uint8_t* params) {
    const int dim = task.shape.dim, tokens = task.shape.tokens;
    float *lows = task.scratch, *highs = lows + kMaxSide, *centre = highs + kMaxSide, *inverse = centre + kMaxSide;
    F worst = Simd::set1(0.0f);
    for (int c = 0; c < dim; ++c) {
        const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(c) * tokens;
        F low = load_filled<format>(task.raw, row, tokens), high = low;
        worst = Simd::worst(worst, low);
        for (int t = W; t < tokens; t += W) {
            const F x = load_filled<format>(task.raw, row + t, tokens - t);
            low = Simd::min(low, x);
            high = Simd::max(high, x);
            worst = Simd::worst(worst, x);
        }
        lows[c] = -Simd::hmax(Simd::sub(Simd::set1(0.0f), low));
        highs[c] = Simd::hmax(high);
    }
    if (!Simd::all_within(worst, Simd::set1(kLargest))) return false;
    for (int c = 0; c < dim; c += W) {
        const F low = Simd::load(lows + c), high = Simd::load(highs + c);
        const F zero = put_half(params + 2 * dim, c, Simd::mul(Simd::add(low, high), Simd::set1(0.5f)), dim - c);
        const F reach = Simd::max(Simd::sub(high, zero), Simd::sub(zero, low));
        const F scale = put_half(params, c, Simd::mul(reach, Simd::set1(kInverse127)), dim - c);
        Simd::store(centre + c, zero);
        Simd::store(inverse + c, reciprocal(scale));
    }
    encode_pairs<format>(task.raw, dim, tokens, centre, inverse, reinterpret_cast<std::int8_t*>(task.coded));
    return true;
}

template <Format format>
inline bool quantise_value(const CodecTask& task, const std::uint8_t* raw, std::int8_t* codes, std::uint8_t* params) {
    const int dim = task.shape.dim, tokens = task.shape.tokens;
    float *largest = task.scratch, *inverse = largest + kMaxSide;
    F worst = Simd::set1(0.0f);
    for (int t = 0; t < tokens; ++t) {
        const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(t) * dim;
        F most = Simd::set1(0.0f);
        for (int d = 0; d < dim; d += W) most = Simd::worst(most, load_up_to<format>(raw, row + d, dim - d));
        worst = Simd::worst(worst, most);
        largest[t] = Simd::hmax(most);
    }
    if (!Simd::all_within(worst, Simd::set1(kLargest))) return false;
    for (int t = 0; t < tokens; t += W) {
        const F scaled = Simd::mul(Simd::load(largest + t), Simd::set1(kInverse127));
        Simd::store(inverse + t, reciprocal(put_half(params, t, scaled, tokens - t)));
    }
    encode_pairs<format>(raw, tokens, dim, nullptr, inverse, codes);
    return true;
}

template <Format format>
inline bool quantise_head(const CodecTask& task) {
    const std::size_t count = static_cast<std::size_t>(task.shape.dim) * task.shape.tokens;
    std::uint8_t* params = task.coded + 2 * count;
    return quantise_key<format>(task, params) &&
           quantise_value<format>(task, task.raw + count * element_bytes(format),
                                  reinterpret_cast<std::int8_t*>(task.coded + count), params + 4 * task.shape.dim);
}

bool quantise(const CodecTask& task) {
    for (std::size_t i = 0; i < codec_scratch_floats(); ++i) task.scratch[i] = 0.0f;
    switch (task.shape.format) {
        case Format::fp16: return quantise_head<Format::fp16>(task);
        case Format::bf16: return quantise_head<Format::bf16>(task);
        case Format::fp32: return quantise_head<Format::fp32>(task);
        case Format::int8: break;
    }
    return false;
}

// Decode pairs of rows to `format`: value = code * scale[row] + zero[row]; rows lie one after another.
template <Format format>
inline void decode_pairs(const std::int8_t* codes, int rows, int columns, const float* scale, const float* zero,
                         std::uint8_t* to) {
    const int half = rows / 2;
    for (int i = 0; i < half; ++i) {
        const F low_scale = Simd::set1(scale[i]), low_zero = Simd::set1(zero ? zero[i] : 0.0f);
        const F high_scale = Simd::set1(scale[i + half]), high_zero = Simd::set1(zero ? zero[i + half] : 0.0f);
        const std::ptrdiff_t low_row = static_cast<std::ptrdiff_t>(i) * columns;
        const std::ptrdiff_t high_row = static_cast<std::ptrdiff_t>(i + half) * columns;
        for (int j = 0; j < columns; j += W) {
            F low, high;
            Simd::split_pairs(load_pairs_up_to(codes + 2 * (low_row + j), columns - j), low, high);
            store_vector<format>(to, low_row + j, Simd::fma(low, low_scale, low_zero), columns - j);
            store_vector<format>(to, high_row + j, Simd::fma(high, high_scale, high_zero), columns - j);
        }
    }
}

template <Format format>
inline void dequantise_head(const CodecTask& task) {
    const int dim = task.shape.dim, tokens = task.shape.tokens;
    const std::size_t count = static_cast<std::size_t>(dim) * tokens;
    const std::uint8_t* params = task.coded + 2 * count;
    float *key_scale = task.scratch, *key_zero = key_scale + kMaxSide, *value_scale = key_zero + kMaxSide;
    widen_half(params, key_scale, dim);
    widen_half(params + 2 * dim, key_zero, dim);
    widen_half(params + 4 * dim, value_scale, tokens);
    const std::int8_t* codes = reinterpret_cast<const std::int8_t*>(task.coded);
    decode_pairs<format>(codes, dim, tokens, key_scale, key_zero, task.raw);
    decode_pairs<format>(codes + count, tokens, dim, value_scale, nullptr, task.raw + count * element_bytes(format));
}

void dequantise(const CodecTask& task) {
    switch (task.shape.format) {
        case Format::fp16: return dequantise_head<Format::fp16>(task);
        case Format::bf16: return dequantise_head<Format::bf16>(task);
        case Format::fp32: return dequantise_head<Format::fp32>(task);
        case Format::int8: return;
    }
}
