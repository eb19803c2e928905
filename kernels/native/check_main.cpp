// A program for the sanitizers: every kernel on every level, on buffers of exactly the size they need, against plain
// loops in double, and callers on several threads at once. check.sh builds and runs it; it prints what failed.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "copies.h"
#include "digests.h"
#include "levels.h"
#include "memory.h"
#include "paged.h"
#include "pool.h"

int check_plans();  // check_plans.cpp; it ends the process where a check fails
int check_index();         // check_index.cpp; how many of its checks failed
int check_index_reader();  // check_index_reader.cpp; likewise

namespace {

using Bytes = std::vector<std::uint8_t>;

std::atomic<int> failures{0};

void expect(bool ok, const std::string& what) {
    if (ok) return;
    ++failures;
    std::printf("FAILED: %s\n", what.c_str());
}

double half_value(std::uint16_t bits) {
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return bits & 0x8000 ? -size : size;
}

double element(const std::uint8_t* base, std::size_t index, kv::Format format) {
    if (format == kv::Format::fp32) {
        float value;
        std::memcpy(&value, base + 4 * index, 4);
        return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, base + 2 * index, 2);
    if (format == kv::Format::fp16) return half_value(bits);
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// A random finite number around 1 in the bits of `format`.
void put_random(std::uint8_t* base, std::size_t index, kv::Format format, std::mt19937& random) {
    const std::uint32_t sign = random() & 1, low = random();
    if (format == kv::Format::fp32) {
        const std::uint32_t bits = sign << 31 | (125 + low % 3) << 23 | (low >> 9);
        std::memcpy(base + 4 * index, &bits, 4);
    } else {
        const int fraction = format == kv::Format::fp16 ? 10 : 7, bias = format == kv::Format::fp16 ? 13 : 125;
        const auto bits = static_cast<std::uint16_t>(sign << 15 | (bias + low % 3) << fraction | (low >> 8) % (1u << fraction));
        std::memcpy(base + 2 * index, &bits, 2);
    }
}

struct Tokens {
    std::vector<double> key, value;  // [head][token][channel]
};

Tokens decode(const Bytes& slice, const kv::Shape& shape) {
    const std::size_t dim = shape.dim, tokens = shape.tokens, count = dim * tokens;
    Tokens found{std::vector<double>(shape.heads * count), std::vector<double>(shape.heads * count)};
    for (int head = 0; head < shape.heads; ++head) {
        const std::uint8_t* base = slice.data() + head * kv::head_bytes(shape);
        const std::uint8_t* params = base + 2 * count;
        const auto code = [&](std::size_t place) { return static_cast<double>(static_cast<std::int8_t>(base[place])); };
        for (std::size_t t = 0; t < tokens; ++t)
            for (std::size_t d = 0; d < dim; ++d) {
                double &key = found.key[head * count + t * dim + d], &value = found.value[head * count + t * dim + d];
                if (shape.format != kv::Format::int8) {
                    key = element(base, d * tokens + t, shape.format);
                    value = element(base, count + t * dim + d, shape.format);
                    continue;
                }
                const double scale = element(params, d, kv::Format::fp16), zero = element(params, dim + d, kv::Format::fp16);
                key = code(2 * (d % (dim / 2) * tokens + t) + d / (dim / 2)) * scale + zero;
                value = code(count + 2 * (t % (tokens / 2) * dim + d) + t / (tokens / 2)) *
                        element(params, 2 * dim + t, kv::Format::fp16);
            }
    }
    return found;
}

Bytes raw_slice(const kv::Shape& shape, std::mt19937& random) {
    Bytes slice(shape.heads * kv::head_bytes(shape));
    for (std::size_t i = 0; i < slice.size() / kv::element_bytes(shape.format); ++i)
        put_random(slice.data(), i, shape.format, random);
    return slice;
}

Bytes coded_slice(const kv::Level& level, const kv::Shape& raw_shape, std::mt19937& random) {
    Bytes raw = raw_slice(raw_shape, random);
    kv::Shape shape = raw_shape;
    shape.format = kv::Format::int8;
    Bytes coded(shape.heads * kv::head_bytes(shape));
    expect(kv::quantise(level, {raw_shape, raw.data(), 0, coded.data(), 0, 1}), "quantise accepts finite values");
    Bytes back(raw.size());
    kv::dequantise(level, {raw_shape, back.data(), 0, coded.data(), 0, 1});
    for (std::size_t i = 0; i < raw.size() / kv::element_bytes(raw_shape.format); ++i)
        expect(std::abs(element(raw.data(), i, raw_shape.format) - element(back.data(), i, raw_shape.format)) < 0.02,
               "a decoded value is near the encoded one");
    return coded;
}

struct Problem {
    kv::Shape shape;
    int group, queries, context, window;
};

// Attention of one sequence against double; blocks each in an allocation of exactly a slice.
void check_attention(const kv::Level& level, const Problem& problem, std::mt19937& random) {
    const kv::Shape& shape = problem.shape;
    const int blocks = (problem.context + shape.tokens - 1) / shape.tokens, heads = shape.heads * problem.group;
    std::vector<Bytes> slices;
    std::vector<std::int64_t> addresses;
    std::vector<std::int32_t> starts;
    kv::Shape raw_shape = shape;
    if (shape.format == kv::Format::int8) raw_shape.format = kv::Format::bf16;
    for (int block = 0; block < blocks; ++block) {
        slices.push_back(shape.format == kv::Format::int8 ? coded_slice(level, raw_shape, random) : raw_slice(shape, random));
        addresses.push_back(reinterpret_cast<std::int64_t>(slices.back().data()));
        starts.push_back(block * shape.tokens);
    }
    const std::vector<std::int32_t> offsets{0, problem.queries}, contexts{problem.context};
    const std::size_t rows = static_cast<std::size_t>(problem.queries) * heads;
    std::vector<float> query(rows * shape.dim), out(rows * shape.dim, NAN), lse(rows, NAN);
    for (std::size_t i = 0; i < query.size(); ++i) put_random(reinterpret_cast<std::uint8_t*>(query.data()), i, kv::Format::fp32, random);
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
    kv::paged_attention(level, {query.data(), problem.queries, heads, addresses.data(), starts.data(), offsets.data(),
                                contexts.data(), 1, blocks, 0, shape, scale, 0.0f, problem.window, out.data(), lse.data()});
    std::vector<Tokens> decoded;
    for (const Bytes& slice : slices) decoded.push_back(decode(slice, shape));
    for (std::size_t row = 0; row < rows; ++row) {
        const int place = problem.context - problem.queries + static_cast<int>(row) / heads;
        const std::size_t head = row % heads / problem.group, count = static_cast<std::size_t>(shape.dim) * shape.tokens;
        std::vector<double> sum(shape.dim);
        double mass = 0;
        for (int t = problem.window > 0 ? std::max(0, place - problem.window + 1) : 0; t <= place; ++t) {
            const std::size_t at = head * count + static_cast<std::size_t>(t % shape.tokens) * shape.dim;
            const Tokens& tokens = decoded[t / shape.tokens];
            double score = 0;
            for (int d = 0; d < shape.dim; ++d) score += query[row * shape.dim + d] * tokens.key[at + d];
            const double weight = std::exp(score * scale);
            mass += weight;
            for (int d = 0; d < shape.dim; ++d) sum[d] += weight * tokens.value[at + d];
        }
        bool close = std::abs(lse[row] - std::log(mass)) < 1e-3;
        for (int d = 0; d < shape.dim; ++d) close = close && std::abs(out[row * shape.dim + d] - sum[d] / mass) < 1e-3;
        expect(close, std::string(level.name) + ": attention agrees with double");
    }
}

// Codes, and what is decoded from them, are the same bytes on every level.
void check_codec(const kv::Level& level, const kv::Shape& shape, std::mt19937& random) {
    Bytes raw = raw_slice(shape, random);
    kv::Shape coded_shape = shape;
    coded_shape.format = kv::Format::int8;
    std::vector<Bytes> coded(2, Bytes(shape.heads * kv::head_bytes(coded_shape))), back(2, Bytes(raw.size()));
    const kv::Level* const both[] = {&level, kv::portable_level()};
    for (int i = 0; i < 2; ++i) {
        expect(kv::quantise(*both[i], {shape, raw.data(), 0, coded[i].data(), 0, 1}), "quantise accepts finite values");
        kv::dequantise(*both[i], {shape, back[i].data(), 0, coded[0].data(), 0, 1});
    }
    expect(coded[0] == coded[1] && back[0] == back[1], std::string(level.name) + ": the codec's bytes are the portable ones");
}

void check_level(const kv::Level& level, unsigned seed) {
    std::mt19937 random(seed);
    using kv::Format;
    for (const Format format : {Format::fp16, Format::bf16, Format::fp32, Format::int8})
        for (const Problem& problem : {Problem{{1, 64, 64, format}, 3, 1, 130, 0}, Problem{{2, 34, 6, format}, 1, 4, 23, 0},
                                       Problem{{1, 40, 32, format}, 5, 2, 70, 20}, Problem{{1, 250, 250, format}, 2, 1, 251, 0},
                                       Problem{{3, 128, 64, format}, 8, 12, 300, 0}, Problem{{2, 32, 64, format}, 4, 1, 8500, 0}})
            check_attention(level, problem, random);
    for (const Format format : {Format::fp16, Format::bf16, Format::fp32})
        for (const kv::Shape& shape : {kv::Shape{2, 34, 6, format}, kv::Shape{1, 128, 64, format}}) check_codec(level, shape, random);
    kv::Shape shape{2, 34, 6, Format::fp32};
    Bytes raw = raw_slice(shape, random), coded(2 * kv::head_bytes({2, 34, 6, Format::int8}));
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 7e4f}) {
        Bytes spoiled = raw;
        std::memcpy(spoiled.data() + spoiled.size() - 4, &bad, 4);
        expect(!kv::quantise(level, {shape, spoiled.data(), 0, coded.data(), 0, 1}), "a bad value is refused");
    }
}

