// The Python face: checks buffers, releases the GIL, calls. kernels/native.py is its only importer.
//
// Attention takes addresses, because its tensors are torch's and this file knows no torch; native.py has checked
// shapes and types. The codec and copies take buffers and check them here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "copies.h"
#include "index_face.h"
#include "levels.h"
#include "memory.h"
#include "module.h"
#include "paged.h"
#include "pool.h"

namespace py = pybind11;

namespace kv {

void bind_plans(py::module_& module);    // module_plans.cpp
void bind_digests(py::module_& module);  // module_digests.cpp

const Level& level_of(const std::string& name) {
    const Level* level = name.empty() ? &best_level() : supported_level(name);
    if (level == nullptr) throw py::value_error("level is '" + name + "'; this processor and build have others, see levels()");
    return *level;
}

Shape shape_of(const ShapeTuple& shape) {
    const auto [heads, dim, tokens, format] = shape;
    if (heads < 1 || dim < 1 || dim > kMaxSide || tokens < 1 || tokens > kMaxSide || format < 0 || format > 3)
        throw py::value_error("shape (heads, dim, tokens, format) is out of the native range");
    return {heads, dim, tokens, static_cast<Format>(format)};
}

}  // namespace kv

namespace {

using kv::level_of;
using kv::shape_of;
using kv::ShapeTuple;

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const char* name : kv::kLevelNames)
        if (kv::supported_level(name) != nullptr) names.emplace_back(name);
    return names;
}

template <typename T>
T* at(std::uintptr_t address) { return reinterpret_cast<T*>(address); }

struct PagedArguments {
    std::uintptr_t query, addresses, starts, offsets, contexts, out, lse;
    int queries, q_heads, sequences, blocks;
    std::int64_t layer_offset;
    ShapeTuple shape;
    float scale, soft_cap;
    int window;
    std::string level;
};

void paged_attention(const PagedArguments& a) {
    const kv::Level& level = level_of(a.level);
    const kv::PagedCall call{at<const float>(a.query), a.queries, a.q_heads, at<const std::int64_t>(a.addresses),
                             at<const std::int32_t>(a.starts), at<const std::int32_t>(a.offsets),
                             at<const std::int32_t>(a.contexts), a.sequences, a.blocks, a.layer_offset,
                             shape_of(a.shape), a.scale, a.soft_cap, a.window, at<float>(a.out), at<float>(a.lse)};
    const py::gil_scoped_release released;
    kv::paged_attention(level, call);
}

void merge(const std::vector<std::uintptr_t>& outs, const std::vector<std::uintptr_t>& lses, std::uintptr_t sinks,
           std::tuple<std::int64_t, int, int> shape, std::pair<std::uintptr_t, std::uintptr_t> result) {
    std::vector<const float*> from, logs;
    for (const std::uintptr_t address : outs) from.push_back(at<const float>(address));
    for (const std::uintptr_t address : lses) logs.push_back(at<const float>(address));
    if (from.size() != logs.size()) throw py::value_error("outs and lses differ in number");
    const kv::MergeCall call{from, logs, at<const float>(sinks), std::get<0>(shape), std::get<1>(shape), std::get<2>(shape),
                             at<float>(result.first), at<float>(result.second)};
    const py::gil_scoped_release released;
    kv::merge(call);
}

// A held C-contiguous buffer of bytes; the exporter can not resize it until this is gone.
class Bytes {
public:
    Bytes(const py::object& object, const char* name, bool writable) {
        const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            py::error_already_set error;
            throw py::value_error(std::string(name) + " is no " + (writable ? "writable " : "") + "C-contiguous buffer: " + error.what());
        }
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;