void check_merge() {
    const std::vector<float> one(2 * 3 * 5, 1.0f), three(2 * 3 * 5, 3.0f), lse(2 * 3, 0.5f);
    std::vector<float> out(2 * 3 * 5), joined(2 * 3);
    const std::vector<const float*> outs{one.data(), three.data()}, lses{lse.data(), lse.data()};
    kv::merge({outs, lses, nullptr, 2, 3, 5, out.data(), joined.data()});
    for (const float value : out) expect(std::abs(value - 2.0f) < 1e-6f, "merge averages equal parts");
    for (const float value : joined) expect(std::abs(value - 0.5f - std::log(2.0f)) < 1e-6f, "merge adds masses");
}

std::vector<const kv::Level*> levels() {
    std::vector<const kv::Level*> found;
    for (const char* name : kv::kLevelNames)
        if (const kv::Level* level = kv::supported_level(name)) found.push_back(level);
    return found;
}

void check_memory() {
    std::mt19937 random(5);
    for (const std::size_t size : {0u, 1u, 9u, 3071u, 3072u, 3073u, 10000u}) {
        Bytes from(size), to(size);
        for (std::uint8_t& byte : from) byte = static_cast<std::uint8_t>(random());
        const std::uint32_t crc = kv::copy_crc32c(to.data(), from.data(), size, 0);
        expect(from == to && crc == kv::crc32c(from.data(), size, 0), "copy copies and sums");
        const std::size_t half = size / 2 / 8 * 8;  // apart, the tail of a block below 8 bytes would be left out
        expect(kv::read_blocks({{from.data() + half, size - half}, {from.data(), half}}) == kv::read_all(from.data(), size),
               "blocks are read to their ends, in any order");
    }
    for (const std::size_t size : {5000u, 400001u}) {
        const std::size_t slices = 3, blocks = 2, span = slices * size;
        Bytes from(blocks * span), to(blocks * span);
        for (std::uint8_t& byte : from) byte = static_cast<std::uint8_t>(random());
        std::vector<std::uint32_t> crcs(blocks * slices);
        kv::copy_slices_crc32c({{to.data(), from.data()}, {to.data() + span, from.data() + span}}, {slices, size, size, size}, crcs.data());
        bool same = from == to;
        for (std::size_t i = 0; i < crcs.size(); ++i) same = same && crcs[i] == kv::crc32c(from.data() + i * size, size, 0);
        expect(same, "slices of two blocks are copied and summed");
        Bytes apart(2 * (span + 192), 0xEE), packed(blocks * span);
        const auto slot = [&](std::size_t block) { return apart.data() + block * (span + 192) + 1; };
        kv::copy_slices({{slot(0), from.data()}, {slot(1), from.data() + span}}, {slices, size, size + 64, size}, 2);
        kv::copy_slices({{packed.data(), slot(0)}, {packed.data() + span, slot(1)}}, {slices, size, size, size + 64}, 2);
        expect(packed == from && apart[0] == 0xEE && apart[size + 1] == 0xEE, "slices are copied apart and back");
        packed.assign(blocks * span, 0xEE);
        kv::copy_slices({{packed.data(), from.data()}, {packed.data() + span, from.data() + span}}, {slices, size, size, size}, 1);
        expect(packed == from, "whole blocks are copied");
    }
    for (const kv::Level* level : levels())
        for (const kv::CopyForm* form : kv::copy_forms(*level))
            for (const std::size_t size : {1u, 63u, 3073u, 24700u}) {
                Bytes from(size), summed(size), copied(size);
                for (std::uint8_t& byte : from) byte = static_cast<std::uint8_t>(random());
                const std::uint32_t wanted = kv::crc32c(from.data(), size, 0);
                if (form->sum) expect(~form->sum(summed.data(), from.data(), size, ~0u) == wanted && summed == from, form->name);
                if (form->copy) form->copy(copied.data(), from.data(), size);
                expect(form->copy == nullptr || copied == from, form->name);
            }
    const std::string digits = "123456789";
    expect(kv::crc32c(reinterpret_cast<const std::uint8_t*>(digits.data()), 9, 0) == 0xE3069283u, "CRC-32C is the standard one");
}

// Memory of exactly the size that digests and scores may touch: what goes beyond it the sanitizer sees.
void check_digests(const kv::Level& level) {
    for (const kv::Shape shape : {kv::Shape{3, 64, 64, kv::Format::int8}, {1, 54, 18, kv::Format::int8}, {2, 5, 17, kv::Format::fp16},
                                  {2, 80, 3, kv::Format::bf16}, {1, 256, 1, kv::Format::fp32}}) {
        const std::size_t bytes = shape.heads * kv::head_bytes(shape), numbers = 3u * shape.heads * shape.dim;
        const int count = 67, group = 5;
        std::vector<std::uint8_t> slices(count * bytes, 1);
        std::vector<std::int64_t> addresses;
        for (int i = 0; i < count; ++i) addresses.push_back(reinterpret_cast<std::int64_t>(slices.data() + i * bytes));
        std::vector<std::uint16_t> digests(count * numbers, 0xFFFF);
        kv::digest_slices(level, addresses.data(), count, shape, digests.data());
        expect(std::find(digests.begin(), digests.end(), 0xFFFF) == digests.end(), "every number of a digest is written");
        std::vector<float> query(static_cast<std::size_t>(shape.heads) * group * shape.dim, 0.0f);
        std::vector<float> most(static_cast<std::size_t>(count) * shape.heads * group, 1.0f), middle = most;
        kv::digest_scores(level, {query.data(), digests.data(), count, shape.heads, group, shape.dim, most.data(), middle.data()});
        expect(std::count(most.begin(), most.end(), 0.0f) == static_cast<std::ptrdiff_t>(most.size()), "nothing scores nothing");
        expect(std::count(middle.begin(), middle.end(), 0.0f) == static_cast<std::ptrdiff_t>(middle.size()), "nothing means nothing");
    }
}

}  // namespace

int main() {
    kv::set_thread_count(2);
    for (const kv::Level* level : levels()) check_level(*level, 1);
    for (const kv::Level* level : levels()) check_digests(*level);
    check_merge();
    check_memory();
    failures += check_index() + check_index_reader();
    failures += check_plans();
    // Callers at once, and the pool's size changing under them: only the sanitizers can see these fail.
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller)
        callers.emplace_back([] {
            std::mt19937 random(7);
            for (int round = 0; round < 50; ++round) check_merge();
            for (const kv::Level* level : levels())
                check_attention(*level, {{2, 32, 64, kv::Format::int8}, 4, 1, 2500, 0}, random);
            check_memory();
        });
    for (int round = 0; round < 20; ++round) kv::set_thread_count(1 + round % 4);
    for (std::thread& caller : callers) caller.join();
    std::printf(failures == 0 ? "all checks passed\n" : "%d checks failed\n", failures.load());
    return failures == 0 ? 0 : 1;
}