    std::uint8_t* data() const { return static_cast<std::uint8_t*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_{};
};

// True (encoded) or False (refused) for quantise; always True for dequantise.
bool codec(bool encode, const py::object& raw, const py::object& coded, const ShapeTuple& shape,
           std::tuple<std::int64_t, std::int64_t, int> strides, const std::string& name) {
    const kv::Level& level = level_of(name);
    const auto [raw_stride, coded_stride, count] = strides;
    const kv::Shape raw_shape = shape_of(shape);
    if (raw_shape.format == kv::Format::int8) throw py::value_error("format is int8; the codec's raw side can not be");
    kv::Shape coded_shape = raw_shape;
    coded_shape.format = kv::Format::int8;
    const Bytes from(encode ? raw : coded, encode ? "raw" : "coded", false), to(encode ? coded : raw, encode ? "coded" : "raw", true);
    const Bytes &raw_bytes = encode ? from : to, &coded_bytes = encode ? to : from;
    const auto fits = [count = count](const Bytes& bytes, std::int64_t stride, std::size_t slice) {
        return count == 0 || (stride >= static_cast<std::int64_t>(slice) &&
                              bytes.size() >= static_cast<std::size_t>(stride) * (count - 1) + slice);
    };
    if (count < 0 || !fits(raw_bytes, raw_stride, raw_shape.heads * kv::head_bytes(raw_shape)) ||
        !fits(coded_bytes, coded_stride, coded_shape.heads * kv::head_bytes(coded_shape)))
        throw py::value_error("raw or coded is too small for the slices, or its stride is below a slice");
    const kv::CodecCall call{raw_shape, raw_bytes.data(), raw_stride, coded_bytes.data(), coded_stride, count};
    const py::gil_scoped_release released;
    if (encode) return kv::quantise(level, call);
    kv::dequantise(level, call);
    return true;
}

std::uint32_t crc32c(const py::object& data, std::uint32_t crc) {
    const Bytes bytes(data, "data", false);
    const py::gil_scoped_release released;
    return kv::crc32c(bytes.data(), bytes.size(), crc);
}

std::uint64_t read_all(const py::object& data) {
    const Bytes bytes(data, "data", false);
    const py::gil_scoped_release released;
    return kv::read_all(bytes.data(), bytes.size());
}

// Blocks come as addresses: what attention reads is measured, and attention takes addresses.
std::uint64_t read_blocks(std::uintptr_t addresses, std::size_t count, std::size_t block_bytes) {
    const py::gil_scoped_release released;
    const std::int64_t* const from = at<const std::int64_t>(addresses);
    std::vector<kv::Span> blocks(count);
    for (std::size_t i = 0; i < count; ++i) blocks[i] = {at<const std::uint8_t>(from[i]), block_bytes};
    return kv::read_blocks(blocks);
}

std::uint32_t copy_crc32c(const py::object& target, const py::object& source, std::uint32_t crc) {
    const Bytes to(target, "target", true), from(source, "source", false);
    if (to.size() < from.size()) throw py::value_error("target is smaller than source");
    const py::gil_scoped_release released;
    return kv::copy_crc32c(to.data(), from.data(), from.size(), crc);
}

// Slices of many blocks and who holds their memory.
struct HeldSlices {
    std::vector<std::unique_ptr<Bytes>> held;
    std::vector<kv::SlicesCopy> blocks;
    kv::SlicesShape shape;
};

using Lengths = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>;

// `lengths` is slices, bytes of one, and the strides of target and source.
HeldSlices hold_slices(const py::list& targets, const py::list& sources, const Lengths& lengths) {
    const auto [slices, slice_bytes, to_stride, from_stride] = lengths;
    if (targets.size() != sources.size()) throw py::value_error("targets and sources differ in number");
    if (slices < 1 || slice_bytes < 1 || to_stride < slice_bytes || from_stride < slice_bytes)
        throw py::value_error("lengths has no slices, or a stride below a slice");
    if (slices > std::numeric_limits<int>::max() / (targets.size() + 1)) throw py::value_error("lengths has too many slices");
    HeldSlices found{{}, {}, {slices, slice_bytes, to_stride, from_stride}};
    const auto hold = [&found](const py::handle& object, const char* name, std::size_t stride) {
        found.held.push_back(std::make_unique<Bytes>(py::reinterpret_borrow<py::object>(object), name, name[0] == 't'));
        const std::size_t size = found.held.back()->size(), slice = found.shape.slice_bytes;
        if (size < slice || (size - slice) / stride < found.shape.slices - 1)
            throw py::value_error(std::string(name) + " is too small for the slices");
        return found.held.back()->data();
    };
    for (std::size_t i = 0; i < targets.size(); ++i) {
        std::uint8_t* const to = hold(targets[i], "target", to_stride);
        found.blocks.push_back({to, hold(sources[i], "source", from_stride)});
    }
    return found;
}

void copy_slices(const py::list& targets, const py::list& sources, const Lengths& lengths, int threads) {
    if (threads < 1) throw py::value_error("threads is " + std::to_string(threads) + "; it must be at least 1");
    const HeldSlices copies = hold_slices(targets, sources, lengths);
    const py::gil_scoped_release released;
    kv::copy_slices(copies.blocks, copies.shape, threads);
}

// From address to address; kernels/native.py has checked what it can of them.
void copy_pieces(std::uintptr_t to, std::uintptr_t from, std::size_t count, std::size_t piece_bytes, int threads) {
    if (threads < 1 || piece_bytes < 1) throw py::value_error("threads and piece_bytes must be at least 1");
    const py::gil_scoped_release released;
    kv::copy_pieces(at<const std::int64_t>(to), at<const std::int64_t>(from), count, piece_bytes, threads);
}

// The checksums of all slices as little-endian 32-bit numbers, block by block.
py::bytes copy_slices_crc32c(const py::list& targets, const py::list& sources, const Lengths& lengths) {
    const HeldSlices copies = hold_slices(targets, sources, lengths);
    std::vector<std::uint32_t> crcs(copies.blocks.size() * copies.shape.slices);
    {
        const py::gil_scoped_release released;
        kv::copy_slices_crc32c(copies.blocks, copies.shape, crcs.data());
    }
    std::string packed(4 * crcs.size(), '\0');
    for (std::size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<char>(crcs[i / 4] >> (8 * (i % 4)));
    return packed;
}

// One form of copy by its name, whether it would be chosen or not: for tests. Returns the checksum, 0 without one.
std::uint32_t copy_by(const std::string& form, const py::object& target, const py::object& source, bool summed,
                      std::uint32_t crc, const std::string& level) {
    const Bytes to(target, "target", true), from(source, "source", false);
    if (to.size() < from.size()) throw py::value_error("target is smaller than source");
    for (const kv::CopyForm* one : kv::copy_forms(level_of(level))) {
        if (form != one->name || (summed ? one->sum == nullptr : one->copy == nullptr)) continue;
        const py::gil_scoped_release released;
        if (summed) return ~one->sum(to.data(), from.data(), from.size(), ~crc);
        one->copy(to.data(), from.data(), from.size());
        return 0;
    }
    throw py::value_error("form is '" + form + "'; the level has no such copy");
}

using Speeds = std::vector<std::pair<std::string, double>>;

// (chosen form, speeds in GB/s) of small plain, small summed, large plain and large summed copies; seconds it took.
std::pair<std::vector<std::pair<std::string, Speeds>>, double> copy_choices(const std::string& level) {
    const kv::Level& of = level_of(level);
    const kv::CopyChoices* found = nullptr;
    {
        const py::gil_scoped_release released;
        found = &kv::copy_choices(of);
    }
    std::vector<std::pair<std::string, Speeds>> told;
    for (const kv::CopyChoice* one : {&found->small_plain, &found->small_summed, &found->large_plain, &found->large_summed}) {
        told.emplace_back(one->form->name, Speeds{});
        for (const kv::CopySpeed& speed : one->speeds) told.back().second.emplace_back(speed.form->name, speed.bytes_per_second / 1e9);
    }
    return {told, found->seconds};
}

void set_thread_count(int count) {
    if (count < 1 || count > 1024) throw py::value_error("count is " + std::to_string(count) + "; it must be in [1, 1024]");
    const py::gil_scoped_release released;
    kv::set_thread_count(count);
}

}  // namespace

// What kernels/native.py asks for as INTERFACE. Raise both where a function, its arguments or its meaning change.
constexpr int kInterface = 3;

PYBIND11_MODULE(_native, module) {
    module.attr("INTERFACE") = kInterface;
    module.attr("MAX_SIDE") = kv::kMaxSide;
    kv::define_index(module);
    module.def("levels", &levels);
    module.def("thread_count", &kv::thread_count);
    module.def("set_thread_count", &set_thread_count);
    module.def("paged_attention",
               [](std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t> in,
                  std::pair<std::uintptr_t, std::uintptr_t> result, std::tuple<int, int, int, int> counts,
                  std::int64_t layer_offset, const ShapeTuple& shape, std::tuple<float, float, int> options,
                  const std::string& level) {
                   paged_attention({std::get<0>(in), std::get<1>(in), std::get<2>(in), std::get<3>(in), std::get<4>(in),
                                    result.first, result.second, std::get<0>(counts), std::get<1>(counts),
                                    std::get<2>(counts), std::get<3>(counts), layer_offset, shape, std::get<0>(options),
                                    std::get<1>(options), std::get<2>(options), level});
               });
    module.def("merge", &merge);
    module.def("codec", &codec);
    module.def("crc32c", &crc32c);
    module.def("read_all", &read_all);
    module.def("read_blocks", &read_blocks);
    module.def("copy_crc32c", &copy_crc32c);
    module.def("copy_by", &copy_by);
    module.def("copy_choices", &copy_choices);
    module.def("copy_pieces", &copy_pieces);
    module.def("copy_slices", &copy_slices);
    module.def("copy_slices_crc32c", &copy_slices_crc32c);
    kv::bind_plans(module);
    kv::bind_digests(module);
}
